"""The section of a report on what the data is made of: columns, flags, shards, lineage."""

from __future__ import annotations

from typing import Any

from ragged_pipeline.reports.blocks import Figure, Note, Section, Table
from ragged_pipeline.reports.charts import Bar, bars
from ragged_pipeline.reports.numerals import bytes_text, full, percent
from ragged_pipeline.reports.sections import plural, words_figure

__all__ = ["data_section"]

_SHARDS = 20


def data_section(data: dict[str, Any]) -> Section:
    """Return the section of what the data is made of."""
    section = Section("data", "Columns and files")
    total = data["totals"]["bytes"]
    heavy = sorted(data["columns"], key=lambda c: (-c["bytes"], c["name"]))
    shown = [c for c in heavy if c["bytes"]][:16]
    if shown:
        items = [
            Bar(c["name"], c["bytes"], f"{bytes_text(c['bytes'])} · {percent(c['bytes'] / total)}")
            for c in shown
        ]
        section.blocks.append(
            Figure(
                "column-bytes", "Bytes by column",
                f"Size in memory of {len(data['columns'])} columns, together {bytes_text(total)}; "
                f"the largest {len(shown)} are shown.",
                lambda width: bars(width, items, x_label="bytes"),
                ("column", "bytes", "share"),
                [(c["name"], full(c["bytes"]), percent(c["bytes"] / total)) for c in heavy],
                wide=True,
            )
        )  # fmt: skip
    elements = data["totals"]["elements"]
    section.blocks.append(
        Table(
            "Columns", "By the axis on which each lies; bytes in memory, uncompressed.",
            ("column", "axis", "type", "elements", "nulls", "bytes", "notes"),
            [
                (c["name"], c["axis"], c["type"] + "".join(f"[{n}]" for n in c["shape"]),
                 full(elements.get(c["axis"], 0)), full(c["nulls"]), bytes_text(c["bytes"]),
                 ", ".join(c["notes"]).replace("_", " "))
                for c in data["columns"]
            ],
            numbers=("elements", "nulls", "bytes"),
        )
    )  # fmt: skip
    for key, title, column in (
        ("environments", "Environments", "env_name"), ("teachers", "Teachers", "teacher_id"),
    ):  # fmt: skip
        if data[column] is not None:
            section.blocks.append(words_figure(key, title, data[column], column))
    if data["flags"] is None:
        section.blocks.append(Note("The data has no column target_flags."))
    else:
        targets = data["totals"]["targets"]
        section.blocks.append(
            Table(
                "Flags of targets", f"Of {plural(targets, 'target')}.",
                ("flag", "targets", "share"),
                [
                    (name, full(count), percent(count / targets if targets else None))
                    for name, count in data["flags"].items()
                ],
                numbers=("targets", "share"),
            )
        )  # fmt: skip
    _add_files(section, data["source"])
    return section


def _add_files(section: Section, source: dict[str, Any]) -> None:
    dataset = source["dataset"]
    if dataset is None:
        return
    shards = dataset["shards"]
    more = dataset["num_shards"] - len(shards[:_SHARDS])
    kinds = ", ".join(f"{full(n)} {name}" for name, n in dataset["encodings"].items())
    section.blocks.append(
        Table(
            "Shards",
            f"{plural(dataset['num_shards'], 'shard')} ({kinds}), together "
            f"{bytes_text(dataset['bytes'])}" + (f"; the first {_SHARDS}." if more > 0 else "."),
            ("shard", "records", "bytes", "encoding", "digest"),
            [
                (s["name"], full(s["rows"]), bytes_text(s["bytes"]), s["encoding"], s["digest"])
                for s in shards[:_SHARDS]
            ],
            numbers=("records", "bytes"),
        )
    )  # fmt: skip
    lineage = list(_lines(dataset["lineage"]))
    if lineage:
        section.blocks.append(
            Table("Lineage", "What the writers said about where the data comes from.",
                  ("key", "value"), lineage)
        )  # fmt: skip


def _lines(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Return nested values as (path, value), at most 200."""
    if isinstance(value, dict) and value:
        parts = [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        parts = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    else:
        return [(path, "-" if value in ({}, []) else str(value))] if path else []
    return [line for key, item in parts[:200] for line in _lines(item, key)][:200]
