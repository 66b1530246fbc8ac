"""Split: records into named parts, by the hash of their group or of their id."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from ragged_format.arguments import (
    check_choice,
    check_mapping,
    check_number,
    check_seed,
    check_text,
)
from ragged_format.errors import JobError
from ragged_pipeline.rows import Mask, RowJob

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.job import Context

__all__ = ["By", "SplitPart", "check_parts"]

By = Literal["group", "record"]
_WHOLE = 1 << 64


def check_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a split; raise unless they are fractions of one whole with file names."""
    check_mapping("parts", parts)
    for name, fraction in parts.items():
        check_text("the name of a part", name)
        check_number(f"the fraction of {name}", fraction)
    out = {name: float(fraction) for name, fraction in parts.items()}
    good = all(0 < fraction <= 1 for fraction in out.values())
    if len(out) < 2 or not good or not isclose(sum(out.values()), 1, abs_tol=1e-9):
        raise JobError(
            "the parts of a split add up to one", expected="at least two fractions, sum 1",
            got=", ".join(f"{name}={fraction}" for name, fraction in out.items()) or "none",
            remedy="name the rest too, as train=0.9 and test=0.1",
        )  # fmt: skip
    bad = [name for name in out if not name or name in (".", "..") or "/" in name or "\0" in name]
    if bad:
        raise JobError(
            "the name of a part is a directory name", expected="as 'train'", got=repr(bad[0]),
            remedy="leave out slashes and dots",
        )  # fmt: skip
    return out


class SplitPart(RowJob):
    """One part of a split.

    A record belongs to the part in whose share of the hash range the hash of its key lies; so each
    record is in exactly one part, and a part's size is its fraction up to chance.

    Parameters
    ----------
    parts : mapping of str to float
        Fractions of all parts, in order.
    part : str
        The one to make.
    by : {"group", "record"}
        Key: ``group_id``, so that no group is in two parts (records without one go by their own
        id), or ``sample_id``.
    seed : int
        Another seed, another split.
    """

    name = "split"
    version = 1

    def __init__(
        self, *, parts: Mapping[str, float], part: str, by: By = "group", seed: int = 0
    ) -> None:
        check_choice("by", by, ("group", "record"))
        self.parts = check_parts(parts)
        check_choice("part", part, list(self.parts))
        check_seed(seed)
        self.part, self.by, self.seed = part, by, int(seed)
        bounds = [0, *(round(total * _WHOLE) for total in np.cumsum(list(self.parts.values())))]
        bounds[-1] = _WHOLE
        number = list(self.parts).index(part)
        self._low, self._high = bounds[number], bounds[number + 1]

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        # A list keeps the order, which canonical JSON would sort.
        return {
            "parts": [[name, fraction] for name, fraction in self.parts.items()],
            "part": self.part, "by": self.by, "seed": self.seed,
        }  # fmt: skip

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SplitPart:
        """Make a job of its options."""
        return cls(**{**options, "parts": dict(options["parts"])})

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if there are no groups to go by."""
        if self.by == "group" and "group_id" not in inputs.ragged:
            raise JobError(
                "the input has no groups to keep together", expected="a column group_id",
                got=", ".join(inputs.ragged.columns), remedy="pass by='record'",
            )  # fmt: skip

    def keep(self, batch: pa.RecordBatch, context: Context) -> Mask:
        """Return which records are of this part."""
        keys = batch.column("sample_id").to_pylist()
        if self.by == "group":
            groups = batch.column("group_id").to_pylist()
            keys = [
                f"s{key}" if group is None else f"g{group}"
                for group, key in zip(groups, keys, strict=True)
            ]
        hash_ = xxhash.xxh3_64_intdigest
        low, high, seed = self._low, self._high, self.seed
        keep = np.fromiter(
            (low <= hash_(f"{seed}\0{key}".encode()) < high for key in keys), np.bool_, len(keys)
        )
        del context
        return keep
