"""How compact files store numbers: as planes of bytes, which are joined a part at a time.

All lowest bytes of a column, then all second bytes, and so on; a plane of one byte only is a number
in the header. Joining works on parts that fit the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import CorruptError, LimitExceededError

__all__ = ["MAX_BLOCK_BYTES", "Block", "Planes", "split"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
# Constant planes take no bytes in the file, so that nothing else bounds a lying size.
MAX_BLOCK_BYTES = 1 << 32
# Elements that are joined at a time.
PART = 1 << 15


@dataclass(frozen=True, slots=True)
class Block:
    """How one array is stored.

    Attributes
    ----------
    size : int
        Number of elements.
    dtype : str
        Little-endian numpy type of an element.
    planes : list of int or None
        Lowest byte first: the byte that all elements have, or None where the plane is stored.
    transform : str, optional
        ``"ranks"``: sets as :func:`ragged_format.compact.sets.encode_sets` makes them.
        ``"differences"``: each element less the one before it. ``"positions:AXIS"``: ids of a head
        by :func:`ragged_format.compact.heads.encode_positions` in the sets of that axis.
        ``"shared:AXIS"``: log-probs by :func:`ragged_format.compact.heads.encode_shared` with the
        head of that axis.
    """

    size: int
    dtype: str
    planes: list[int | None]
    transform: str | None = None

    def to_json(self) -> list[Any]:
        """Return the JSON array kept in the header."""
        return [self.size, self.dtype, self.planes, self.transform]


def split(values: Array) -> tuple[Block, bytes]:
    """Return how `values`, (n,), are stored, and the stored planes end to end."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    table = little.view(np.uint8).reshape(-1, little.dtype.itemsize)
    planes: list[int | None] = []
    stored = []
    for plane in np.ascontiguousarray(table.T):
        first = int(plane[0]) if len(plane) else 0
        if (plane == first).all():
            planes.append(first)
        else:
            planes.append(None)
            stored.append(plane)
    data = b"".join(plane.tobytes() for plane in stored)
    return Block(len(values), little.dtype.str, planes), data


class Planes:
    """The elements of one block; a slice of it joins these elements only.

    Parameters
    ----------
    dtype : numpy.dtype
        Type of an element.
    size : int
        Number of elements.
    planes : list of (n,) uint8 or int
        Lowest byte first, one for each byte of the narrowest unsigned type that says everything.
    transform : str, optional
        As the block has it.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        size: int,
        planes: Sequence[Bytes | int],
        transform: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.transform = transform
        self._size = size
        self._planes = planes

    @classmethod
    def of(cls, block: Block, data: Bytes) -> Planes:
        """Return the planes of a block whose stored ones lie end to end in `data`, (s,) uint8.

        Raises
        ------
        CorruptError
            `data` has not the size that the block states (``RF-C001``).
        LimitExceededError
            The block is too large (``RF-L001``).
        """
        dtype = np.dtype(block.dtype)
        width = dtype.itemsize
        if block.size * width > MAX_BLOCK_BYTES:
            raise LimitExceededError(
                "a block is too large", expected=f"<= {MAX_BLOCK_BYTES} bytes",
                got=block.size * width,
            )  # fmt: skip
        kept = sum(plane is None for plane in block.planes)
        if len(block.planes) != width or len(data) != kept * block.size or block.size < 0:
            raise CorruptError(
                "a block has not the size that the header states",
                expected=f"{kept} planes of {block.size} bytes", got=f"{len(data)} bytes",
            )  # fmt: skip
        stored = iter(data.reshape(kept, block.size))
        planes = [next(stored) if plane is None else plane for plane in block.planes]
        # Planes above the highest that says anything are zeros: widening at the end adds them.
        while width > 1 and all(plane == 0 for plane in block.planes[width // 2 : width]):
            width //= 2
        return cls(dtype, block.size, planes[:width], block.transform)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Array:
        """Return the bits of some elements, step 1, as the narrowest unsigned integers."""
        first, last, _ = part.indices(self._size)
        joined = _joined([p if isinstance(p, int) else p[first:last] for p in self._planes])
        if isinstance(joined, int):
            return np.full(last - first, joined, f"<u{len(self._planes)}")
        out: Array = joined
        return out

    def part(self, first: int, last: int) -> Planes:
        """Return elements `first` to `last`, a view; fewer where there are no more."""
        first, last, _ = slice(first, last).indices(self._size)
        planes = [p if isinstance(p, int) else p[first:last] for p in self._planes]
        return Planes(self.dtype, max(0, last - first), planes, self.transform)

    def array(self) -> Array:
        """Return all elements, (n,) of their type, as a copy."""
        whole = f"<u{self.dtype.itemsize}"
        if self._size <= PART:
            return self[:].astype(whole).view(self.dtype)
        bits = np.empty(self._size, whole)
        for first in range(0, self._size, PART):
            bits[first : first + PART] = self[first : first + PART]
        return bits.view(self.dtype)


def _joined(parts: list[Any]) -> Any:
    """Return numbers of twice the width, again and again, from arrays or constants, low first."""
    bits = 8
    while len(parts) > 1:
        wide = np.dtype(f"<u{bits // 4}")
        parts = [_pair(*pair, bits, wide) for pair in zip(parts[::2], parts[1::2], strict=True)]
        bits *= 2
    return parts[0]


def _pair(low: Any, high: Any, bits: int, wide: np.dtype[Any]) -> Any:
    if isinstance(high, int):
        if isinstance(low, int):
            return low | high << bits
        out = low.astype(wide)
        if high:
            out |= wide.type(high << bits)
        return out
    out = high.astype(wide)
    out <<= bits
    if isinstance(low, int):
        out |= wide.type(low)
    else:
        out |= low
    return out
