"""Reading engine output: JSON and JSON lines, plain or compressed, whole or damaged."""

import gzip
import io
import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ragged_format import record_files as inputs
from ragged_format.errors import (
    ConversionError,
    CorruptError,
    DatasetNotFoundError,
    LimitExceededError,
    TruncatedError,
)
from ragged_format.record_files import find_inputs, read_lines, total_bytes

RECORDS = [{"n": number, "text": "é" * number} for number in range(50)]
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read(*files):
    return [
        json.loads(line.record) if isinstance(line.record, bytes) else line.record
        for line in read_lines(map(str, files), lambda size: None)
    ]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
def test_lines_come_back_however_they_are_stored_and_cut(tmp_path, monkeypatch, packed, chunk):
    monkeypatch.setattr(inputs, "_CHUNK", max(chunk, 4))
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(PACK[packed](lines(RECORDS)))
    assert read(file) == RECORDS


@pytest.mark.parametrize("packed", PACK)
def test_a_json_file_holds_one_record_or_a_list(tmp_path, packed):
    file = tmp_path / f"a.json{packed}"
    file.write_bytes(PACK[packed](json.dumps(RECORDS, indent=1).encode()))
    assert read(file) == RECORDS
    file.write_bytes(PACK[packed](json.dumps(RECORDS[3], indent=1).encode()))
    assert read(file) == RECORDS[3:4]


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_compressed_members_may_follow_each_other(tmp_path, packed):
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(PACK[packed](lines(RECORDS[:20])) + PACK[packed](lines(RECORDS[20:])))
    assert read(file) == RECORDS


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_a_compressed_file_that_ends_early_is_an_error(tmp_path, packed, share):
    whole = PACK[packed](lines(RECORDS))
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TruncatedError) as caught:
        read(file)
    assert caught.value.where.file == str(file)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_an_error(tmp_path, packed):
    damaged = bytearray(PACK[packed](lines(RECORDS)))
    damaged[len(damaged) // 2 : len(damaged) // 2 + 8] = b"\xff" * 8
    file = tmp_path / f"a.jsonl{packed}"
    file.write_bytes(damaged)
    with pytest.raises(CorruptError):
        read(file)


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"))), st.data())
def test_lines_are_split_as_python_splits_them(texts, data):
    whole = "\n".join(texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert list(inputs._lines(chunks, "-")) == whole.split(b"\n")


def test_empty_lines_are_skipped_and_do_not_move_places(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"n": 1}\n  \r\n{"n": 2}')
    found = list(read_lines([str(file)], lambda size: None))
    assert [(line.where.row, json.loads(line.record)["n"]) for line in found] == [(1, 1), (3, 2)]


def test_an_empty_file_has_no_records(tmp_path):
    file = tmp_path / "a.jsonl"
    file.touch()
    assert read(file) == []


def test_a_json_file_that_is_nested_too_deeply_is_an_error(tmp_path):
    (tmp_path / "a.json").write_bytes(b"[" * 200_000 + b"]" * 200_000)
    with pytest.raises(ConversionError, match="not JSON"):
        read(tmp_path / "a.json")


def test_a_json_file_that_is_not_json_is_an_error(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(lines(RECORDS))
    with pytest.raises(ConversionError, match=r"\.jsonl"):
        read(file)


def test_an_endless_line_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 100)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b" " * 101)
    with pytest.raises(LimitExceededError):
        read(file)


def test_standard_input_is_read_and_left_open(monkeypatch):
    stdin = io.BytesIO(gzip.compress(lines(RECORDS)))
    monkeypatch.setattr(inputs.sys, "stdin", io.TextIOWrapper(stdin))
    assert read("-") == RECORDS
    assert not stdin.closed
    assert total_bytes(["-"]) is None


def test_progress_reports_every_byte_read(tmp_path):
    files = []
    for number, packed in enumerate(PACK):
        files.append(str(tmp_path / f"{number}.jsonl{packed}"))
        (tmp_path / f"{number}.jsonl{packed}").write_bytes(PACK[packed](lines(RECORDS)))
    sizes = []
    for _ in read_lines(files, sizes.append):
        pass
    assert sum(sizes) == total_bytes(files)


def test_a_directory_stands_for_its_json_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c.jsonl.zst", "b/a.ndjson", "a.json", "notes.txt", "x.arrow"):
        (tmp_path / name).touch()
    assert find_inputs([str(tmp_path)]) == [
        str(tmp_path / name) for name in ("a.json", "b/a.ndjson", "c.jsonl.zst")
    ]


def test_a_directory_whose_name_ends_like_a_file_is_none(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "a.jsonl" / "b.jsonl").touch()
    assert find_inputs([str(tmp_path)]) == [str(tmp_path / "a.jsonl" / "b.jsonl")]


def test_a_directory_is_one_input_where_nothing_else_is_asked_for(tmp_path):
    (tmp_path / "a.n").touch()
    (tmp_path / "a.n.gz").touch()
    assert find_inputs([str(tmp_path)], ()) == [str(tmp_path)]
    assert find_inputs([str(tmp_path)], (".n",)) == [str(tmp_path / "a.n")]


def test_a_named_file_is_read_whatever_its_name(tmp_path):
    (tmp_path / "log.txt").touch()
    assert find_inputs([str(tmp_path / "log.txt"), "-"]) == [str(tmp_path / "log.txt"), "-"]


def test_missing_and_empty_inputs_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DatasetNotFoundError) as caught:
            find_inputs([str(path)])
        assert caught.value.where.file == str(path)
