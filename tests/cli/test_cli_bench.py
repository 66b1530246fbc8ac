"""`ragged bench`: the benchmarks of the source tree as a command."""

import ragged_format as rf


def test_a_benchmark_runs_and_its_figures_are_json(invoke_json):
    data = invoke_json("bench", "row_bytes", "--quick")
    assert data["quick"] is True
    assert data["environment"]["cores"] >= 1
    assert [figure["name"] for figure in data["figures"]["row_bytes"]]


def test_a_benchmark_that_does_not_exist_is_wrong_usage(invoke_json):
    data = invoke_json("bench", "pack", "nothing", exit_code=2)
    assert data["error"] == "UsageError"
    text = " ".join(str(value) for value in data.values())
    assert "no such benchmark: nothing" in text
    assert "row_bytes" in text


def test_an_installed_package_has_no_benchmarks(invoke_json, monkeypatch, tmp_path):
    monkeypatch.setattr(rf, "__file__", str(tmp_path / "ragged_format" / "__init__.py"))
    data = invoke_json("bench", exit_code=1)
    assert data["code"] == "RF-D001"
    assert "clone" in data["remedy"]
