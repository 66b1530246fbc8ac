"""Dedupe: of records that are equal in some respect, the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.arguments import check_choice
from ragged_format.digest import record_digests
from ragged_format.errors import JobError
from ragged_format.lists import flat
from ragged_pipeline.exchange import Exchange, Keys, hashed
from ragged_pipeline.rows import kept_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.job import Context
    from ragged_pipeline.plan import Plan

__all__ = ["Dedupe", "Respect"]

Respect = Literal["sample_id", "record", "tokens", "prompt", "completion"]
RESPECTS: tuple[Respect, ...] = ("sample_id", "record", "tokens", "prompt", "completion")
_KEY = np.dtype([("hash", np.uint64, 2)])


class Dedupe(Exchange):
    """Of records that are equal in one respect the first one, in the order of the inputs.

    Parameters
    ----------
    by : {"sample_id", "record", "tokens", "prompt", "completion"}
        In what they are equal: their id; all columns; all token ids; the token ids before the
        first scored one; those from it on. Compared by xxh3-128.
    """

    name = "dedupe"
    version = 1
    unites = False  # this is what removes them
    key_type = _KEY
    verdict_type = np.dtype(np.bool_)

    def __init__(self, *, by: Respect = "sample_id") -> None:
        check_choice("by", by, RESPECTS)
        self.by = by

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {"by": self.by}

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if the input has no samples."""
        if self.by != "record" and inputs.ragged.profile != "sample":
            raise JobError(
                "packed rows have no ids and no prompts", expected="profile 'sample'",
                got=f"profile {inputs.ragged.profile!r}", remedy="pass by='record'",
            )  # fmt: skip

    def key_columns(self, inputs: RecordInputs) -> list[str] | None:
        """Return the columns that the keys are made of."""
        del inputs
        if self.by == "record":
            return None
        if self.by == "sample_id":
            return ["sample_id"]
        return ["input_ids", *(["completion_mask"] if self.by != "tokens" else [])]

    def keys(self, batch: pa.RecordBatch, context: Context) -> Keys:
        """Return the hash of every record in this respect."""
        del context
        keys = np.zeros(batch.num_rows, self.key_type)
        if self.by == "record":
            keys["hash"] = record_digests(batch).view(">u8").astype(np.uint64)
        elif self.by == "sample_id":
            texts = (text.encode() for text in batch.column("sample_id").to_pylist())
            keys["hash"] = hashed(texts, batch.num_rows)
        else:
            keys["hash"] = hashed(self._tokens(batch), batch.num_rows)
        return keys

    def _tokens(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        ids = flat(batch.column("input_ids"))
        tokens = np.ascontiguousarray(ids.numpy())
        starts, stops = ids.offsets[:-1], ids.offsets[1:]
        if self.by != "tokens":
            scored = np.flatnonzero(flat(batch.column("completion_mask")).numpy())
            first = np.append(scored, len(tokens))[np.searchsorted(scored, starts)]
            middle = np.minimum(first, stops)
            starts, stops = (starts, middle) if self.by == "prompt" else (middle, stops)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield tokens[start:stop].tobytes()

    def decide(self, keys: Keys, context: Context) -> npt.NDArray[Any]:
        """Return whether each record is the first with its hash."""
        del context
        high, low = keys["hash"][:, 0], keys["hash"][:, 1]
        order = np.lexsort((low, high))  # stable: equal hashes stay in canonical order
        is_first = np.ones(len(keys), np.bool_)
        same = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        is_first[1:] = ~same
        keep = np.zeros(len(keys), np.bool_)
        keep[order[is_first]] = True
        return keep

    def apply(
        self, batch: pa.RecordBatch, verdicts: npt.NDArray[Any], plan: Plan, context: Context
    ) -> pa.RecordBatch | None:
        """Return the records that are kept."""
        del plan
        dropped = int((~verdicts).sum())
        context.figures["duplicates"] = context.figures.get("duplicates", 0) + dropped
        return kept_rows(batch, verdicts)
