"""The safetensors container, as far as arrays need it: a JSON header, then the bytes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["read_tensors", "write_tensors"]

# Wide types first, as the format's own writer orders its tensors.
_TYPES = {
    "U64": "<u8", "I64": "<i8", "F64": "<f8", "F32": "<f4", "U32": "<u4", "I32": "<i4",
    "F16": "<f2", "U16": "<u2", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "|b1",
}  # fmt: skip
_ORDER = list(_TYPES)
_NAMES = {np.dtype(code): name for name, code in _TYPES.items()}
_ALIGNMENT = 8


def read_tensors(data: bytes, where: Where) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a safetensors file, read-only views of `data`.

    Raises
    ------
    ConversionError
        The bytes are not such a file, or cut (``RF-A002``).
    """
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        body = memoryview(data)[8 + size :]
        return {
            name: _array(body, entry) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConversionError(
            "the bytes are not a safetensors file", code="RF-A002", where=where,
            expected="a header length, a JSON header, and the tensors", got=str(err),
        ) from err  # fmt: skip


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(body) or end - begin != dtype.itemsize * math.prod(shape):
        msg = f"a tensor of shape {shape} lies at [{begin}, {end}) of {len(body)} bytes"
        raise ValueError(msg)
    return np.frombuffer(body[begin:end], dtype).reshape(shape)


def write_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return arrays as a safetensors file, byte for byte as the format's own writer has it."""
    named = {
        name: _NAMES[array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype]
        for name, array in tensors.items()
    }
    order = sorted(tensors, key=lambda name: (_ORDER.index(named[name]), name))
    header: dict[str, Any] = {}
    begin = 0
    for name in order:
        end = begin + tensors[name].nbytes
        header[name] = {
            "dtype": named[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end],
        }  # fmt: skip
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts = (np.ascontiguousarray(tensors[name]).tobytes() for name in order)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)
