"""DistillKit's encodings of heads: bit-packed ids, and log-probs as exact values with a curve.

One position takes, in ``compressed_logprobs``, `exact_k` values, the coefficients of a curve over
the others, and per bin a scale with packed residuals; in ``bytepacked_indices``, k ids of
``ceil(log2 d)`` bits each, most significant bit first. Decoding computes in float64, so that it
differs from DistillKit's own, which computes in the type of the coefficients, by that type's
rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import ConversionError, UnsupportedFeatureError, Where

__all__ = [
    "Bin",
    "Codec",
    "LegacyCodec",
    "index_bits",
    "pack_bits",
    "read_config",
    "unpack_bits",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Bits of a field that fit, from any bit of a byte on, in a word of so many bytes.
_WORDS = ((25, 4), (57, 8))


def index_bits(size: int) -> int:
    """Return the bits of one packed id of a vocabulary; as DistillKit, from a float32 logarithm."""
    return int(np.ceil(np.log2(np.float32(size))))


def unpack_bits(packed: Bytes, bits: int, count: int) -> npt.NDArray[Any]:
    """Return the unsigned fields of each row, (n, count) uint32 or uint64, first bits highest.

    Parameters
    ----------
    packed : (n, b) uint8
        ``b >= ceil(count * bits / 8)``.
    """
    starts = np.arange(count) * bits
    for most, word in _WORDS:
        if bits <= most:
            padded = np.zeros((len(packed), packed.shape[1] + word), np.uint8)
            padded[:, : packed.shape[1]] = packed
            words = _words(padded, packed.shape[1], word)
            fields = words[:, starts // 8]
            kind = fields.dtype.type
            fields >>= (word * 8 - bits - starts % 8).astype(kind)
            fields &= kind((1 << bits) - 1)
            return fields
    one = np.unpackbits(packed, axis=1)[:, : count * bits].reshape(len(packed), count, bits)
    powers = np.uint64(1) << np.arange(bits - 1, -1, -1, dtype=np.uint64)
    wide: npt.NDArray[Any] = one.astype(np.uint64) @ powers
    return wide


def _words(padded: Bytes, count: int, word: int) -> npt.NDArray[Any]:
    """Return the big-endian word that begins at each of the first `count` bytes of every row."""
    kind = np.uint32 if word == 4 else np.uint64
    out = np.zeros((len(padded), count), kind)
    for byte in range(word):
        out <<= kind(8)
        out |= padded[:, byte : byte + count]
    return out


def pack_bits(values: npt.NDArray[Any], bits: int) -> Bytes:
    """Return fields of `bits` bits packed back to back per row, zero-padded to a byte."""
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    one = (values.astype(np.uint64)[:, :, None] >> shifts) & np.uint64(1)
    return np.packbits(one.astype(np.uint8).reshape(len(values), -1), axis=1)


def _floats(raw: Bytes, kind: str) -> Floats:
    """Return little-endian floats of a type of the format, (n, b) uint8 as (n, b / width)."""
    raw = np.ascontiguousarray(raw)
    if kind == "bfloat16":
        high = raw.view("<u2").astype(np.uint32) << np.uint32(16)
        return high.view(np.float32).astype(np.float64)
    return raw.view(np.dtype(kind).newbyteorder("<")).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Bin:
    """Residuals of so many values, in so many bits each, times one scale per position."""

    scale_dtype: str
    element_bits: int
    num_elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of one position."""
        return _WIDTHS[self.scale_dtype] + (self.element_bits * self.num_elements + 7) // 8


