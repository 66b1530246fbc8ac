"""Records and schemas as people read them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ragged_format.cli.output import format_count, grid
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

__all__ = ["axis_lines", "column_json", "record_table", "schema_table"]

_VALUES = 10
_GROUPS = 4
_LETTERS = 80


def axis_lines(schema: RaggedSchema) -> Iterator[tuple[str, str]]:
    """Yield (axis, its name drawn into the tree of axes), parents first."""
    yield RECORD, RECORD

    def below(parent: str, indent: str) -> Iterator[tuple[str, str]]:
        children = schema.children(parent)
        for number, axis in enumerate(children):
            last = number == len(children) - 1
            yield axis.name, indent + ("└─ " if last else "├─ ") + axis.name
            yield from below(axis.name, indent + ("   " if last else "│  "))

    yield from below(RECORD, "")


def schema_table(schema: RaggedSchema, elements: Mapping[str, int] | None = None) -> Table:
    """Return the columns grouped by axis, with the number of elements where it is known."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("  axis", "elements", "column", "type", "notes"):
        table.add_column(name, justify="right" if name == "elements" else "left", overflow="fold")
    for axis, drawn in axis_lines(schema):
        label = "  " + drawn
        count = format_count(elements[axis]) if elements and axis in elements else ""
        # The tree's vertical lines go on beside the further columns of an axis.
        rest = "  " + drawn.removesuffix(axis).replace("├─", "│ ").replace("└─", "  ")
        described = [_described(column) for column in schema.on(axis)] or [("", "", "")]
        for name, type_, notes in described:
            table.add_row(Text(label, style="bold"), count, name, type_, Text(notes, style="dim"))
            label, count = rest, ""
    return table


def _described(column: Column) -> tuple[str, str, str]:
    type_ = _type(column) + "".join(f"[{n}]" for n in column.shape)
    notes = []
    if column.opens is not None:
        notes.append(f"opens {column.opens}" + (" (0 or 1)" if column.mask else ""))
    if column.log_prob is not None:
        mode = column.log_prob
        notes.append(f"{mode.mode} {mode.value.replace('_', '-')} over the {mode.normalizer}")
        if mode.temperature is not None:
            notes.append(f"at temperature {mode.temperature}")
    if column.head_kind not in (None, "set"):
        notes.append(str(column.head_kind).replace("_", "-"))
    if column.nullable:
        notes.append("nullable")
    notes += [
        key.replace("_", " ") for key in ("approximate", "share_key", "media")
        if getattr(column, key)
    ]  # fmt: skip
    return column.name, type_, ", ".join(notes)


def _type(column: Column) -> str:
    """Return the name under which pyarrow makes the type: float32, not float."""
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return names.get(str(column.type), str(column.type))


def column_json(column: Column) -> dict[str, Any]:
    """Return a declaration as JSON values."""
    return {
        "name": column.name,
        "axis": column.axis,
        "type": _type(column),
        "shape": list(column.shape),
        "fill": column.fill,
        "nullable": column.nullable,
        "opens": column.opens,
        "mask": column.mask,
        "log_prob": None if column.log_prob is None else column.log_prob.to_json(),
        "head_kind": column.head_kind,
        "approximate": column.approximate,
        "share_key": column.share_key,
        "media": column.media,
    }


def record_table(schema: RaggedSchema, record: pa.RecordBatch) -> Table:
    """Return the beginning of every column of a one-record batch, sets grouped by their owner."""
    rows = []
    values = {name: record.column(name)[0].as_py() for name in record.schema.names}
    for axis, _ in axis_lines(schema):
        for column in schema.on(axis):
            value = values[column.name]
            if axis == RECORD:
                shown = _value(value)
            elif (counts := schema.axes[axis].counts) is None or schema.axes[axis].mask:
                shown = _list(value)
            else:
                shown = _groups(value, values[counts])
            rows.append((column.name, Text(shown)))
    return grid(rows, indent=4)


def _value(value: Any) -> str:
    if value is None:
        return "null"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LETTERS else text[:_LETTERS] + "…"


def _list(values: list[Any]) -> str:
    """Return the first values, as many as fit, and how many there are."""
    return _begun(list(map(_value, values[:_VALUES])), len(values))


def _groups(values: list[Any], counts: list[int]) -> str:
    """Return the first sets, and how many there are."""
    ends = list(accumulate(counts[:_GROUPS]))
    sets = [
        f"[{_list(values[end - count : end])}]" for end, count in zip(ends, counts, strict=False)
    ]
    return _begun(sets, len(counts))


def _begun(shown: list[str], total: int) -> str:
    kept: list[str] = []
    letters = 0
    for text in shown:
        if kept and letters + len(text) > _LETTERS:
            break
        kept.append(text)
        letters += len(text) + 1
    rest = f" … ({format_count(total)})" if total > len(kept) else ""
    return " ".join(kept) + rest
