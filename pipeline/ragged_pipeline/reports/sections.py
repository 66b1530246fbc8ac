"""The sections of a report, from its statistics: lengths, sets, padding, heads."""

from __future__ import annotations

import re
from typing import Any

import xxhash

from ragged_pipeline.reports.blocks import Figure, Note, Section, Table, Tile
from ragged_pipeline.reports.charts import Bar, Strip, bars, columns, curve, strips
from ragged_pipeline.reports.numerals import bytes_text, full, percent, short, span

__all__ = ["heads", "histogram_figure", "lengths", "padding", "plural", "sets", "words_figure"]

_MEASURES = {
    "tokens": "Tokens", "prompt": "Prompt", "completion": "Completion", "targets": "Targets",
}  # fmt: skip
_TITLES = {
    "tokens": "Length of samples", "prompt": "Length of prompts",
    "completion": "Length of completions", "targets": "Targets of samples",
}  # fmt: skip
_QUANTILES = ("p1", "p5", "p25", "p50", "p75", "p95", "p99")
_SIZE_HEADERS = ("size", "how many", "share")


def plural(count: float, word: str) -> str:
    """Return a count with its noun.

    Examples
    --------
    >>> plural(1, "record"), plural(1200, "record")
    ('1 record', '1,200 records')
    """
    return f"{full(count)} {word}{'' if count == 1 else 's'}"


def histogram_figure(
    key: str, title: str, described: dict[str, Any], *, unit: str, of: str, caption: str = "",
    log: bool = False, paint: str = "series1", wide: bool = False, integer: bool = True,
) -> Figure | Note:  # fmt: skip
    """Return the histogram of a distribution, or a sentence where it is empty.

    Parameters
    ----------
    key, title : str
        Of the figure.
    described : dict
        A distribution of the statistics, with its histogram.
    unit : str
        What is measured, with its unit.
    of : str
        What is counted, singular.
    """
    if not described["count"]:
        return Note(f"{title}: there is no value.")
    if described["min"] == described["max"]:
        every = (
            f"each of {full(described['count'])} {of}s" if described["count"] > 1 else f"the {of}"
        )
        return Note(f"{title}: {full(described['min'])} for {every}.")
    bins = described["histogram"]
    counts = [b["count"] for b in bins]
    labels = [span(b["low"], b["high"], integer=integer) for b in bins]
    widths = {round(b["high"] - b["low"], 9) for b in bins}
    edges = len(bins) > 12 and widths != {0} and len(widths) <= 3
    shown = [short(b["low"]) for b in bins] if edges else labels
    text = (
        f"{caption} {full(described['count'])} {of}s: median {full(described['p50'])}, mean "
        f"{full(described['mean'])}, 95 % up to {full(described['p95'])}, "
        f"largest {full(described['max'])}."
    ).strip()
    if not described["exact"]:
        text += " Quantiles and bins within 1 %."
    if described["not_finite"]:
        text += f" {plural(described['not_finite'], 'value')} not finite, left out."
    return Figure(
        key, title, text,
        lambda width: columns(
            width, shown, counts, x_label=unit, y_label=f"{of}s", log=log, paint=paint, edges=edges,
            notes=[short(count) for count in counts] if len(counts) <= 12 else None,
        ),
        (unit, f"{of}s", "share"),
        [
            (label, full(count), percent(count / described["count"]))
            for label, count in zip(labels, counts, strict=True)
        ],
        wide=wide,
    )  # fmt: skip


