"""TransferQueue's packed messages: MessagePack whose arrays lie in buffers beside it.

A packed buffer is a number of items, the offset and size of each, and the items; all three are
uint32. Item 0 is MessagePack; an array in it is an extension whose body is a pickled (type, shape,
item). Such a body is read without running anything in it: only numbers, text and containers.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._msgpack import load_msgspec
from ragged_format.errors import ConversionError, Where

__all__ = ["Jagged", "decode", "encode", "split"]

_TENSOR, _NESTED, _NUMPY = 3, 4, 5
_PICKLED = "\xc1\xfe\xed".encode("latin-1")  # begins a message that is pickled as a whole
_HEADER, _ENTRY = struct.Struct("<I"), struct.Struct("<II")
_PICKLE_PROTOCOL = 5


class Jagged(list[npt.NDArray[Any]]):
    """The rows of a nested tensor; as a list, so that rows of equal length stay rows."""

    layout = "jagged"


def _malformed(got: object, where: Where, expected: str = "a packed message") -> NoReturn:
    raise ConversionError(
        "the bytes are not a packed message of TransferQueue", code="RF-A002", where=where,
        expected=expected, got=got,
    )  # fmt: skip


def split(data: bytes, where: Where | None = None) -> Iterator[memoryview]:
    """Yield the packed buffers of a file that holds them end to end, views of `data`."""
    view, begin = memoryview(data), 0
    while begin < len(view):
        entries = _entries(view[begin:], where or Where())
        end = begin + max((offset + size for offset, size in entries), default=_HEADER.size)
        yield view[begin:end]
        begin = end


def _entries(data: memoryview, where: Where) -> list[tuple[int, int]]:
    try:
        (count,) = _HEADER.unpack_from(data)
        if _HEADER.size + count * _ENTRY.size > len(data):
            _malformed(f"{count} items in {len(data)} bytes", where)
        table = data[_HEADER.size : _HEADER.size + count * _ENTRY.size]
        entries = [(int(offset), int(size)) for offset, size in _ENTRY.iter_unpack(table)]
    except struct.error as err:
        _malformed(str(err), where)
    for offset, size in entries:
        if offset + size > len(data):
            _malformed(f"an item at {offset} of {size} bytes in {len(data)}", where)
    return entries


class _Plain(pickle.Unpickler):
    """Reads numbers, text and containers."""

    def find_class(self, module: str, name: str) -> NoReturn:
        msg = f"{module}.{name} in the description of an array"
        raise pickle.UnpicklingError(msg)


def decode(data: bytes | bytearray | memoryview, where: Where | None = None) -> Any:
    """Return the object of a packed buffer: tensors as arrays, nested ones as :class:`Jagged`.

    Guarantees: arrays are read-only views of `data`; :func:`encode` gives the bytes back.

    Raises
    ------
    ConversionError
        Another form, pickled objects, or types that NumPy lacks (``RF-A002``).
    """
    msgspec = load_msgspec()
    where = where or Where()
    view = memoryview(data)
    items = [view[offset : offset + size] for offset, size in _entries(view, where)]
    if not items or bytes(items[0][: len(_PICKLED)]) == _PICKLED:
        _malformed("a pickled message" if items else "no item", where, "MessagePack and arrays")
    hook = partial(_extension, items, where)
    try:
        return msgspec.msgpack.decode(items[0], ext_hook=hook)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        _malformed(str(err), where)


def _extension(items: list[memoryview], where: Where, code: int, body: memoryview) -> Any:
    if code not in (_TENSOR, _NESTED, _NUMPY):
        _malformed(f"extension {code}, a pickled object", where, "arrays alone")
    try:
        meta = _Plain(io.BytesIO(body)).load()
        if code != _NESTED:
            return _array(meta, items)
        rows = Jagged(_array(row, items) for row in meta["tensors"])
        rows.layout = meta["layout"]
    except (
        pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError,
        AttributeError,
    ) as err:  # fmt: skip
        _malformed(f"{type(err).__name__}: {err}", where, "type, shape and item of an array")
    return rows


def _array(meta: Any, items: list[memoryview]) -> npt.NDArray[Any]:
    dtype, shape, item = meta
    return np.frombuffer(items[item], np.dtype(dtype).newbyteorder("<")).reshape(shape)


def encode(value: Any) -> bytes:
    """Return an object as a packed buffer; arrays go as tensors, :class:`Jagged` as nested ones."""
    msgspec = load_msgspec()
    buffers: list[bytes] = []

    def describe(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], int]:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        buffers.append(little.tobytes())
        return array.dtype.name, array.shape, len(buffers)

    def tagged(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            code, meta = _TENSOR, describe(value)
        elif isinstance(value, Jagged):
            rows = [describe(row) for row in value]
            return msgspec.msgpack.Ext(_NESTED, _pickled({"layout": value.layout, "tensors": rows}))
        elif isinstance(value, Mapping):
            return {key: tagged(inner) for key, inner in value.items()}
        elif isinstance(value, list | tuple):
            return [tagged(inner) for inner in value]
        else:
            return value
        return msgspec.msgpack.Ext(code, _pickled(meta))

    items = [msgspec.msgpack.encode(tagged(value)), *buffers]
    begin = _HEADER.size + len(items) * _ENTRY.size
    table = []
    for item in items:
        table.append(_ENTRY.pack(begin, len(item)))
        begin += len(item)
    return b"".join([_HEADER.pack(len(items)), *table, *items])


def _pickled(meta: Any) -> bytes:
    return pickle.dumps(meta, protocol=_PICKLE_PROTOCOL)
