"""Sequential readers: whole Arrow messages out of files, sockets, buffers and zstd streams."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import zstandard

from ragged_format.errors import (
    CorruptError,
    LimitExceededError,
    NotRaggedError,
    RaggedError,
    TruncatedError,
    UnsupportedFeatureError,
)
from ragged_format.flatbuffer import Header, parse_header, prefix_size

__all__ = [
    "ByteSource",
    "Message",
    "byte_sink",
    "byte_source",
    "describe",
    "next_body",
    "next_head",
    "only_message",
    "skip_body",
]

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Window that a zstd frame may ask for; the default levels of zstd stay below 8 MiB.
_MAX_WINDOW = 128 << 20


class Message(NamedTuple):
    """One message: all its bytes, its flatbuffer and what that says, its body, aligned to 8."""

    buffer: pa.Buffer
    flatbuffer: bytes | memoryview
    header: Header
    body: memoryview


class ByteSource(Protocol):
    """Bytes in order; short results only at the end."""

    position: int

    def read(self, size: int) -> bytes | memoryview:
        """Return the next `size` bytes, fewer only at the end of the data."""
        ...

    def message(self, head: bytes, size: int) -> tuple[pa.Buffer, memoryview] | None:
        """Return `head`, just read, and the next `size` bytes as one buffer, and a view of these.

        They begin at a multiple of 8 in memory. None if the data ends earlier.
        """
        ...

    def close(self) -> None:
        """Leave the underlying object behind the last byte read; it stays open."""
        ...


class BufferSource:
    """Bytes in memory; messages are views where their body is aligned."""

    def __init__(self, buffer: pa.Buffer) -> None:
        self.position = 0
        self._buffer = buffer
        self._view = memoryview(buffer).cast("B")

    def read(self, size: int) -> memoryview:
        start = self.position
        out = self._view[start : start + size]
        self.position = start + len(out)
        return out

    def message(self, head: bytes, size: int) -> tuple[pa.Buffer, memoryview] | None:
        start = self.position
        if len(self._view) - start < size:
            self.position = len(self._view)
            return None
        self.position = start + size
        body = self._view[start : start + size]
        if (self._buffer.address + start) % 8 == 0:
            return self._buffer.slice(start - len(head), len(head) + size), body
        buffer, view = _allocate(head, size)
        view[:] = body
        return buffer, view

    def close(self) -> None:
        pass


class BytesIOSource(BufferSource):
    """A ``BytesIO``: its bytes do not change when it is written to, so that views are safe."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(pa.py_buffer(file.getvalue()))
        self.position = file.tell()
        self._file: io.BytesIO | None = file

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.seek(self.position)
        self._file = None  # later calls must not move it again


class FileSource:
    """A binary file object of any kind; only its ``readinto`` or ``read`` is called."""

    def __init__(self, file: Any, peeked: bytes = b"") -> None:
        self.position = 0
        self._file = file
        self._peeked = peeked
        self._readinto = getattr(file, "readinto", None)

    def read(self, size: int) -> bytes | memoryview:
        out = memoryview(bytearray(size))
        return out[: self._fill(out)]

    def message(self, head: bytes, size: int) -> tuple[pa.Buffer, memoryview] | None:
        buffer, view = _allocate(head, size)
        return (buffer, view) if self._fill(view) == size else None

    def close(self) -> None:
        pass

    def _fill(self, out: memoryview) -> int:
        done = 0
        if self._peeked:
            done = min(len(out), len(self._peeked))
            out[:done] = self._peeked[:done]
            self._peeked = self._peeked[done:]
        while done < len(out):
            try:
                got = self._some(out[done:])
            except Exception as err:
                if (broken := _broken_below(err)) is None:
                    raise
                raise broken from err
            if got is None:
                raise _non_blocking("source", "gives")
            if not got:
                break
            done += got
        self.position += done
        return done

    def _some(self, out: memoryview) -> int | None:
        if self._readinto is not None:
            got: int | None = self._readinto(out)
            return got
        data = _bytes(self._file.read(len(out)))
        if data is None:
            return None
        out[: len(data)] = data
        return len(data)


