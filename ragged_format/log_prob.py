"""What the values of a log-prob column mean, and what pads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ragged_format.arguments import shown
from ragged_format.errors import SchemaMismatchError

__all__ = ["LOG_PROB_FILL", "LogProb", "is_finite"]

# Finite, because -inf as padding gives NaN gradients in some losses (huggingface/trl#5594).
LOG_PROB_FILL = -30000.0


@dataclass(frozen=True, slots=True)
class LogProb:
    """What the values of a log-prob column mean.

    Attributes
    ----------
    mode : {"processed", "raw"}
        After or before temperature and truncation of the sampler.
    normalizer : {"support", "vocabulary"}
        The set of ids over which the probabilities sum to one.
    value : {"log_prob", "logit"}
        Whether values are normalised log-probs (nats) or plain logits.
    temperature : float, optional
        Sampling temperature where one value holds for the whole column, finite and > 0.

    Raises
    ------
    SchemaMismatchError
        Another value (``RF-S009``).
    """

    mode: Literal["processed", "raw"] = "processed"
    normalizer: Literal["support", "vocabulary"] = "support"
    value: Literal["log_prob", "logit"] = "log_prob"
    temperature: float | None = None

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "mode": ("processed", "raw"),
        "normalizer": ("support", "vocabulary"),
        "value": ("log_prob", "logit"),
    }

    def __post_init__(self) -> None:
        for key, choices in self.CHOICES.items():
            if getattr(self, key) not in choices:
                raise SchemaMismatchError(
                    f"there is no such {key} of log-probs", code="RF-S009",
                    expected=" or ".join(choices), got=shown(getattr(self, key)),
                    remedy="say how the engine made them; the specification's modes are all",
                )  # fmt: skip
        temperature = self.temperature
        if temperature is not None and not (is_finite(temperature) and temperature > 0):
            raise SchemaMismatchError(
                "the temperature of log-probs is a finite number > 0", code="RF-S009",
                expected="> 0", got=temperature, remedy="leave it out if it is not known",
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the mode as the JSON object kept in field metadata."""
        out: dict[str, Any] = {
            "mode": self.mode, "normalizer": self.normalizer, "value": self.value,
        }  # fmt: skip
        if self.temperature is not None:
            out["temperature"] = float(self.temperature)
        return out

    @classmethod
    def from_json(cls, data: Any) -> LogProb:
        """Parse the JSON object kept in field metadata; anything else raises ``RF-S009``."""
        if not isinstance(data, dict) or not set(data) <= {*cls.CHOICES, "temperature"}:
            raise SchemaMismatchError(
                "this is no log-prob mode", code="RF-S009",
                expected=f"an object of {', '.join(cls.CHOICES)} and temperature", got=data,
            )  # fmt: skip
        return cls(**data)


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite Python number (a bool is none)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]
