"""Bad bytes below a file object that decompresses or receives are errors of this library too."""

import bz2
import gzip
import http.client
import io
import lzma
import zipfile
import zlib

import pytest
import zstandard
from support.containers import equal, small_batch, stream_bytes

import ragged_format as rf

BATCHES = [small_batch((2, 1), seed=i, prefix=f"{i}-") for i in range(2)]
STREAM = stream_bytes(BATCHES)
HALF = len(STREAM) // 2


def zipped(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("stream", data)
    return out.getvalue()


def in_zip(file):
    return zipfile.ZipFile(file).open("stream")


def as_zstd(file):
    return zstandard.ZstdDecompressor().stream_reader(file)


FORMS = {
    "gzip": (gzip.compress, lambda file: gzip.GzipFile(fileobj=file)),
    "bz2": (bz2.compress, bz2.BZ2File),
    "xz": (lzma.compress, lzma.LZMAFile),
    "zstd": (zstandard.compress, as_zstd),
}


def opened(form, data):
    return FORMS[form][1](io.BytesIO(data))


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_one_is_read(form):
    assert equal(list(rf.read_stream(opened(form, FORMS[form][0](STREAM)))), BATCHES)


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_one_is_truncated_or_corrupt(form):
    whole = FORMS[form][0](STREAM)
    for size in range(1, len(whole) - 30, max(1, len(whole) // 50)):
        with pytest.raises((rf.TruncatedError, rf.CorruptError)):
            list(rf.read_stream(opened(form, whole[:size])))


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_byte_is_an_error_or_has_no_effect(form):
    whole = FORMS[form][0](STREAM)
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        try:
            got = list(rf.read_stream(opened(form, bytes(damaged))))
        except rf.RaggedError:
            continue
        assert equal(got, BATCHES)


def test_a_member_of_a_damaged_archive_is_corrupt():
    whole = zipped(STREAM)
    assert equal(list(rf.read_stream(in_zip(io.BytesIO(whole)))), BATCHES)
    damaged = whole.replace(zlib.crc32(STREAM).to_bytes(4, "little"), bytes(4))
    with pytest.raises(rf.CorruptError, match="damaged") as caught:
        list(rf.read_stream(in_zip(io.BytesIO(damaged))))
    assert isinstance(caught.value.__cause__, zipfile.BadZipFile)


class Reader:
    """A file object that gives a part of the stream, then raises."""

    def __init__(self, error, size=HALF):
        self.error, self.file = error, io.BytesIO(STREAM[:size])

    def read(self, size):
        data = self.file.read(size)
        if len(data) < size:
            raise self.error
        return data


def test_an_answer_that_breaks_off_is_truncated():
    error = http.client.IncompleteRead(b"", 12)
    reader = rf.read_stream(Reader(error))
    for _ in range(2):  # also when it is asked again
        with pytest.raises(rf.TruncatedError, match="ends early") as caught:
            list(reader)
        assert caught.value.__cause__ is error
    with pytest.raises(rf.TruncatedError, match="ends early"):
        rf.read_stream(Reader(error, size=2))


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError(104, "reset")])
def test_what_says_nothing_of_the_bytes_passes_through(error):
    with pytest.raises(type(error)):
        list(rf.read_stream(Reader(error)))


@pytest.mark.parametrize("kind", [io.BytesIO, lambda data: io.BufferedReader(io.BytesIO(data))])
def test_a_closed_file_is_no_source(kind):
    file = kind(STREAM)
    file.close()
    with pytest.raises(rf.NotRaggedError, match="closed"):
        rf.read_stream(file)
