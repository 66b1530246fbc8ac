"""Texts of token ids for the page, by a ``tokenizer.json`` of the library tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragged_format.errors import Where
from ragged_server.http.errors import SettingsError

__all__ = ["Texts"]

# Texts that are remembered: about as many as a vocabulary has.
_MOST_KEPT = 1 << 18


class Texts:
    """Texts of token ids; none without a tokenizer. Thread-safe.

    Parameters
    ----------
    file : Path, optional
        A ``tokenizer.json``.

    Raises
    ------
    SettingsError
        The library tokenizers is not installed, or does not read the file (``RF-H016``).

    Examples
    --------
    >>> Texts(None).of([1, 2])
    {}
    """

    def __init__(self, file: Path | None) -> None:
        self._tokenizer: Any = None if file is None else _load(file)
        self._known: dict[int, str] = {}

    def __bool__(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """Return the texts of ids, by their decimal digits; ids that have none are left out."""
        if self._tokenizer is None:
            return {}
        if len(self._known) > _MOST_KEPT:
            self._known = {}
        known = self._known
        out = {}
        for token in ids:
            text = known.get(token)
            if text is None:
                text = known[token] = self._text(token)
            if text:
                out[str(token)] = text
        return out

    def _text(self, token: int) -> str:
        if token < 0 or self._tokenizer.id_to_token(token) is None:
            return ""  # the model's vocabulary may be larger than the tokenizer's
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _load(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise SettingsError(
            "a tokenizer needs a library that is not installed", expected="tokenizers",
            got=str(err), remedy="pip install tokenizers, or leave the setting out",
        ) from err  # fmt: skip
    try:
        return Tokenizer.from_file(str(file))
    except Exception as err:  # the library raises Exception itself
        raise SettingsError(
            "the tokenizer cannot be read", where=Where(file=str(file)),
            expected="a tokenizer.json", got=str(err),
        ) from err  # fmt: skip
