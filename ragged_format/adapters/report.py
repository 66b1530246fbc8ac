"""What a conversion did: all records, tokens, candidates and head entries accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ragged_format.errors import ConversionError

__all__ = ["ConversionReport", "Ledger"]


@dataclass(slots=True)
class Ledger:
    """One kind of thing that a conversion takes in and stores or drops.

    Attributes
    ----------
    taken : int
        How many the input had.
    stored : int
        How many the output has.
    dropped : Counter of str to int
        The others by reason.
    """

    taken: int = 0
    stored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def is_balanced(self) -> bool:
        """Whether everything taken was stored or dropped for a reason."""
        return self.taken == self.stored + self.dropped.total()

    def drop(self, reason: str, count: int = 1) -> None:
        """Count `count` things as dropped for `reason`."""
        if count:
            self.dropped[reason] += int(count)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, reasons sorted."""
        return {
            "taken": self.taken, "stored": self.stored,
            "dropped": dict(sorted(self.dropped.items())),
        }  # fmt: skip


@dataclass(slots=True)
class ConversionReport:
    """Counts of one conversion or of many; ``+=`` adds another report.

    Attributes
    ----------
    responses : Ledger
        Input records (one request and its response each). Dropped: skipped on error, by code.
    samples : Ledger
        Choices of these responses; stored is the number of records out.
    tokens : Ledger
        Prompt and generated tokens; stored is the number of elements of ``input_ids``.
    targets : Ledger
        Generated tokens; stored is the number of scored ones.
    log_probs : Ledger
        Log-probs of generated tokens that the engine gave, floors and NaN included.
    candidates : Ledger
        Ids in the candidate sets that the engine gave.
    head_entries : Ledger
        Entries of the top-K lists that the engine gave, the sampled token's included.
    flagged : Counter
        Bits set in ``target_flags``, by name and reason.
    converted : Counter
        Values stored in another form than they came (sets sorted, versions mapped, …).
    unread : Counter
        Fields of the input, not null, that have no place in the output.
    noted : Counter
        Facts worth knowing that changed nothing (sets wider than top_k, heads one short, …).

    Examples
    --------
    >>> report = ConversionReport()
    >>> report.candidates.taken = 3
    >>> report.candidates.stored = 2
    >>> report.unbalanced()
    ['candidates']
    >>> report.candidates.drop("sampled_outside")
    >>> report.unbalanced()
    []
    """

    responses: Ledger = field(default_factory=Ledger)
    samples: Ledger = field(default_factory=Ledger)
    tokens: Ledger = field(default_factory=Ledger)
    targets: Ledger = field(default_factory=Ledger)
    log_probs: Ledger = field(default_factory=Ledger)
    candidates: Ledger = field(default_factory=Ledger)
    head_entries: Ledger = field(default_factory=Ledger)
    flagged: Counter[str] = field(default_factory=Counter)
    converted: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def unbalanced(self) -> list[str]:
        """Return the names of the ledgers that do not add up; empty after any conversion."""
        parts = [(spec.name, getattr(self, spec.name)) for spec in fields(self)]
        return [name for name, part in parts if isinstance(part, Ledger) and not part.is_balanced]

    def __iadd__(self, other: ConversionReport) -> Self:
        for spec in fields(self):
            mine, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if isinstance(mine, Ledger):
                mine.taken += theirs.taken
                mine.stored += theirs.stored
                mine.dropped.update(+theirs.dropped)
            else:
                mine.update(+theirs)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with sorted keys."""
        out: dict[str, Any] = {}
        for spec in fields(self):
            part = getattr(self, spec.name)
            is_ledger = isinstance(part, Ledger)
            out[spec.name] = part.to_dict() if is_ledger else dict(sorted((+part).items()))
        return out

    def add_to(self, target: ConversionReport | MutableMapping[str, Any] | None) -> None:
        """Add the counts to a report or to a mapping of the form of :meth:`to_dict`."""
        if isinstance(target, ConversionReport):
            target += self
        elif isinstance(target, MutableMapping):
            _merge(target, self.to_dict())
        elif target is not None:
            raise ConversionError(
                "a report is a ConversionReport or a mapping", code="RF-A011",
                expected="ConversionReport() or {}", got=f"a {type(target).__name__}",
                remedy="pass report=ConversionReport()",
            )  # fmt: skip


def _merge(target: MutableMapping[str, Any], counts: Mapping[str, Any]) -> None:
    for key, value in counts.items():
        if isinstance(value, Mapping):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = target.get(key, 0) + value