def lengths(data: dict[str, Any]) -> Section:
    """Return the section of lengths."""
    section = Section("lengths", "Lengths")
    found = {name: data["lengths"][name] for name in _MEASURES}
    samples = data["totals"]["samples"]
    if not samples:
        section.blocks.append(Note("There is no sample."))
        return section
    items = [
        Strip(_MEASURES[name], tuple(d[q] for q in _QUANTILES), d["mean"], f"series{number}")
        for number, (name, d) in enumerate(found.items(), 1)
    ]
    section.blocks.append(
        Figure(
            "lengths", "Lengths at a glance",
            f"Tokens per sample, {plural(samples, 'sample')}. Line: 1 % to 99 %; bar: 5 % to 95 %; "
            "box: the middle half, cut at the median; square: the mean. The prompt is what "
            "precedes the first target, the completion the rest.",
            lambda width: strips(width, items, x_label="tokens per sample"),
            ("measure", "total", "mean", "min", *_QUANTILES, "max"),
            [
                (_MEASURES[name], full(d["total"]), full(d["mean"]), full(d["min"]),
                 *(full(d[q]) for q in _QUANTILES), full(d["max"]))
                for name, d in found.items()
            ],
            wide=True,
        )
    )  # fmt: skip
    for number, name in enumerate(_MEASURES, 1):
        unit = "targets" if name == "targets" else "tokens"
        section.blocks.append(
            histogram_figure(
                f"length-{name}", _TITLES[name], found[name],
                unit=f"{unit} per sample", of="sample", paint=f"series{number}",
            )
        )  # fmt: skip
    section.blocks.append(
        words_figure("finish-reasons", "Finish reasons", data["finish_reason"], "finish_reason")
    )
    return section


def words_figure(
    key: str, title: str, words: dict[str, Any] | None, column: str, of: str = "sample"
) -> Figure | Note:
    """Return how often each text occurs, or a sentence where there is no text."""
    if words is None:
        return Note(f"{title}: the data has no column {column}.")
    entries = words["values"]
    total = sum(e["count"] for e in entries) + words["others"]
    if not total:
        return Note(f"{title}: {column} is null in {plural(words['null'], of)}.")
    shown = entries[:12]
    rest = total - sum(e["count"] for e in shown)
    pairs = [(e["value"] or "(empty)", e["count"]) for e in shown]
    if rest:
        pairs.append((f"{full(max(len(entries) - 12, 1))} or more others", rest))
    items = [
        Bar(name, count, f"{short(count)} · {percent(count / total)}", "series1")
        for name, count in pairs
    ]
    null = f"; {full(words['null'])} more are null" if words["null"] else ""
    return Figure(
        key, title, f"{plural(total, of)} by {column}{null}.",
        lambda width: bars(width, items, x_label=f"{of}s"),
        (column, f"{of}s", "share"),
        [(name, full(count), percent(count / total)) for name, count in pairs],
        wide=len(pairs) > 6,
    )  # fmt: skip


def _axis_title(axis: dict[str, Any]) -> str:
    name: str = axis["axis"]
    names = {
        "candidate": "Candidate sets", "topk": "Sampler's heads (topk)",
        "teacher_topk": "Teacher's heads (teacher_topk)",
    }  # fmt: skip
    return names.get(name, name)


def _key(axis: dict[str, Any]) -> str:
    """Return a name of an axis that can be part of a file's name and of an element's."""
    name: str = axis["axis"]
    if re.fullmatch(r"[A-Za-z0-9_]{1,40}", name):
        return name
    return f"axis-{xxhash.xxh3_64_hexdigest(name.encode())}"


def sets(data: dict[str, Any]) -> Section:
    """Return the section of candidate sets."""
    section = Section("sets", "Candidate sets")
    found = [axis for axis in data["axes"] if axis["head_kind"] == "set"]
    if not found:
        section.blocks.append(Note("The data has no candidate sets."))
    for axis in found:
        _add_sets(section, axis)
    if data["widest"]:
        section.blocks.append(_widest(data["widest"]))
    return section


