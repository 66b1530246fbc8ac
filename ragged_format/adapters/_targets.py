"""Generated tokens of a call, the unit in which policies decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.lists import offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._values import Bools
    from ragged_format.adapters.report import Ledger
    from ragged_format.errors import ConversionError, Where

__all__ = ["POLICIES", "Policy", "Targets", "place_of"]

Policy = Literal["error", "flag", "full_vocab", "drop_target", "drop_sample"]
POLICIES: tuple[Policy, ...] = ("error", "flag", "full_vocab", "drop_target", "drop_sample")


class Targets:
    """What is to become of each generated token.

    Attributes
    ----------
    tokens : (g,) int64
        The tokens of all choices end to end.
    offsets : (c + 1,) int64
        Tokens of choice i are ``[offsets[i], offsets[i + 1])``.
    lengths : (c,) int64
        Tokens of each choice.
    flags : (g,) uint8
        Bits of ``target_flags``.
    kept : (g,) bool
        Targets of the output.
    choice_kept : (c,) bool
        Choices of the output.
    """

    kept: Bools
    choice_kept: Bools

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices
        parts = [choice.token_ids for choice in choices]
        self.tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self.offsets = offsets_of(np.array([len(part) for part in parts], np.int64))
        self.lengths = np.diff(self.offsets)
        self.flags = np.zeros(len(self.tokens), np.uint8)
        self._reasons = [""]
        # Index of the reason for which a target, or a choice, goes; 0 stays.
        self._target_goes = np.zeros(len(self.tokens), np.uint8)
        self._choice_goes = np.zeros(len(choices), np.uint8)
        self.decide()

    def apply(
        self,
        policy: Policy,
        bad: Bools,
        reason: str,
        flag: int,
        column: str,
        fail: Callable[[Where, int], ConversionError],
    ) -> None:
        """Do what `policy` says about the targets where `bad`, (g,) bool.

        Parameters
        ----------
        policy : Policy
        bad : (g,) bool
        reason : str
            Under which dropped targets and samples are counted.
        flag : int
            Bit that the policy ``flag`` sets.
        column : str
            The engine's field, for errors.
        fail : callable
            Returns the error of the policy ``error`` for the first bad target and its place.
        """
        if not bad.any():
            return
        if policy == "error":
            first = int(np.argmax(bad))
            raise fail(place_of(self.choices, first, column), first)
        if policy == "flag":
            self.flags[bad] |= flag
        elif policy != "full_vocab":
            self._reasons.append(reason)
            number = len(self._reasons) - 1
            if policy == "drop_target":
                self._target_goes[bad & (self._target_goes == 0)] = number
            else:
                hit = self.offsets.searchsorted(np.flatnonzero(bad), side="right") - 1
                self._choice_goes[hit[self._choice_goes[hit] == 0]] = number

    def decide(self) -> None:
        """Settle which targets stay; to be called when all policies were applied."""
        of_choice = np.repeat(self._choice_goes, self.lengths)
        self._target_goes = np.where(of_choice != 0, of_choice, self._target_goes)
        self.kept = self._target_goes == 0
        self.choice_kept = self._choice_goes == 0

    def count(self, ledger: Ledger, weights: npt.NDArray[Any]) -> None:
        """Count things that hang on targets, (g,) of them per target, as stored or dropped."""
        self._count(ledger, self._target_goes, weights)

    def count_by_choice(self, ledger: Ledger, weights: npt.NDArray[Any]) -> None:
        """Count things that hang on choices, (c,) of them per choice, as stored or dropped."""
        self._count(ledger, self._choice_goes, weights)

    def _count(
        self, ledger: Ledger, goes: npt.NDArray[np.uint8], weights: npt.NDArray[Any]
    ) -> None:
        if len(self._reasons) == 1:  # nothing goes
            ledger.stored += int(weights.sum())
            return
        totals = np.bincount(goes, weights, minlength=len(self._reasons)).astype(np.int64)
        ledger.stored += int(totals[0])
        for reason, total in zip(self._reasons[1:], totals[1:], strict=True):
            ledger.drop(reason, int(total))


def place_of(choices: Sequence[Choice], target: int, column: str) -> Where:
    """Return where the target-th generated token of `choices` is, in one of the engine's fields."""
    offsets = offsets_of(np.array([len(choice.token_ids) for choice in choices], np.int64))
    number = int(offsets.searchsorted(target, side="right")) - 1
    return choices[number].place(column, target - int(offsets[number]))
