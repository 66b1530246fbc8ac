"""One door: what is behind it follows from its content."""

import io
import os
import sys
import threading
from importlib.metadata import EntryPoint

import pytest
import zstandard
from support.containers import equal, small_schema, stream_bytes, three_batches

import ragged_format as rf
import ragged_format.sources


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    batches = three_batches()
    with rf.Writer(folder / "data", batches[0].schema, batch_rows=3) as writer:
        writer.write(batches)
    rf.write_file(folder / "file.bin", batches)
    (folder / "stream.arrow").write_bytes(stream_bytes(batches))
    (folder / "packed").write_bytes(zstandard.compress(stream_bytes(batches)))
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("data", rf.Dataset, 9),
        ("file.bin", rf.FileReader, 9),
        ("stream.arrow", rf.StreamReader, None),
        ("packed", rf.StreamReader, None),
    ],
)
def test_every_place(places, name, kind, rows):
    batches = three_batches()
    for text in (places / name, str(places / name), (places / name).as_uri()):
        source = rf.open_source(text)
        assert isinstance(source, kind)
        assert isinstance(source, rf.Source)
        assert source.num_rows == rows
        assert source.is_random_access == (rows is not None)
        assert source.schema.equals(batches[0].schema, check_metadata=True)
        assert source.ragged_schema == rf.parse_schema(batches[0].schema)
        assert equal(list(source.batches()), batches)
    names = ["completion_mask", "candidate_counts", "candidate_ids"]
    first = next(iter(rf.open_source(places / name).batches(columns=["candidate_ids"])))
    assert first.equals(batches[0].select(names))


def test_file_objects_and_standard_input(monkeypatch):
    batches = three_batches()
    source = rf.open_source(io.BytesIO(stream_bytes(batches)))
    assert equal(list(source.batches()), batches)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stream_bytes(batches))))
    assert equal(list(rf.open_source("-").batches()), batches)


def test_pipes(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    batches = three_batches()
    thread = threading.Thread(target=path.write_bytes, args=(stream_bytes(batches),))
    thread.start()
    assert equal(list(rf.open_source(path).batches()), batches)
    thread.join()


def test_nothing_and_other_things(tmp_path):
    with pytest.raises(rf.DatasetNotFoundError, match="RF-C008"):
        rf.open_source(tmp_path / "none")
    with pytest.raises(rf.DatasetNotFoundError, match="no manifest"):
        rf.open_source(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(rf.TruncatedError, match="empty"):
        rf.open_source(tmp_path / "empty")
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2]}')
    with pytest.raises(rf.NotRaggedError, match="JSON text"):
        rf.open_source(tmp_path / "a.json")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(20))
    with pytest.raises(rf.NotRaggedError, match="Parquet"):
        rf.open_source(tmp_path / "a.parquet")


def test_schemes(monkeypatch):
    with pytest.raises(rf.UnsupportedFeatureError, match="file://") as caught:
        rf.open_source("gopher://a/b")
    assert caught.value.got == "gopher://a/b"
    with pytest.raises(rf.UnsupportedFeatureError, match="not on this machine"):
        rf.open_source("file://elsewhere/data")
    monkeypatch.setattr("ragged_format.sources._openers", {})
    monkeypatch.setattr("ragged_format.sources._entries", dict)
    monkeypatch.setattr("ragged_format.storage._entries", dict)
    opened = []

    def opener(url):
        opened.append(url)
        return rf.read_stream(stream_bytes([], small_schema()))

    rf.register_scheme("Memory", opener)
    assert rf.open_source("memory://a/b").num_rows is None
    assert rf.open_source("MEMORY://c").num_rows is None
    assert opened == ["memory://a/b", "MEMORY://c"]
    with pytest.raises(rf.UnsupportedFeatureError, match="file://, memory://"):
        rf.open_source("other://a")


def test_schemes_of_other_packages(monkeypatch, tmp_path):
    """An entry point opens its scheme; it is imported when a URL needs it."""
    module = "opener_of_a_scheme"
    (tmp_path / f"{module}.py").write_text(
        "import ragged_format as rf\ndef open_url(url): return rf.Dataset(url.split('//')[1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        EntryPoint("Fake", f"{module}:open_url", "ragged_format.schemes"),
        EntryPoint("needy", "a_module_that_is_not_installed:open_url", "ragged_format.schemes"),
    ]
    monkeypatch.setattr("ragged_format.sources.entry_points", lambda group: entries)
    monkeypatch.setattr(
        "ragged_format.sources._entries", ragged_format.sources._entries.__wrapped__
    )
    monkeypatch.setattr("ragged_format.sources._openers", {})
    monkeypatch.setattr("ragged_format.storage._entries", dict)
    with pytest.raises(rf.UnsupportedFeatureError, match="fake://, file://, needy://"):
        rf.open_source("other://a")
    assert module not in sys.modules
    with pytest.raises(rf.DatasetNotFoundError, match="RF-C008"):
        rf.open_source("fake://nothing")
    with pytest.raises(rf.MissingDependencyError, match="a_module_that_is_not_installed"):
        rf.open_source("needy://a")
    rf.register_scheme("fake", lambda url: rf.StreamReader(stream_bytes(three_batches())))
    assert sum(batch.num_rows for batch in rf.open_source("fake://x").batches()) == 9