@dataclass(frozen=True, slots=True)
class Codec:
    """``compression_config.yaml``.

    Attributes
    ----------
    d : int
        Ids are below it: the vocabulary, often plus one.
    k : int
        Slots of a position.
    exact_k, exact_dtype
        Values stored as they are.
    polynomial_terms : tuple of int or str
        Powers, or "sqrt" and "exp".
    term_dtype : str
        Of the coefficients.
    residual_bins : tuple of Bin
    delta_encoding, normalize_t : bool
    """

    d: int
    k: int
    exact_k: int
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    residual_bins: tuple[Bin, ...] = ()
    delta_encoding: bool = True
    normalize_t: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether values come back as the float32 log-probs that they were."""
        full = self.exact_k == self.k and self.exact_dtype in ("float32", "float64")
        return full and not self.delta_encoding

    @property
    def index_bytes(self) -> int:
        """Bytes of the ids of one position."""
        return (self.k * index_bits(self.d) + 7) // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of the log-probs of one position."""
        exact = self.exact_k * _WIDTHS[self.exact_dtype]
        terms = len(self.polynomial_terms) * _WIDTHS[self.term_dtype]
        return exact + terms + sum(part.nbytes for part in self.residual_bins)

    def ids(self, packed: Bytes) -> npt.NDArray[Any]:
        """Return the ids of each position, (n, k) uint32."""
        return unpack_bits(packed, index_bits(self.d), self.k)

    def pack_ids(self, ids: npt.NDArray[Any]) -> Bytes:
        """Return the bytes of (n, k) ids."""
        return pack_bits(ids, index_bits(self.d))

    def log_probs(self, raw: Bytes) -> Floats:
        """Return the log-probs of each position, (n, k) float64."""
        end = self.exact_k * _WIDTHS[self.exact_dtype]
        exact = _floats(raw[:, :end], self.exact_dtype)
        rest = np.zeros((len(raw), self.k - self.exact_k))
        if self.polynomial_terms:
            begin, end = end, end + len(self.polynomial_terms) * _WIDTHS[self.term_dtype]
            rest += _floats(raw[:, begin:end], self.term_dtype) @ self._curve(rest.shape[1])
        first = 0
        for part in self.residual_bins:
            begin, end = end, end + part.nbytes
            rest[:, first : first + part.num_elements] += _residuals(raw[:, begin:end], part)
            first += part.num_elements
        out = np.concatenate([exact, rest], axis=1)
        return np.cumsum(out, axis=1) if self.delta_encoding else out

    def _curve(self, size: int) -> Floats:
        """Return the terms at each of `size` places, (terms, size)."""
        at = np.linspace(0, 1, size) if self.normalize_t else np.arange(size, dtype=np.float64)
        named = {"sqrt": np.sqrt, "exp": np.exp}
        terms = [named[t](at) if isinstance(t, str) else at**t for t in self.polynomial_terms]
        return np.stack(terms)

    def pack_log_probs(self, values: npt.NDArray[Any]) -> Bytes:
        """Return the bytes of (n, k) log-probs of an exact configuration.

        Raises
        ------
        UnsupportedFeatureError
            The configuration fits a curve (``RF-V002``).
        """
        if not self.is_exact:
            raise UnsupportedFeatureError(
                "only exact configurations are written",
                expected="exact_k = k in float32 or float64, no delta_encoding", got=self,
            )  # fmt: skip
        kind = np.dtype(self.exact_dtype).newbyteorder("<")
        return np.ascontiguousarray(values.astype(kind)).view(np.uint8)

    def to_config(self) -> dict[str, Any]:
        """Return the configuration as plain values, keys as DistillKit has them."""
        return {
            "d": self.d, "delta_encoding": self.delta_encoding, "error_diffusion": False,
            "exact_dtype": self.exact_dtype, "exact_k": self.exact_k, "k": self.k,
            "normalize_t": self.normalize_t, "polynomial_terms": list(self.polynomial_terms),
            "residual_bins": [], "term_dtype": self.term_dtype,
        }  # fmt: skip


def _residuals(raw: Bytes, part: Bin) -> Floats:
    width = _WIDTHS[part.scale_dtype]
    scale = _floats(raw[:, :width], part.scale_dtype)
    fields = unpack_bits(raw[:, width:], part.element_bits, part.num_elements).astype(np.float64)
    if part.element_bits == 1:  # a sign
        return (fields * 2 - 1) * scale
    return (fields - 2.0 ** (part.element_bits - 1)) * scale


