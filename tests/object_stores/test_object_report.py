"""A report of a dataset in an object store."""

import ragged_format as rf
from ragged_pipeline.reports import report

URL = "s3://rollouts/runs/one"


def test_figures_are_those_of_the_same_records_on_disk(s3, options, samples, tmp_path):
    kwargs = {"batch_rows": 5, "max_shard_bytes": 1}
    with rf.Writer(URL, samples.schema, storage_options=options, **kwargs) as writer:
        writer.write(samples)
    with rf.Writer(tmp_path / "one", samples.schema, **kwargs) as writer:
        writer.write(samples)
    page = tmp_path / "report.html"
    found = report(rf.Dataset(URL, storage_options=options), page, workers=2).statistics
    local = report(tmp_path / "one", workers=1).statistics
    assert found["source"]["name"] == "rollouts/runs/one"
    assert {k: v for k, v in found.items() if k != "source"} == {
        k: v for k, v in local.items() if k != "source"
    }
    assert options["secret_access_key"] not in page.read_text()
