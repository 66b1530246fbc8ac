"""Whether a writer may go on: not after its end, nor after a write that failed on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from ragged_format.errors import DatasetExistsError, Where

__all__ = ["EndsWithBlock", "WriterState", "require_open"]

# "failed" also stands for a write under way: whatever interrupts it leaves half of it behind.
# "forked" is that of a copy in a forked child.
WriterState: TypeAlias = Literal["open", "closed", "aborted", "failed", "forked"]

_WHAT = {
    "failed": "an earlier write failed and left half a batch behind",
    "forked": "the writer belongs to the process from which this one was forked",
}
_REMEDY = {"failed": "write everything anew with another writer"}


def require_open(state: WriterState, name: str | None) -> None:
    """Raise ``RF-C009`` unless a writer is open.

    Parameters
    ----------
    state : WriterState
        Of the writer.
    name : str, optional
        Of what it writes, for the error.
    """
    if state == "open":
        return
    raise DatasetExistsError(
        _WHAT.get(state, "the writer is finished"), where=Where(file=name),
        expected="an open writer", got=state, remedy=_REMEDY.get(state, "open another writer"),
    )  # fmt: skip


class EndsWithBlock(ABC):
    """A writer as a context manager: leaving the block closes it, an exception aborts it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @abstractmethod
    def close(self) -> Any:
        """Finish what is written."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of it."""
