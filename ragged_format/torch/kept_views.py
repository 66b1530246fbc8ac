"""Views of record batches that are kept: many of mapped files, decoded ones by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragged_format.torch.views import View

__all__ = ["DECODED_BYTES", "KeptViews"]

# Each is some kilobytes of views, the data itself stays mapped.
_MAPPED = 16_384
# Two windows of blocks of the default sizes, for batches of 32 MiB.
DECODED_BYTES = 1 << 30


class KeptViews:
    """The views used last, by key.

    Views of mapped files are kept by number, oldest first to go. Decoded ones, of compact shards
    and streams, hold their content; they are kept up to a number of bytes, those not used for
    longest first to go, the last one always kept.

    Parameters
    ----------
    max_bytes : int
        Most bytes of decoded batches.

    Attributes
    ----------
    decoded_bytes : int
        Bytes of the decoded batches that are kept.
    decoded : int
        Batches decoded so far.
    mapped : dict of int to View
        Views of mapped files; to look them up here saves a call for each record of an epoch.
    """

    def __init__(self, max_bytes: int = DECODED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.mapped: dict[int, View] = {}
        self._decoded: OrderedDict[int, tuple[View, int]] = OrderedDict()
        self.decoded_bytes = 0
        self.decoded = 0

    def get(self, key: int) -> View | None:
        """Return a view that is kept."""
        view = self.mapped.get(key)
        if view is None and (found := self._decoded.get(key)) is not None:
            self._decoded.move_to_end(key)
            return found[0]
        return view

    def add(self, key: int, view: View, decoded_bytes: int) -> None:
        """Keep a view; `decoded_bytes` is 0 for one of a mapped file."""
        if not decoded_bytes:
            if len(self.mapped) >= _MAPPED:
                self.mapped.pop(next(iter(self.mapped)))
            self.mapped[key] = view
            return
        self.decoded += 1
        self.decoded_bytes += decoded_bytes
        self._decoded[key] = view, decoded_bytes
        while self.decoded_bytes > self._max_bytes and len(self._decoded) > 1:
            _, (_, freed) = self._decoded.popitem(last=False)
            self.decoded_bytes -= freed

    def forget(self, wanted: Callable[[int], bool]) -> None:
        """Let go of the views whose key is wanted."""
        for key in [*filter(wanted, self.mapped)]:
            del self.mapped[key]
        for key in [*filter(wanted, self._decoded)]:
            self.decoded_bytes -= self._decoded.pop(key)[1]