class _ZstdFile:
    """The content of a zstd source; memory stays bounded by the window."""

    def __init__(self, file: Any) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._reader = decompressor.stream_reader(file, read_across_frames=True)

    def readinto(self, out: memoryview) -> int:
        try:
            return int(self._reader.readinto(out))
        except zstandard.ZstdError as err:
            if "too much memory" in str(err):
                raise LimitExceededError(
                    "a zstd frame has too large a window", expected=f"<= {_MAX_WINDOW} bytes",
                    got=str(err), remedy="compress it with a window log of at most 27",
                ) from err  # fmt: skip
            raise CorruptError(
                "the zstd data is corrupt", expected="whole zstd frames", got=str(err)
            ) from err


class _Peeked:
    """A file object with some bytes put back."""

    def __init__(self, file: Any, peeked: bytes) -> None:
        self._file = file
        self._peeked = peeked

    def read(self, size: int) -> bytes:
        if self._peeked:
            out, self._peeked = self._peeked[:size], self._peeked[size:]
            return out
        return bytes(self._file.read(size))


def _bytes(data: Any) -> bytes | memoryview | None:
    """Return what ``read`` returned, None if that was None."""
    try:
        return None if data is None else memoryview(data).cast("B")
    except TypeError as err:
        raise _not_binary(data) from err


# How file objects that decompress or receive say that their own bytes end early or are damaged. By
# name, so that none of the modules is imported for it.
_ENDS_EARLY = {
    "builtins.EOFError",
    "http.client.IncompleteRead",
    "urllib3.exceptions.ProtocolError",
}
_DAMAGED = {"zlib.error", "_lzma.LZMAError", "gzip.BadGzipFile", "zipfile.BadZipFile"}


def _broken_below(err: Exception) -> RaggedError | None:
    """Return the error for bad bytes below a file object; None where it tells of anything else."""
    if isinstance(err, RaggedError):
        return None
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(err).__mro__}
    got = f"{type(err).__name__}: {err}"
    if names & _ENDS_EARLY:
        return TruncatedError(
            "the source says that its data ends early", expected="whole data", got=got,
            remedy="fetch it again; its writer or the transport stopped early",
        )  # fmt: skip
    # bz2 has no class of its own, and names no error of the operating system.
    is_bz2 = type(err) is OSError and err.errno is None
    if is_bz2 or names & _DAMAGED or isinstance(err, zstandard.ZstdError):
        return CorruptError(
            "the source says that its data is damaged", expected="whole data", got=got
        )
    return None


def _not_binary(source: object) -> NotRaggedError:
    return NotRaggedError(
        "the source gives no bytes", expected="a path, bytes or a binary file object",
        got=type(source).__name__,
        remedy="open files in mode 'rb', and sockets with makefile('rb')",
    )  # fmt: skip


def _non_blocking(what: str, does: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"the {what} is non-blocking and {does} nothing now", expected=f"a {what} that waits",
        got="None", remedy="make it blocking, with a timeout if need be",
    )  # fmt: skip


