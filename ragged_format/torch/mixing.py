"""Several datasets as one: which of them a position of the epoch belongs to, and which record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from ragged_format.arguments import check_integer
from ragged_format.errors import LimitExceededError

if TYPE_CHECKING:
    from ragged_format.torch.order import Order

__all__ = ["Mixture", "MixtureOrder", "mixed_fingerprint", "quotas", "spread"]

Int64 = npt.NDArray[np.int64]

# Positions after which the pattern of datasets repeats; a weight is kept to one part in so many.
_PERIOD = 4096
_ORDERS = 64


@dataclass(frozen=True)
class Mixture:
    """Datasets that a loader mixes by weight, record by record.

    Which dataset a position of the epoch takes its record from follows from the position alone:
    every stretch of the epoch has the datasets in the proportion of their weights, evenly spread. A
    dataset whose records are used up begins its own next epoch, in another order; one that is not
    used up goes on in the mixture's next epoch. So resuming is exact, with other ranks too.

    Parameters
    ----------
    sources : sequence
        What a loader accepts, all of one schema.
    weights : sequence of float, optional
        Share of each dataset in the records, not negative, in any unit; kept to one part in 4,096.
        Default: by size.
    num_rows : int, optional
        Records of an epoch. Default: as many as the datasets have together.

    Raises
    ------
    LimitExceededError
        The weights do not fit the sources, or one is so small that its dataset would never come
        (``RF-L001``).

    Examples
    --------
    >>> import pyarrow as pa, ragged_format as rf
    >>> from ragged_format.torch import Mixture, RaggedLoader
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> a, b = (
    ...     pa.RecordBatch.from_pylist(
    ...         [
    ...             {"sample_id": f"{name}{n}", "input_ids": [n], "completion_mask": [0]}
    ...             for n in range(4)
    ...         ],
    ...         schema=schema,
    ...     )
    ...     for name in "ab"
    ... )
    >>> with RaggedLoader(Mixture([a, b], weights=[3, 1]), batch_size=8) as loader:
    ...     next(iter(loader)).strings("sample_id")
    ['a0', 'a1', 'b0', 'a2', 'a3', 'a0', 'b1', 'a1']
    """

    sources: Sequence[Any]
    weights: Sequence[float] | None = None
    num_rows: int | None = None

    def __post_init__(self) -> None:
        weights = self.weights
        if not isinstance(self.sources, list | tuple) or not self.sources:
            raise LimitExceededError(
                "a mixture has datasets", expected="a list of at least one",
                got=repr(self.sources), remedy="pass a list of paths or datasets",
            )  # fmt: skip
        if weights is not None:
            try:
                exact = np.asarray(weights, np.float64)
                sound = exact.shape == (len(self.sources),) and bool(
                    (np.isfinite(exact) & (exact >= 0)).all() and exact.sum() > 0
                )
            except (TypeError, ValueError):
                sound = False
            if not sound:
                raise LimitExceededError(
                    "the weights do not fit the datasets",
                    expected=f"{len(self.sources)} numbers >= 0, not all 0", got=repr(weights),
                    remedy="pass one weight for each dataset",
                )  # fmt: skip
        if self.num_rows is not None:
            check_integer("num_rows", self.num_rows, 0)


def quotas(weights: Sequence[float]) -> Int64:
    """Return how often each dataset comes in a period of positions, by largest remainders.

    Raises
    ------
    LimitExceededError
        A weight that is not 0 would get no position, or none is (``RF-L001``).
    """
    if not any(weights):
        raise LimitExceededError(
            "the datasets of the mixture have no records", expected=">= 1", got=0,
            remedy="leave out those that are empty",
        )  # fmt: skip
    exact = np.asarray(weights, np.float64) * (_PERIOD / float(np.sum(weights)))
    out = np.floor(exact).astype(np.int64)
    missing = _PERIOD - int(out.sum())
    out[np.argsort(out - exact, kind="stable")[:missing]] += 1
    if ((out == 0) & (np.asarray(weights) > 0)).any():
        number = int(np.argmax((out == 0) & (np.asarray(weights) > 0)))
        raise LimitExceededError(
            f"the weight of dataset {number} is too small to ever come",
            expected=f">= 1/{_PERIOD} of the sum", got=weights[number],
            remedy="leave it out (weight 0), or raise the weight",
        )  # fmt: skip
    reduced: Int64 = out // np.gcd.reduce(out)
    return reduced


def spread(counts: Int64) -> Int64:
    """Return the datasets of one period, evenly spread, (sum of counts,) int64."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    when = (np.arange(len(owner)) - starts + 0.5) / counts[owner]
    return owner[np.argsort(when, kind="stable")]


def mixed_fingerprint(fingerprints: Sequence[str], counts: Int64) -> str:
    """Return the identity of a mixture."""
    label = "|".join([*fingerprints, *map(str, counts.tolist())])
    return xxhash.xxh3_128_hexdigest(f"ragged-mixture-1|{label}".encode())


class MixtureOrder:
    """The order of one epoch of a mixture; records are numbered dataset after dataset.

    Parameters
    ----------
    sizes : sequence of int
        Records of each dataset.
    counts : (d,) int64
        Of :func:`quotas`.
    size, epoch : int
        Positions of an epoch, and which it is.
    window : int
        Positions that lie near each other in every dataset; 0 if any do as well.
    orders : callable
        Returns the order of one dataset in one of its own epochs: ``orders(dataset, epoch)``.

    Raises
    ------
    LimitExceededError
        The mixture has no such epoch: its positions would not be int64 (``RF-L001``).
    """

    is_sequence = False

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Int64,
        *,
        size: int,
        epoch: int,
        window: int,
        orders: Callable[[int, int], Order],
    ) -> None:
        if (epoch + 1) * size >= 1 << 63:
            raise LimitExceededError(
                "a mixture has no such epoch", expected=f"< {(1 << 63) // size}",
                got=epoch, remedy="count epochs from 0",
            )  # fmt: skip
        self.size = size
        self.window = window
        self._sizes = sizes
        self._bases = np.cumsum([0, *sizes[:-1]]).tolist()
        self._first = epoch * size
        self._counts = counts
        self._pattern = spread(counts)
        # How often the dataset of each place came before it in the period.
        self._before = np.empty(len(self._pattern), np.int64)
        for number, count in enumerate(counts.tolist()):
            self._before[self._pattern == number] = np.arange(count)
        self._orders = lru_cache(_ORDERS)(orders)

    def at(self, positions: Int64) -> Int64:
        """Return the records at these positions, each in ``[0, size)``, as (n,) int64."""
        periods, places = np.divmod(positions + self._first, len(self._pattern))
        owners = self._pattern[places]
        turns = periods * self._counts[owners] + self._before[places]
        out = np.empty(len(positions), np.int64)
        for number in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == number)
            epochs, inner = np.divmod(turns[chosen], self._sizes[number])
            for epoch in np.unique(epochs).tolist():
                part = epochs == epoch
                found = self._orders(number, epoch).at(inner[part])
                out[chosen[part]] = found + self._bases[number]
        return out
