"""Dumps of samples that torch.save wrote, read without running anything in them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragged_format.errors import ConversionError, MissingDependencyError, Where

__all__ = ["load_samples", "save_samples"]


def _torch(need: str) -> Any:
    try:
        import torch
    except ImportError as err:
        raise MissingDependencyError(
            f"{need} needs torch", expected="the package torch", got=str(err),
            remedy="pip install ragged-format[torch]",
        ) from err  # fmt: skip
    return torch


def load_samples(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a dump, a mapping with ``samples``, each with a ``sample_id``.

    Raises
    ------
    ConversionError
        The file is not such a dump, or holds more than plain values and tensors (``RF-A002``).
    """
    torch = _torch("reading a .pt file")
    place = Path(path)
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as err:
        raise ConversionError(
            "the file is not a dump of plain values and tensors", code="RF-A002",
            where=Where(file=path), expected="what torch.save wrote of samples", got=str(err),
        ) from err  # fmt: skip
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list) or not all(isinstance(s, Mapping) for s in samples):
        raise ConversionError(
            "a dump has samples", code="RF-A002", where=Where(file=path),
            expected="a mapping with a list 'samples'", got=type(dump).__name__,
        )  # fmt: skip
    for number, sample in enumerate(samples):
        index = sample.get("index")
        name = f"{place.stem}/{number if index is None else index}"
        yield {**sample, "sample_id": sample.get("sample_id", name)}


def save_samples(
    samples: Iterable[Mapping[str, Any]], path: Path, number: int, tensors: frozenset[str]
) -> None:
    """Write samples as a dump: the arrays named in `tensors` as tensors, others as lists."""
    torch = _torch("writing a .pt file")
    plain = [
        {name: _plain(torch, value, keep=name in tensors) for name, value in sample.items()}
        for sample in samples
    ]
    torch.save({"rollout_id": number, "samples": plain}, path)


def _plain(torch: Any, value: Any, *, keep: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value.copy()) if keep else value.tolist()