def _add_sets(section: Section, axis: dict[str, Any]) -> None:
    sizes = axis["sizes"]
    owners, zero = sizes["count"], axis["zero"]
    if not owners:
        section.blocks.append(Note(f"{_axis_title(axis)}: there is no {axis['per']}."))
        return
    filled = owners - zero
    section.tiles += [
        Tile("singletons", percent(axis["singleton_share"]), f"of {plural(filled, 'set')}"),
        Tile("mean size", full(sizes["total"] / filled if filled else None), "of sets with ids"),
        Tile("widest", full(sizes["max"]), "ids"),
        Tile("full vocabulary", percent((zero - axis["flagged"]) / owners), "count 0, no flag"),
        Tile("missing", percent(axis["flagged"] / owners), "by flag"),
    ]
    bins = sizes["histogram"]
    counts = [b["count"] for b in bins]
    labels = [
        "0 (full)" if b["high"] == 0 else span(b["low"], b["high"], integer=True) for b in bins
    ]
    paints = [
        "series3" if b["high"] == 0 else "series2" if b["high"] == 1 else "series1" for b in bins
    ]
    reached = 0
    rows = []
    for label, count in zip(labels, counts, strict=True):
        reached += count
        rows.append((label, full(count), percent(count / owners), percent(reached / owners)))
    section.blocks.append(
        Figure(
            f"sizes-{_key(axis)}", f"{_axis_title(axis)}: sizes",
            f"Ids per {axis['per']}, {plural(owners, axis['per'])}; median {full(sizes['p50'])}, "
            f"99 % up to {full(sizes['p99'])}, largest {full(sizes['max'])}. Singletons stand out: "
            "their token was certain. 0 is the whole vocabulary, or a set that is missing by flag.",
            lambda width: columns(
                width, labels, counts, x_label="ids in the set", y_label=f"{axis['per']}s",
                log=True, paints=paints, height=260,
                notes=[percent(count / owners) for count in counts],
            ),
            (*_SIZE_HEADERS, "cumulative"), rows, wide=True,
        )
    )  # fmt: skip


