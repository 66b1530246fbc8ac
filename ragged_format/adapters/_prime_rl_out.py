"""Samples as the fields of prime-rl's structs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_format.adapters._outgoing import Outgoing
from ragged_format.adapters._prime_rl_in import HOLDS, WEIGHTS
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._prime_rl_structs import (
        MicroBatch,
        RoutedExperts,
        SamplingMask,
        TrainingSample,
    )
    from ragged_format.adapters._values import Floats

__all__ = ["Fields"]


class Fields:
    """Samples as arrays of all tokens."""

    def __init__(
        self, samples: pa.RecordBatch, temperature: float | None, experts_dtype: str
    ) -> None:
        self.source = source = Outgoing(samples, "prime-rl", HOLDS)
        self.experts_dtype = experts_dtype
        self.lengths = np.diff(source.offsets)
        log_probs = source.values("rollout_log_probs")
        if log_probs is None:
            raise ConversionError(
                "prime-rl needs the sampler's log-probs", expected="column 'rollout_log_probs'",
                got=", ".join(source.schema.columns),
            )  # fmt: skip
        self.by_token = {"logprobs": source.spread(log_probs)}
        self.by_token["temperatures"] = self._temperatures(temperature)
        for name, field in (
            ("advantages", "advantages"), ("ref_log_probs", "ref_logprobs"),
            ("loss_weights", "rl_weights"),
        ):  # fmt: skip
            values = source.values(name)
            if values is not None:
                self.by_token[field] = source.spread(values)
        for name in WEIGHTS:
            values = source.values(name)
            if values is not None:
                self.by_token[name] = values
        self.experts = source.values("routed_experts")
        self.sets = source.sets()
        if self.sets is not None:
            self.counts = source.spread(self.sets[0], 0, "<i4")
            self.bounds = source.candidate_bounds(self.sets[0])
        # Of each record whether it has advantages.
        self.advantages = np.ones(source.num_records, bool)
        if "advantages" not in self.by_token:
            scalars = np.array(source.record("advantage"), np.float64)
            self.advantages = ~np.isnan(scalars)
            per_target = np.repeat(scalars, np.diff(source.targets))
            self.by_token["advantages"] = source.spread(per_target)

    def _temperatures(self, default: float | None) -> Floats:
        values = self.source.values("temperatures")
        if values is not None:
            return values
        given = [default if t is None else t for t in self.source.record("temperature")]
        if None in given:
            raise ConversionError(
                "prime-rl needs the temperature of every sample",
                where=Where(row=given.index(None), column="temperature"), expected="a number",
                got=None, remedy="pass temperature=",
            )  # fmt: skip
        return np.repeat(np.array(given, np.float64), self.lengths)

    def fill(
        self, item: TrainingSample | MicroBatch, first: int, stop: int, *, padding: int = 0
    ) -> None:
        """Set the optional fields of the struct of the records [first, stop)."""
        begin, end = int(self.source.offsets[first]), int(self.source.offsets[stop])
        for name in ("advantages", "ref_logprobs", "rl_weights", *WEIGHTS):
            if name in self.by_token:
                setattr(item, name, [*self.by_token[name][begin:end].tolist(), *[0.0] * padding])
        if not self.advantages[first:stop].any():
            item.advantages = None
        item.sampling_mask = self._mask(first, stop, padding)
        item.routed_experts = self._experts(begin, end, padding)

    def _mask(self, first: int, stop: int, padding: int) -> SamplingMask | None:
        from ragged_format.adapters._prime_rl_structs import SamplingMask

        if self.sets is None:
            return None
        _, ids, log_probs = self.sets
        begin, end = self.source.offsets[first], self.source.offsets[stop]
        part = slice(self.bounds[first], self.bounds[stop])
        if part.start == part.stop:
            return None
        return SamplingMask(
            ids[part].astype("<i4", copy=False).tobytes(),
            self.counts[begin:end].tobytes() + bytes(4 * padding),
            None if log_probs is None else log_probs[part].astype("<f4", copy=False).tobytes(),
        )

    def _experts(self, begin: int, end: int, padding: int) -> RoutedExperts | None:
        values = self.experts
        if values is None:
            return None
        from ragged_format.adapters._prime_rl_structs import RoutedExperts

        shape = self.source.schema["routed_experts"].shape
        part = values.reshape(-1, *shape)[begin:end]
        dtype = np.dtype(self.experts_dtype).newbyteorder("<")
        wide = np.zeros((end - begin + padding, *shape), dtype)
        wide[: end - begin] = part
        if (wide[: end - begin] != part).any():
            raise ConversionError(
                "an expert number does not fit the type asked for",
                where=Where(column="routed_experts"), expected=self.experts_dtype,
                got=f"{part.min()} to {part.max()}", remedy="pass a wider experts_dtype=",
            )  # fmt: skip
        return RoutedExperts(wide.tobytes(), list(wide.shape), self.experts_dtype)
