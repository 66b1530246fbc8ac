"""Data and assertions for tests of code that handles ragged batches.

* :func:`rollouts`: realistic data of any size from a NumPy generator;
* :func:`schemas`, :func:`sample_batches`, :func:`packed_batches`: hypothesis strategies (need
  ``hypothesis``, which nothing else here does);
* :func:`in_sequence`: samples packed end to end, nothing shared;
* :func:`variants`: one logical batch in the physical forms that producers hand over;
* :func:`assert_ragged_equal`: logical equality, with the place of the first difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragged_format.testing.equality import assert_ragged_equal
from ragged_format.testing.forms import variants
from ragged_format.testing.generate import fill_batch
from ragged_format.testing.sequences import in_sequence
from ragged_format.testing.traffic import rollouts

if TYPE_CHECKING:
    from ragged_format.testing.strategies import packed_batches, sample_batches, schemas

__all__ = [
    "assert_ragged_equal",
    "fill_batch",
    "in_sequence",
    "packed_batches",
    "rollouts",
    "sample_batches",
    "schemas",
    "variants",
]


def __getattr__(name: str) -> Any:
    # Late, so that the generators and the assertion work where hypothesis is not installed.
    if name in {"packed_batches", "sample_batches", "schemas"}:
        from ragged_format.testing import strategies

        return getattr(strategies, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
