"""The plain part of YAML that configuration files are written in, without a YAML library.

Mappings by indentation, lists of scalars or of mappings, and scalars on one line. Anything else
(anchors, tags, block text, flow collections other than empty ones) is refused.
"""

from __future__ import annotations

import re
from typing import Any

from ragged_format.errors import ConversionError, Where

__all__ = ["dump", "parse"]

_CONSTANTS: dict[str, Any] = {
    "true": True, "false": False, "null": None, "~": None, "": None, "[]": [], "{}": {},
}  # fmt: skip
_KEY = re.compile(r"([A-Za-z_][\w.-]*):(?:\s+(.*))?$")
_REFUSED = tuple("&*!|>[{%@`")


def parse(text: str, where: Where | None = None) -> Any:
    r"""Return the value of a document.

    Raises
    ------
    ConversionError
        It is not of the plain part (``RF-A002``).

    Examples
    --------
    >>> parse("d: 11\nterms:\n- 0\n- sqrt\nbins:\n- bits: 6\n  size: 46\n")
    {'d': 11, 'terms': [0, 'sqrt'], 'bins': [{'bits': 6, 'size': 46}]}
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if bare.strip() and not bare.lstrip().startswith("#") and bare.strip() != "---":
            lines.append((len(bare) - len(bare.lstrip()), bare.strip(), number))
    reader = _Reader(lines, where or Where())
    value = reader.block(0) if lines else {}
    if reader.at < len(lines):
        reader.fail(lines[reader.at][1])
    return value


class _Reader:
    def __init__(self, lines: list[tuple[int, str, int]], where: Where) -> None:
        self.lines, self.where, self.at = lines, where, 0

    def fail(self, got: str) -> None:
        number = self.lines[min(self.at, len(self.lines) - 1)][2]
        raise ConversionError(
            "the configuration is not plain YAML", code="RF-A002",
            where=Where(file=self.where.file, position=number), expected="key: value, or - value",
            got=got, remedy="pass the configuration as a mapping",
        )  # fmt: skip

    def block(self, indent: int) -> Any:
        is_list = self.lines[self.at][1].startswith("-")
        return self.items(indent) if is_list else self.mapping(indent)

    def mapping(self, indent: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while self.at < len(self.lines) and self.lines[self.at][0] == indent:
            text = self.lines[self.at][1]
            match = _KEY.match(text)
            if match is None or match[1] in out:
                self.fail(text)
                break
            out[match[1]] = self.value(match[2], indent)
        return out

    def value(self, text: str | None, indent: int) -> Any:
        if text:
            found = self.scalar(text)
            self.at += 1
            return found
        self.at += 1
        if self.at == len(self.lines):
            return None
        depth, following, _ = self.lines[self.at]
        # Lists may stand at the depth of their key.
        if depth > indent or (depth == indent and following.startswith("-")):
            return self.block(depth)
        return None

    def items(self, indent: int) -> list[Any]:
        out: list[Any] = []
        while self.at < len(self.lines):
            depth, text, number = self.lines[self.at]
            if depth != indent or not (text == "-" or text.startswith("- ")):
                break
            rest = text[1:].strip()
            if _KEY.match(rest):
                inside = indent + text.index(rest)
                self.lines[self.at] = (inside, rest, number)
                out.append(self.mapping(inside))
            else:
                out.append(self.scalar(rest))
                self.at += 1
        return out

    def scalar(self, text: str) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            return text[1:-1]
        if text.startswith(_REFUSED):
            self.fail(text)
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text


def dump(value: dict[str, Any]) -> str:
    """Return a flat mapping of scalars and lists of scalars as a document, keys sorted."""
    lines = []
    for key, item in sorted(value.items()):
        if isinstance(item, list):
            lines.append(f"{key}: []" if not item else f"{key}:")
            lines += [f"- {part}" for part in item]
        else:
            lines.append(f"{key}: {str(item).lower() if isinstance(item, bool) else item}")
    return "\n".join(lines) + "\n"
