"""Which columns a call gives: those asked for, or those that its records have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from ragged_format.adapters._arguments import columns_of, wrong_option
from ragged_format.adapters._targets import POLICIES, Policy
from ragged_format.errors import ConversionError, Where
from ragged_format.parse import parse_schema
from ragged_format.profiles import REQUIRED, sample_schema, standard_column
from ragged_format.schema import Column, LogProb, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragged_format.adapters._choice import Choice

__all__ = [
    "ALWAYS",
    "FROM_RECORD",
    "HEAD",
    "LOG_PROB_MODES",
    "ROUTED_EXPERTS",
    "SUPPORT",
    "SUPPORT_LOG_PROBS",
    "Options",
    "Wanted",
    "make_options",
]

LogProbMode = Literal["processed", "raw"]
LOG_PROB_MODES: dict[str, LogProb] = {
    "processed": LogProb("processed", "support"),
    "raw": LogProb("raw", "vocabulary"),
}
ALWAYS = ("group_id", "policy_version", "temperature", "finish_reason", "provenance")
FROM_RECORD = (
    "rollout_id", "branch_index", "reward", "advantage", "env_name", "metrics", "teacher_id",
)  # fmt: skip
SUPPORT = ("candidate_counts", "candidate_ids")
SUPPORT_LOG_PROBS = "candidate_log_probs"
HEAD = ("topk_counts", "topk_ids", "topk_log_probs")
ROUTED_EXPERTS = "routed_experts"
GIVEN = frozenset({
    *REQUIRED["sample"], *ALWAYS, *FROM_RECORD, *SUPPORT, SUPPORT_LOG_PROBS, *HEAD,
    "rollout_log_probs", "target_flags", "policy_versions", ROUTED_EXPERTS,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a call, checked."""

    vocab_size: int
    mode: LogProb
    schema: RaggedSchema | None
    on_missing_support: Policy
    on_invalid_support: Policy
    on_missing_log_prob: Policy
    heads: int | None
    policy_version: Mapping[str, int] | int | None
    on_error: str
    # Log-prob columns of another mode than `mode`, by name.
    modes: Mapping[str, LogProb] = field(default_factory=dict)
    # Columns of every batch, and declarations that are not the standard ones.
    always: tuple[str, ...] = ALWAYS
    own: tuple[Column, ...] = ()

    def wanted(self, choices: Sequence[Choice]) -> Wanted:
        """Return the columns asked for, or those that `choices` have."""
        if self.schema is not None:
            return Wanted(self, frozenset(self.schema.columns))
        names = set(self.always)
        for choice in choices:
            names.update(choice.record_values)
            names.update(choice.token_values, choice.target_values)
            lost = choice.support_expected and len(choice.token_ids)
            if choice.support is not None or lost:
                names.update(SUPPORT)
            if choice.support_log_probs is not None:
                names.add(SUPPORT_LOG_PROBS)
            if choice.log_probs is not None or choice.log_probs_expected:
                names.add("rollout_log_probs")
            if self.heads != 0 and _has_head(choice):
                names.update(HEAD)
            if choice.routed_experts is not None:
                names.add(ROUTED_EXPERTS)
        return Wanted(self, frozenset(names))


