"""The transport structs of prime-rl, declared anew from their documented order of fields.

They travel as MessagePack arrays, so that the order is the format: new fields only come last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ragged_format.adapters._msgpack import load_msgspec
from ragged_format.errors import ConversionError

if TYPE_CHECKING:
    import msgspec
else:
    msgspec = load_msgspec()

__all__ = [
    "PARTS",
    "Generation",
    "MicroBatch",
    "RoutedExperts",
    "SamplingMask",
    "TrainingSample",
    "plain",
]

# A message's parts, not decoded yet.
PARTS = list[msgspec.Raw]

Generation = Literal["kept_tokens", "sampling_mask"]
"""Which structs are written: those of the merge that introduced masks, or the renamed ones."""
GENERATIONS = ("kept_tokens", "sampling_mask")


class SamplingMask(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """Candidate sets of all tokens of a row.

    Attributes
    ----------
    ids : bytes
        int32, little-endian, all sets end to end.
    counts : bytes
        int32, little-endian, one per token of the whole row; 0 for no set.
    logprobs : bytes, optional
        float32, little-endian, parallel to `ids`. Earlier ``KeptTokens`` had none.
    """

    ids: bytes
    counts: bytes
    logprobs: bytes | None = None


class RoutedExperts(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """Experts of each token, raw little-endian integers of shape (tokens, layers, k)."""

    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """One sample on its way to the packer; lists have one entry per token."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float | None]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: Any = None
    routed_experts: RoutedExperts | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None
    sampling_mask: SamplingMask | None = None
    trace_id: str | None = None
    branch_index: int | None = None


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """One packed row as a trainer rank reads it; lists have one entry per token.

    ``sequence_lengths`` and ``seq_lens`` have one entry per sample, of which the last includes the
    padding.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float] | None
    inference_logprobs: list[float | None]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int] | None = None
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    mm_kwargs: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    sampling_mask: SamplingMask | None = None
    trace_ids: list[str | None] | None = None
    branch_indices: list[int | None] | None = None


# Fields that came after the mask.
_LATER = {TrainingSample: 2, MicroBatch: 2}


def plain(item: TrainingSample | MicroBatch, generation: Generation) -> list[Any]:
    """Return the fields of a struct in order, as they are written.

    Raises
    ------
    ConversionError
        The older structs cannot hold log-probs of candidates or trace ids (``RF-A001``).
    """
    fields = [getattr(item, name) for name in item.__struct_fields__]
    while len(fields) > len(item.__struct_fields__) - _LATER[type(item)] and fields[-1] is None:
        fields.pop()
    if generation == "kept_tokens":
        mask = item.sampling_mask
        later = len(fields) > len(item.__struct_fields__) - _LATER[type(item)]
        if later or (mask is not None and mask.logprobs is not None):
            raise ConversionError(
                "the older structs of prime-rl lack a field", expected="kept tokens alone",
                got="trace ids" if later else "log-probs of candidates",
                remedy="write generation='sampling_mask', or leave the columns out",
            )  # fmt: skip
        if mask is not None:
            fields[item.__struct_fields__.index("sampling_mask")] = [mask.ids, mask.counts]
    return fields