def _widest(widest: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in widest:
        ids = " ".join(map(str, (entry["ids"] or [])[:12]))
        more = entry["size"] - min(len(entry["ids"] or []), 12)
        rows.append(
            (
                full(entry["size"]), full(entry["record"]), str(entry["sample_id"]),
                full(entry["position"]), str(entry["token"]),
                ids + f" … +{full(more)}" * (more > 0),
            )
        )  # fmt: skip
    return Table(
        "Widest sets",
        "Record: number in the data, from 0. Position: of the target's token in its sample, "
        "from 0. All ids of the first 32 are in the JSON output.",
        ("size", "record", "sample_id", "position", "token", "ids"), rows,
        numbers=("size", "record", "position", "token"),
    )  # fmt: skip


_SLOTS = {
    "elements": "ragged (no padding)", "power_of_two_buckets": "buckets of 1, 2, 4, … ids",
    "table_per_record": "one table per record", "one_table": "one table for all",
    "vocabulary": "dense over the vocabulary",
}  # fmt: skip


def padding(data: dict[str, Any]) -> Section:
    """Return the section of what dense forms would waste."""
    section = Section("padding", "Padding waste")
    tokens = data["padding"]
    if tokens["tokens"]:
        slots = {
            "ragged (no padding)": tokens["tokens"],
            f"batches of {tokens['batch_size']} records": tokens["batches"],
            "one table for all": tokens["one_table"],
        }
        section.blocks.append(_slots_figure("padding-tokens", "Tokens", slots, "token", 4))
    for axis in data["axes"]:
        slots = {_SLOTS[name]: count for name, count in axis["slots"].items()}
        if axis["slots"]["elements"]:
            section.blocks.append(
                _slots_figure(f"padding-{_key(axis)}", _axis_title(axis), slots, "slot", 4)
            )
    if not section.blocks:
        section.blocks.append(Note("There is nothing to pad."))
    return section


def _slots_figure(key: str, title: str, slots: dict[str, int], unit: str, size: int) -> Figure:
    used = next(iter(slots.values()))
    far = max(slots.values()) > 20 * max(used, 1)
    items = []
    for number, (name, count) in enumerate(slots.items()):
        waste = percent(1 - used / count) if count else "-"
        note = bytes_text(count * size) + (f" · {waste} waste" if number else "")
        items.append(Bar(name, count, note, "series1" if number == 0 else "series2"))
    return Figure(
        key, f"{title}: slots by form",
        f"Slots of {size} bytes that each form of the same {full(used)} elements takes; waste is "
        "the share of slots that hold only padding.",
        lambda width: bars(width, items, x_label=f"{unit}s", log=far),
        ("form", f"{unit}s", "bytes", "times ragged", "waste"),
        [
            (name, full(count), bytes_text(count * size), full(count / used if used else None),
             percent(1 - used / count if count else 0))
            for name, count in slots.items()
        ],
        wide=True,
    )  # fmt: skip


def heads(data: dict[str, Any]) -> Section:
    """Return the section of heads: their sizes and the mass that they hold."""
    section = Section("heads", "Heads")
    found = [axis for axis in data["axes"] if axis["head_kind"] in {"top_k", "support", "draws"}]
    if not found:
        section.blocks.append(Note("The data has no heads."))
    for axis in found:
        if not axis["sizes"]["total"]:
            section.blocks.append(Note(f"{_axis_title(axis)}: all are empty."))
            continue
        section.blocks.append(
            histogram_figure(
                f"sizes-{_key(axis)}", f"{_axis_title(axis)}: sizes", axis["sizes"],
                unit="ids in the head", of=axis["per"], log=True,
                caption=f"{plural(axis['zero'], axis['per'])} without one." if axis["zero"] else "",
            )
        )  # fmt: skip
        section.blocks += _mass(axis)
    for axis in data["axes"]:
        mass = axis["mass"]
        if axis["head_kind"] == "set" and mass and mass["normalizer"] == "vocabulary":
            section.blocks += _mass(axis)
    return section


def _mass(axis: dict[str, Any]) -> list[Figure | Note]:
    title = _axis_title(axis)
    mass = axis["mass"]
    if mass is None:
        why = (
            "random draws have no coverage" if axis["head_kind"] == "draws"
            else "there are no normalized log-probs"
        )  # fmt: skip
        return [Note(f"{title}: mass is not shown, {why}.")]
    if not mass["heads"]:
        return [Note(f"{title}: none holds an id.")]
    over = {
        "support": "Probabilities are over the candidate set.",
        "vocabulary": "Probabilities are over the whole vocabulary.",
    }[mass["normalizer"]]
    odd = ""
    if mass["above_one"]:
        odd += f" {plural(mass['above_one'], 'head')} exceed 1 by more than 0.0001."
    if mass["not_finite"]:
        odd += f" {plural(mass['not_finite'], 'log-prob')} not finite, taken as no mass."
    out: list[Figure | Note] = []
    if mass["top"]:
        points = [(p["k"], p["mass"]) for p in mass["top"]]
        out.append(
            Figure(
                f"mass-{_key(axis)}", f"{title}: mass of the first K",
                f"Mean probability in the K likeliest ids, {plural(mass['heads'], 'head')}; all "
                f"ids together hold {percent(mass['mean'])}. {over}",
                lambda width: curve(
                    width, points, x_label="K, ids", y_label="mean probability", paint="series3"
                ),
                ("K", "mean probability"),
                [(full(k), f"{100 * share:.4f} %") for k, share in points],
            )
        )  # fmt: skip
    tails = mass["tail_histogram"]
    labels = [
        f"< {full(b['high'])}" if number == 0 else span(b["low"], b["high"], integer=True)
        for number, b in enumerate(tails)
    ]
    shown = [f"<{_power(b['high'])}" if not n else _power(b["low"]) for n, b in enumerate(tails)]
    counts = [b["count"] for b in tails]
    out.append(
        Figure(
            f"tail-{_key(axis)}", f"{title}: tail outside",
            f"Probability that a head leaves out, {plural(mass['heads'], 'head')}; mean "
            f"{mass['mean_tail']:.3g}. Each column is named by its lower end.{odd}",
            lambda width: columns(
                width, shown, counts, x_label="probability outside the head", y_label="heads",
                log=True, paint="series4",
            ),
            ("tail", "heads", "share"),
            [
                (label, full(count), percent(count / mass["heads"]))
                for label, count in zip(labels, counts, strict=True)
            ],
        )
    )  # fmt: skip
    return out


def _power(number: float) -> str:
    text = f"{number:.0e}" if number < 0.01 else f"{number:g}"
    return text.replace("e-0", "e-")