def byte_sink(sink: Any) -> Callable[[bytes | memoryview], object]:
    """Return what writes all of some bytes to a binary file object.

    Raises
    ------
    UnsupportedFeatureError
        The object takes no bytes (``RF-V002``); when it is used, also if it is non-blocking.
    """
    write = getattr(sink, "write", None)
    if write is None or isinstance(sink, io.TextIOBase):
        raise UnsupportedFeatureError(
            "the sink takes no bytes", expected="a path or a binary file object",
            got=type(sink).__name__,
            remedy="open files in mode 'wb', and sockets with makefile('wb')",
        )  # fmt: skip
    if not isinstance(sink, io.RawIOBase):
        return write  # type: ignore[no-any-return]

    def write_all(data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:  # a raw file may take a part only
            taken = write(view)
            if not taken:
                raise _non_blocking("sink", "takes")
            view = view[taken:]

    return write_all


def byte_source(source: Any) -> ByteSource:
    """Return a sequential reader of bytes-like data or of a binary file object.

    Data that begins with a zstd frame is decompressed while it is read.

    Parameters
    ----------
    source : bytes-like, pyarrow.Buffer or binary file object
        A file object needs ``read`` only; it need not seek.

    Raises
    ------
    NotRaggedError
        The object gives no bytes (``RF-S001``).
    """
    if isinstance(source, io.TextIOBase):
        raise _not_binary(source)
    if getattr(source, "closed", False) is True:
        raise NotRaggedError(
            "the source is closed", expected="an open file object", got=type(source).__name__
        )
    if type(source) is io.BytesIO:
        start = source.tell()
        if source.getvalue()[start : start + 4] != ZSTD_MAGIC:
            return BytesIOSource(source)
    if hasattr(source, "read"):
        peeked = bytes(FileSource(source).read(4))
        if peeked == ZSTD_MAGIC:
            return FileSource(_ZstdFile(_Peeked(source, peeked)))
        return FileSource(source, peeked)
    try:
        buffer = source if isinstance(source, pa.Buffer) else pa.py_buffer(source)
    except TypeError as err:
        raise _not_binary(source) from err
    if bytes(buffer[:4]) == ZSTD_MAGIC:
        return FileSource(_ZstdFile(pa.BufferReader(buffer)))
    return BufferSource(buffer)


def next_head(source: ByteSource, prefix: bytes | memoryview, *, max_bytes: int) -> bytes | None:
    """Return the head of the message that begins with the 8 bytes just read: mark to metadata.

    Returns None for the end-of-stream mark.

    Raises
    ------
    TruncatedError
        The data ends inside the head.
    LimitExceededError
        The head is larger than `max_bytes`; nothing was allocated for it.
    CorruptError
        The bytes are not a mark and a size.
    """
    if len(prefix) < 8:
        raise _cut("the first bytes", 8, len(prefix))
    size = prefix_size(prefix)
    if not size:
        return None
    if 8 + size > max_bytes:
        raise _too_large(max_bytes, 8 + size)
    metadata = source.read(size)
    if len(metadata) < size:
        raise _cut("the metadata", size, len(metadata))
    return b"".join((prefix, metadata))


def next_body(source: ByteSource, head: bytes, *, max_bytes: int) -> Message:
    """Return the message that has this head, just read.

    Raises
    ------
    TruncatedError
        The data ends inside the body.
    LimitExceededError
        The message is larger than `max_bytes`; nothing was allocated for it.
    CorruptError
        Its metadata is malformed.
    """
    flatbuffer = memoryview(head)[8:]
    header = parse_header(flatbuffer)
    if len(head) + header.body_bytes > max_bytes:
        raise _too_large(max_bytes, len(head) + header.body_bytes)
    start = source.position
    whole = source.message(head, header.body_bytes)
    if whole is None:
        raise _cut("the body", header.body_bytes, source.position - start)
    buffer, body = whole
    return Message(buffer, flatbuffer, header, body)


def only_message(buffer: pa.Buffer) -> Message:
    """Return the message that a buffer of a file holds; other errors as :func:`next_body`.

    Raises
    ------
    CorruptError
        There is no message, or something behind it.
    """
    size = len(buffer)
    source = BufferSource(buffer)
    head = next_head(source, source.read(8), max_bytes=size)
    message = None if head is None else next_body(source, head, max_bytes=size)
    if message is None or source.position != size:
        raise CorruptError(
            "the footer does not fit a message", expected=f"{size} bytes", got=source.position,
            remedy="restore the file from a copy",
        )  # fmt: skip
    return message


def skip_body(source: ByteSource, size: int) -> None:
    """Read a body of `size` bytes that has no content; raises if the data ends inside it."""
    got = len(source.read(size))
    if got < size:
        raise _cut("the body", size, got)


def _cut(part: str, expected: int, got: int) -> TruncatedError:
    return TruncatedError(
        f"the data ends inside {part} of a message",
        expected=f"{expected} bytes", got=f"{got} bytes",
        remedy="fetch it again; its writer or the transport stopped early",
    )  # fmt: skip


def _too_large(limit: int, size: int) -> LimitExceededError:
    return LimitExceededError(
        "a message is larger than the limit",
        expected=f"<= {limit} bytes", got=size, remedy="raise max_message_bytes",
    )  # fmt: skip


_MAGIC = {
    b"ARROW1": "an Arrow IPC file",
    b"PAR1": "a Parquet file",
    b"FEA1": "a Feather version 1 file",
    ZSTD_MAGIC: "zstd data",
    b"\x1f\x8b": "gzip data",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xff\xff\xff": "an Arrow IPC stream",
}


def describe(head: bytes) -> str:
    """Return what data with these first bytes seems to be."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON text"
    return f"bytes {head[:8].hex(' ')}" if head else "no bytes"


def _allocate(head: bytes, size: int) -> tuple[pa.Buffer, memoryview]:
    """Return memory that begins with `head`, and a view of what follows, at a multiple of 64."""
    shift = -len(head) % 64
    start = shift + len(head)
    buffer = pa.allocate_buffer(start + size)
    view = memoryview(buffer).cast("B")
    view[shift:start] = head
    return buffer.slice(shift), view[start:]