@dataclass(frozen=True, slots=True)
class LegacyCodec:
    """``legacy_logit_compression.yaml``: ids in 64-bit words, lowest bits first; values as lists.

    Attributes
    ----------
    vocab_size, k, exact_k
        As in :class:`Codec`.
    polynomial_degree : int
    invert_polynomial : bool
        Powers are negative.
    with_sqrt_term : bool
    """

    vocab_size: int
    k: int
    exact_k: int
    polynomial_degree: int
    invert_polynomial: bool = True
    with_sqrt_term: bool = False
    is_exact: bool = False

    @property
    def d(self) -> int:
        """Ids are below it."""
        return self.vocab_size

    def ids(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Return the ids of each position, (n, k), of (n, w) words."""
        bits = index_bits(self.vocab_size)
        shifts = (np.arange(64 // bits) * bits).astype(np.uint64)
        fields = (words[:, :, None] >> shifts) & np.uint64((1 << bits) - 1)
        return fields.reshape(len(words), -1)[:, : self.k]

    def pack_ids(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the words of (n, k) ids."""
        bits = index_bits(self.vocab_size)
        each = 64 // bits
        padded = np.zeros((len(ids), -(-self.k // each) * each), np.uint64)
        padded[:, : self.k] = ids
        shifts = (np.arange(each) * bits).astype(np.uint64)
        words: npt.NDArray[np.uint64] = np.bitwise_or.reduce(
            padded.reshape(len(ids), -1, each) << shifts, axis=2
        )
        return words

    def log_probs(self, exact: npt.NDArray[Any], coefficients: npt.NDArray[Any]) -> Floats:
        """Return the values of each position, (n, k) float64, of exact ones and coefficients."""
        at = np.arange(1, self.k - self.exact_k + 1, dtype=np.float64)
        sign = -1 if self.invert_polynomial else 1
        terms = [at ** (sign * power) for power in range(self.polynomial_degree + 1)]
        if self.with_sqrt_term:
            terms.append(np.sqrt(at))
        curve = coefficients.astype(np.float64) @ np.stack(terms)
        return np.concatenate([exact.astype(np.float64), curve], axis=1)


def read_config(config: Mapping[str, Any], where: Where | None = None) -> Codec | LegacyCodec:
    """Return the codec that a configuration describes.

    Raises
    ------
    ConversionError
        A value is missing or not allowed (``RF-A002``).
    """
    try:
        if "vocab_size" in config:
            return LegacyCodec(
                vocab_size=int(config["vocab_size"]), k=int(config["k"]),
                exact_k=int(config["exact_k"]),
                polynomial_degree=int(config["polynomial_degree"]),
                invert_polynomial=bool(config.get("invert_polynomial", True)),
                with_sqrt_term=bool(config.get("with_sqrt_term", False)),
            )  # fmt: skip
        bins = tuple(
            Bin(str(part["scale_dtype"]), int(part["element_bits"]), int(part["num_elements"]))
            for part in config.get("residual_bins") or ()
        )
        codec = Codec(
            d=int(config["d"]), k=int(config["k"]), exact_k=int(config["exact_k"]),
            exact_dtype=str(config.get("exact_dtype", "float32")),
            polynomial_terms=tuple(config.get("polynomial_terms") or ()),
            term_dtype=str(config.get("term_dtype", "float32")), residual_bins=bins,
            delta_encoding=bool(config.get("delta_encoding", True)),
            normalize_t=bool(config.get("normalize_t", False)),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as err:
        raise _bad(repr(err), "the keys of DistillKit's configuration", where) from None
    kinds = {codec.exact_dtype, codec.term_dtype, *(part.scale_dtype for part in bins)}
    if unknown := kinds - set(_WIDTHS):
        raise _bad(sorted(unknown), ", ".join(_WIDTHS), where)
    for term in codec.polynomial_terms:
        if term not in ("sqrt", "exp") and (isinstance(term, bool) or not isinstance(term, int)):
            raise _bad(term, "powers, sqrt, exp", where)
    rest = codec.k - codec.exact_k
    if not 0 <= codec.exact_k <= codec.k or codec.d < 1 or codec.k < 1:
        raise _bad(f"d {codec.d}, k {codec.k}, exact_k {codec.exact_k}", "exact_k <= k", where)
    if any(not 1 <= part.element_bits <= 64 or part.num_elements < 1 for part in bins):
        raise _bad(bins, "bins of 1 to 64 bits", where)
    if sum(part.num_elements for part in bins) > rest:
        raise _bad(bins, f"at most {rest} residuals", where)
    return codec


def _bad(got: object, expected: str, where: Where | None) -> ConversionError:
    return ConversionError(
        "the compression configuration is not one of DistillKit's", code="RF-A002", where=where,
        expected=expected, got=got,
    )  # fmt: skip
