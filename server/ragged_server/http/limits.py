"""What requests may use: bytes in flight of all of them, and the content of one."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from ragged_format.errors import Where
from ragged_format.lists import flat
from ragged_server.http.errors import BusyError, TooLargeError

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema
    from ragged_server.settings import ServerSettings

__all__ = ["Budget", "ContentLimits", "Reservation", "too_large"]

_RETRY_S = 1.0


class Budget:
    """Bytes that may be held at one time, by all requests together; usable from any thread.

    Parameters
    ----------
    total : int
        In bytes.

    Examples
    --------
    >>> budget = Budget(100)
    >>> with budget.reserve(60):
    ...     budget.reserve(50)
    Traceback (most recent call last):
    ...
    ragged_server.http.errors.BusyError: [RF-H014] bodies in flight use up what they may
      expected: <= 100 bytes
      got:      60 bytes, and 50 more
      remedy:   send it again later, or raise max_in_flight_bytes
    >>> budget.used
    0
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> Reservation:
        """Return a reservation of `size` bytes, at once or never: nobody waits holding some.

        Raises
        ------
        BusyError
            There is no room now (``RF-H014``).
        """
        self._take(size)
        return Reservation(self, size)

    def _take(self, size: int) -> None:
        with self._lock:
            if self.used + size > self.total:
                raise BusyError(
                    "bodies in flight use up what they may", expected=f"<= {self.total} bytes",
                    got=f"{self.used} bytes, and {size} more", retry_after_s=_RETRY_S,
                    remedy="send it again later, or raise max_in_flight_bytes",
                )  # fmt: skip
            self.used += size

    def _give(self, size: int) -> None:
        with self._lock:
            self.used -= size


class Reservation:
    """Bytes of a budget that one request holds; leaving the block gives them back."""

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget = budget
        self.size = size

    def grow(self, size: int) -> None:
        """Take `size` bytes more; raises :class:`BusyError` if there is no room now."""
        self._budget._take(size)  # noqa: SLF001
        self.size += size

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self._budget._give(self.size - size)  # noqa: SLF001
            self.size = size

    def release(self) -> None:
        """Give all back; does nothing the second time."""
        self.shrink(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def too_large(what: str, name: str, limit: int, got: object) -> TooLargeError:
    """Return the error for a request that exceeds the limit of a setting."""
    return TooLargeError(
        f"{what} is larger than the limit", expected=f"{name} <= {limit}", got=got,
        limits={name: limit}, remedy=f"send less in one request, or raise {name} on the server",
    )  # fmt: skip


class ContentLimits:
    """Counts the batches of one request while they are decoded, against the limits.

    Parameters
    ----------
    settings : ServerSettings
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.records = 0
        self.tokens = 0
        self._batches = 0

    def add(self, batch: pa.RecordBatch, ragged: RaggedSchema) -> None:
        """Count one valid batch.

        Raises
        ------
        TooLargeError
            With it the request has too many records or tokens, or a record or set is too large
            (``RF-H008``).
        """
        self._add_totals(batch)
        self.check_sizes(batch, ragged)
        self._batches += 1

    def _add_totals(self, batch: pa.RecordBatch) -> None:
        settings = self._settings
        self.records += batch.num_rows
        if self.records > settings.max_request_records:
            name = "max_request_records"
            raise too_large(
                "the number of records", name, settings.max_request_records, self.records
            )
        tokens = batch.column("input_ids")
        offsets = np.asarray(tokens.offsets)
        self.tokens += int(offsets[-1] - offsets[0])
        if self.tokens > settings.max_request_tokens:
            name = "max_request_tokens"
            raise too_large("the number of tokens", name, settings.max_request_tokens, self.tokens)

    def check_sizes(self, batch: pa.RecordBatch, ragged: RaggedSchema) -> None:
        """Check the records and sets of a valid batch, which may be of several requests.

        Raises
        ------
        TooLargeError
            A record or set is too large (``RF-H008``).
        """
        settings = self._settings
        lengths = np.diff(np.asarray(batch.column("input_ids").offsets))
        if len(lengths) and (longest := int(lengths.max())) > settings.max_record_tokens:
            limit = settings.max_record_tokens
            error = too_large("a record", "max_record_tokens", limit, longest)
            place = Where(batch=self._batches, row=int(lengths.argmax()), column="input_ids")
            raise error.at(place)
        for axis in ragged.axes.values():
            if axis.counts is None or axis.mask:
                continue
            width = int(flat(batch.column(axis.counts)).numpy().max(initial=0))
            if width > settings.max_set_width:
                error = too_large("a set or head", "max_set_width", settings.max_set_width, width)
                raise error.at(Where(batch=self._batches, column=axis.counts))
