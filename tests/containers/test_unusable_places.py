"""Places where nothing can be written are wrong arguments: each writer says so in our errors."""

import errno
import os
from pathlib import Path

import pytest
from support.containers import small_batch, small_schema

import ragged_format as rf
from ragged_format.compact.files import CompactWriter
from ragged_format.local_files import create


def created(path):
    with create(path) as file:
        file.write(b"x")


def written(path):
    with rf.Writer(path, small_schema()) as writer:
        writer.write(small_batch())


FILES = {
    "write_stream": lambda path: rf.write_stream(path, [small_batch()]),
    "write_file": lambda path: rf.write_file(path, [small_batch()]),
    "StreamWriter": lambda path: rf.StreamWriter(path, small_schema()),
    "FileWriter": lambda path: rf.FileWriter(path, small_schema()),
    "CompactWriter": lambda path: CompactWriter(path, small_schema()),
    "create": created,
}
DATASETS = {"Writer": written}
ALL = {**FILES, **DATASETS}


@pytest.mark.parametrize("name", FILES)
def test_the_directory_of_a_file_is_missing(tmp_path, name):
    with pytest.raises(rf.DatasetNotFoundError, match="does not exist") as caught:
        FILES[name](tmp_path / "missing" / "x")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.where.file == str(tmp_path / "missing" / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ALL)
def test_a_file_lies_where_a_directory_is_to_be(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(rf.DatasetExistsError, match="a file where a directory is to be"):
        ALL[name](tmp_path / "file" / "x")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_dataset_makes_its_directories(tmp_path):
    written(tmp_path / "missing" / "too" / "x")
    assert len(rf.Dataset(tmp_path / "missing" / "too" / "x")) > 0


def refuse(monkeypatch, number):
    """Let nothing be made; what is there can be read."""
    inner = Path.open

    def opened(path, mode="r", *arguments, **options):
        if "x" in mode:
            raise OSError(number, os.strerror(number))
        return inner(path, mode, *arguments, **options)

    def made(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "mkdir", made)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_the_system_allows_nothing_to_be_made(tmp_path, monkeypatch, name, number):
    """Root may write everywhere, so that the refusal is made here."""
    refuse(monkeypatch, number)
    with pytest.raises(rf.StorageError, match=os.strerror(number)) as caught:
        ALL[name](tmp_path / "x")
    assert caught.value.errno == number
    assert caught.value.where.file == str(tmp_path / "x")
    assert caught.value.remedy


@pytest.mark.parametrize("name", FILES)
def test_a_name_that_is_too_long(tmp_path, name):
    with pytest.raises(rf.StorageError) as caught:
        ALL[name](tmp_path / ("x" * 300))
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_errors_of_the_machine_stay_its_own(tmp_path, monkeypatch, name, number):
    refuse(monkeypatch, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        ALL[name](tmp_path / "x")
    assert not isinstance(caught.value, rf.RaggedError)
    assert caught.value.errno == number
