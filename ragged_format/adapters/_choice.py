"""One generated choice as the shared part of the engine adapters takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragged_format.errors import Where

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ragged_format.adapters._values import Bools, LogProbs, Rows
    from ragged_format.lists import Int64

__all__ = ["Choice", "VersionSpan"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The generated tokens ``[start, end)`` came from weights of this version."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Choice:
    """One choice, its big fields as arrays.

    Attributes
    ----------
    sample_id : str
        Unique in the data set.
    index : int
        Of the choice in its response.
    where : Where
        Record number, and name if the record has one.
    prompt_ids : (p,) int64
        Context before the first generated token.
    token_ids : (t,) int64
        Generated tokens.
    support : Rows, optional
        Candidate set of each generated token; ``None`` if the engine gave none.
    support_expected : bool
        The response has the field, or the request asked for it, so that ``None`` means lost.
    support_log_probs : Rows, optional
        Log-probs parallel to `support`.
    support_cut : (t,) bool, optional
        Sets that the engine cut at its limit.
    log_probs : LogProbs, optional
        Of the generated tokens; ``None`` if the engine gave none.
    log_probs_expected : bool
        The request asked for log-probs.
    lists_sampled : bool
        The sampled token is one of the K entries of its top-K list, whatever its rank, so one
        entry is no head. Otherwise lists have the K best, and the sampled token beside them.
    top_k : int, optional
        Cut that the request asked for; ties make sets wider.
    versions : list of VersionSpan
        In order of their start.
    routed_experts : (p + t - 1 - start, layers, k) int array, optional
        Experts of each token forwarded, the first `routed_start` left out.
    record_values : dict
        Values of record columns by column name.
    prefix : str, optional
        Path of the engine's fields in the response, for errors; ``None``: ``choices[index].``.
    names : mapping of str to str
        The engine's names of ``sampling_mask`` and ``logprobs``, for errors.
    token_values, target_values : dict
        Arrays of further columns by column name: (p + t, ...) on the token axis, (t, ...) on the
        target axis. All choices of a call have the same ones.
    """

    sample_id: str
    index: int
    where: Where
    prompt_ids: Int64
    token_ids: Int64
    support: Rows | None = None
    support_expected: bool = False
    support_log_probs: Rows | None = None
    support_cut: Bools | None = None
    log_probs: LogProbs | None = None
    log_probs_expected: bool = False
    lists_sampled: bool = True
    top_k: int | None = None
    versions: list[VersionSpan] = field(default_factory=list)
    routed_experts: npt.NDArray[Any] | None = None
    routed_start: int = 0
    record_values: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    token_values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    target_values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def runs(self) -> Sequence[Int64]:
        """Return the tokens in order as runs, context and scored ones by turns, an even number."""
        return self.prompt_ids, self.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, context included."""
        return len(self.prompt_ids) + len(self.token_ids)

    def place(self, column: str, position: int | None = None) -> Where:
        """Return where an element of one of the engine's fields is."""
        prefix = f"choices[{self.index}]." if self.prefix is None else self.prefix
        field = prefix + self.names.get(column, column)
        return Where(self.where.file, row=self.where.row, column=field, position=position)

    def place_token(self, token: int) -> Where:
        """Return where one of all tokens is."""
        prompt = len(self.prompt_ids)
        if token >= prompt:
            return self.place("token_ids", token - prompt)
        return Where(self.where.file, row=self.where.row, column="prompt_token_ids", position=token)