def _has_head(choice: Choice) -> bool:
    # One entry may be the sampled token itself.
    counts = None if choice.log_probs is None else choice.log_probs.counts
    return counts is not None and len(counts) > 0 and bool(counts.max() > choice.lists_sampled)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Columns of a call; those that depend on its values come last, in :meth:`schema`."""

    options: Options
    names: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def can_flag(self) -> bool:
        """Whether the batch can have ``target_flags``."""
        return self.options.schema is None or "target_flags" in self.names

    def schema(
        self, *, flagged: bool, mixed_versions: bool, experts: tuple[int, int] | None
    ) -> RaggedSchema:
        """Return the schema of the batch.

        Raises
        ------
        ConversionError
            A flag must be set and the columns asked for have no ``target_flags`` (``RF-A011``).
        """
        asked = self.options.schema
        if asked is not None:
            if flagged and "target_flags" not in self.names:
                raise ConversionError(
                    "a target must be flagged, and the columns asked for have no place for it",
                    code="RF-A011", expected="column 'target_flags'", got=sorted(self.names),
                    remedy="add 'target_flags' to the columns, or choose other policies",
                )  # fmt: skip
            return asked
        names = set(self.names)
        if flagged:
            names.add("target_flags")
        if mixed_versions:
            names.add("policy_versions")
        own = tuple(column for column in self.options.own if column.name in names)
        plain = names - {ROUTED_EXPERTS, *(column.name for column in own)}
        columns: tuple[str | Column, ...] = (*sorted(plain), *own)
        if experts is not None:
            columns += (experts_column(experts),)
        options = self.options
        return _declared(options.vocab_size, columns, options.mode, tuple(options.modes.items()))


def experts_column(shape: tuple[int, int]) -> Column:
    """Return the declaration of the routed experts, (layers, experts per token)."""
    return Column(ROUTED_EXPERTS, "token", pa.int16(), shape=shape, fill=-1)


# Calls come one after another with the same few sets of columns.
@lru_cache(maxsize=32)
def _declared(
    vocab_size: int,
    columns: tuple[str | Column, ...],
    mode: LogProb,
    modes: tuple[tuple[str, LogProb], ...],
) -> RaggedSchema:
    """Return a sample schema, log-prob columns in `mode` unless they state one themselves."""
    special = dict(modes)
    out = []
    for column in columns:
        if isinstance(column, str):
            column = standard_column(column)
            if column.log_prob is not None:
                column = replace(column, log_prob=special.get(column.name, mode))
        out.append(column)
    return parse_schema(sample_schema(vocab_size=vocab_size, columns=out))


def make_options(
    *,
    vocab_size: int | None,
    columns: Iterable[str | Column] | None,
    schema: pa.Schema | None,
    logprobs_mode: str,
    policies: Mapping[str, str],
    on_error: str,
    heads: int | None,
    policy_version: Mapping[str, int] | int | None,
    modes: Mapping[str, LogProb] | None = None,
    given: frozenset[str] = GIVEN,
    always: tuple[str, ...] = ALWAYS,
    own: tuple[Column, ...] = (),
) -> Options:
    """Check options against each other.

    Parameters
    ----------
    modes : mapping of str to LogProb, optional
        Log-prob columns of another mode than `logprobs_mode` says, by name. The other parameters
        are those of ``to_samples``.
    given : frozenset of str
        The columns that the system can give.
    always : tuple of str
        The optional columns that every batch has.
    own : tuple of Column
        Declarations that are not the standard ones.

    Raises
    ------
    ConversionError
        Options contradict each other or ask for what the engine does not give (``RF-A011``).
    """
    columns = columns_of(columns)
    if not isinstance(logprobs_mode, str) or logprobs_mode not in LOG_PROB_MODES:
        raise ConversionError(
            "log-probs are processed or raw", code="RF-A011",
            expected=" or ".join(LOG_PROB_MODES), got=logprobs_mode,
            remedy="name what the engine's --logprobs-mode says; logits are not converted",
        )  # fmt: skip
    mode = LOG_PROB_MODES[logprobs_mode]
    for option, policy in policies.items():
        # A token without log-prob is not explained by the full vocabulary.
        allowed = [p for p in POLICIES if option != "on_missing_log_prob" or p != "full_vocab"]
        if policy not in allowed:
            raise ConversionError(
                f"{option} names a policy", code="RF-A011", expected=", ".join(allowed), got=policy,
                remedy="choose one of these",
            )  # fmt: skip
    if on_error not in ("raise", "skip"):
        raise ConversionError(
            "on_error names what to do with a bad record", code="RF-A011",
            expected="raise, skip", got=on_error, remedy="choose one of these",
        )  # fmt: skip
    if heads is not None and not (isinstance(heads, Integral) and heads >= 0):
        raise wrong_option("heads", "a number of entries >= 0", heads)
    if policy_version is not None and not isinstance(policy_version, int | Mapping):
        raise wrong_option("policy_version", "an integer, or a mapping of versions", policy_version)
    if vocab_size is not None and not isinstance(vocab_size, int):
        raise wrong_option("vocab_size", "the size of the model's vocabulary", vocab_size)
    if schema is not None and columns is not None:
        raise ConversionError(
            "columns and schema say the same thing twice", code="RF-A011",
            expected="one of columns=, schema=", got="both",
        )  # fmt: skip
    parsed = None
    if schema is not None:
        parsed = parse_schema(schema)
        if parsed.profile != "sample" or vocab_size not in (None, parsed.vocab_size):
            raise ConversionError(
                "the schema is of samples with this vocabulary", code="RF-A011",
                expected=f"profile 'sample', vocab_size {vocab_size}",
                got=f"profile {parsed.profile!r}, vocab_size {parsed.vocab_size}",
            )  # fmt: skip
        vocab_size = parsed.vocab_size
    elif vocab_size is None:
        raise ConversionError(
            "the size of the vocabulary must be known", code="RF-A011",
            expected="vocab_size= or schema=", got=None,
            remedy="pass the model's vocab_size (config.json), which can exceed the tokenizer's",
        )  # fmt: skip
    else:
        # Without columns asked for, this only checks the size.
        declared = _declared(vocab_size, columns or (), mode, tuple((modes or {}).items()))
        parsed = None if columns is None else declared
    if parsed is not None:
        _check_asked(parsed, mode, modes or {}, given)
    named = {option: POLICIES[POLICIES.index(p)] for option, p in policies.items()}
    return Options(
        vocab_size, mode, parsed, heads=heads, policy_version=policy_version, on_error=on_error,
        modes=modes or {}, always=always, own=own, **named,
    )  # fmt: skip


def _check_asked(
    schema: RaggedSchema, mode: LogProb, modes: Mapping[str, LogProb], given: frozenset[str]
) -> None:
    for column in schema:
        own = modes.get(column.name, mode)
        where = Where(column=column.name)
        if column.name not in given:
            raise ConversionError(
                "the engine does not give this column", code="RF-A011", where=where,
                expected=", ".join(sorted(given)), got=column.name,
                remedy="leave it out, and add it to the converted samples later",
            )  # fmt: skip
        if column.log_prob is not None and column.log_prob.mode != own.mode:
            raise ConversionError(
                "a column is declared in another log-prob mode than the call", code="RF-A007",
                where=where, expected=own.mode, got=column.log_prob.mode,
                remedy="pass the logprobs_mode that the engine ran with; modes never mix",
            )  # fmt: skip
        if column.name == ROUTED_EXPERTS and (
            column.axis != "token" or len(column.shape) != 2 or column.type != pa.int16()
        ):
            raise ConversionError(
                "routed experts are int16 of shape (layers, k) on the token axis",
                code="RF-A011", where=where, expected=experts_column((1, 1)), got=column,
            )  # fmt: skip
