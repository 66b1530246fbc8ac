"""Routed experts: from the engine's base64 .npy to a fixed-shape column on the token axis."""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._values import malformed
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters.report import ConversionReport

__all__ = ["NO_EXPERT", "check_experts", "decode_experts", "experts_shape", "place_experts"]

NO_EXPERT = -1


def decode_experts(value: Any, forwarded: int, where: Where) -> npt.NDArray[Any]:
    """Return the experts of each forwarded token, (forwarded, layers, k) integers.

    Parameters
    ----------
    value : str
        Base64 of a ``.npy`` file, header included.
    forwarded : int
        Tokens that went through the model: all but the last, less an omitted prompt prefix.
    where : Where

    Raises
    ------
    ConversionError
        Not such a file (``RF-A002``), or another shape (``RF-A006``): engines have returned
        shapes that lack tokens (sgl-project/sglang#20964, vllm-project/vllm#35744).
    """
    try:
        raw = base64.b64decode(value, validate=True)
        experts = np.load(io.BytesIO(raw), allow_pickle=False)
    except (binascii.Error, TypeError, ValueError, EOFError, OSError) as err:
        raise ConversionError(
            "routed experts are base64 of a .npy file", code="RF-A002", where=where,
            expected="base64 of a .npy file", got=str(err),
        ) from err  # fmt: skip
    return check_experts(experts, forwarded, where)


def check_experts(experts: Any, forwarded: int, where: Where) -> npt.NDArray[Any]:
    """Return experts, checked to be (forwarded, layers, k) integers that fit int16.

    Raises
    ------
    ConversionError
        No integers (``RF-A002``), or another shape (``RF-A006``).
    """
    if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
        malformed("routed experts are an array of integers", where, "an integer array", experts)
    if experts.ndim != 3 or len(experts) != forwarded or 0 in experts.shape[1:]:
        raise ConversionError(
            "routed experts have a row for every token but the last", code="RF-A006", where=where,
            expected=f"shape ({forwarded}, layers, k)", got=experts.shape,
            remedy="leave routed_experts out of columns= if the engine's build has this fault",
        )  # fmt: skip
    limit = np.iinfo(np.int16).max
    if experts.size and (experts.min() < 0 or experts.max() > limit):
        malformed(
            "an expert number fits int16", where, f"0 <= expert <= {limit}",
            int(experts.max() if experts.max() > limit else experts.min()),
        )  # fmt: skip
    return experts


def experts_shape(choices: Sequence[Choice]) -> tuple[int, int] | None:
    """Return (layers, k), the same for all choices; ``None`` if none has experts."""
    shape: tuple[int, int] | None = None
    for choice in choices:
        if choice.routed_experts is None:
            continue
        mine = (choice.routed_experts.shape[1], choice.routed_experts.shape[2])
        if shape not in (None, mine):
            raise ConversionError(
                "routed experts are of one model", code="RF-A006",
                where=choice.place("routed_experts"), expected=f"(layers, k) = {shape}", got=mine,
            )  # fmt: skip
        shape = mine
    return shape


def place_experts(
    choices: Sequence[Choice], shape: tuple[int, int], report: ConversionReport
) -> npt.NDArray[np.int16]:
    """Return the experts of every token, (tokens, layers * k) int16, -1 where there is none."""
    lengths = [choice.num_tokens for choice in choices]
    out = np.full((sum(lengths), shape[0] * shape[1]), NO_EXPERT, np.int16)
    begin = 0
    for choice, length in zip(choices, lengths, strict=True):
        experts = choice.routed_experts
        if experts is None:
            report.noted["routed_experts_missing"] += 1
        else:
            first = begin + choice.routed_start
            out[first : first + len(experts)] = experts.reshape(len(experts), -1)
        begin += length
    return out
