"""Whether a writer may go on: not after its end, nor after a write that failed on the way."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ragged_format.errors import DatasetExistsError, Where

__all__ = ["WriterState", "require_open"]

# "failed" also stands for a write under way: whatever interrupts it leaves half of it behind.
WriterState: TypeAlias = Literal["open", "closed", "aborted", "failed"]


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
    failed = state == "failed"
    raise DatasetExistsError(
        "an earlier write failed and left half a batch behind"
        if failed
        else "the writer is finished",
        where=Where(file=name),
        expected="an open writer",
        got=state,
        remedy="write everything anew with another writer" if failed else "open another writer",
    )
