"""The report of a source: statistics, page and pictures."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.arguments import check_callable
from ragged_format.dataset import Dataset
from ragged_format.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    LimitExceededError,
    Where,
)
from ragged_format.local_files import create, local_path, path_text
from ragged_format.sources import open_source
from ragged_format.storage import is_remote
from ragged_pipeline.reports.collect import gather
from ragged_pipeline.reports.statistics import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragged_format.sources import Source

__all__ = ["Report", "name_of", "report"]

# Shards that the statistics list by name.
_LISTED = 100


@dataclass(frozen=True, slots=True)
class Report:
    """What a report found and wrote.

    Attributes
    ----------
    statistics : dict
        All figures as JSON values.
    html : str or None
        Path of the page.
    pngs : tuple of str
        Paths of the pictures.
    """

    statistics: dict[str, Any] = field(repr=False)
    html: str | None = None
    pngs: tuple[str, ...] = ()


def report(
    source: Any,
    html: Any = None,
    *,
    png_dir: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    token_budget: int | None = None,
    row: int | None = None,
    batch_size: int = 8,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    name: str | None = None,
) -> Report:
    """Gather the figures of a source, and write them as a page and as pictures.

    The page is one HTML file without scripts and without outside assets. Memory is bounded
    whatever the size of the data; the figures are the same for any number of workers.

    Parameters
    ----------
    source : path, URL, binary file object or Source
        Dataset, file or stream of either profile, as :func:`ragged_format.open_source` takes it, or
        one that is open already, such as an ``rf.Dataset``.
    html : path, URL or binary file object, optional
        The page to write; an earlier report there is replaced, any other file is not.
    png_dir : path or URL, optional
        Directory for one PNG file per figure; needs the extra ``report`` (matplotlib).
    ranks : int, optional
        Ranks that share packed rows; by default those that the dataset's lineage names, else 1.
    token_budget : int, optional
        Tokens of a full packed row; by default that of the lineage, else the longest row.
    row : int, optional
        Packed record whose prefix tree is shown; by default the one that shares most.
    batch_size : int
        Records that are padded together where the waste of padding is shown.
    workers : int, optional
        Processes; by default one per core where there is much to read.
    progress : callable, optional
        Called with the number of records read since the last call.
    name : str, optional
        What the page calls the data; by default the last part of its path.

    Returns
    -------
    Report

    Raises
    ------
    RaggedError
        The source cannot be opened or read.
    DatasetExistsError
        `html` is a file that is no report, or a directory (``RF-C009``).
    DatasetNotFoundError
        The directory of `html` is not there (``RF-C008``).
    LimitExceededError
        An option is out of range (``RF-L001``, ``RF-L002``).
    MissingDependencyError
        `png_dir` is given and matplotlib is not installed (``RF-D001``).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> batch = rollouts(np.random.default_rng(0), num_samples=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/data", batch.schema) as writer:
    ...         writer.write(batch)
    ...     found = report(f"{folder}/data", f"{folder}/report.html")
    >>> found.statistics["totals"]["records"]
    8
    """
    _check(ranks=ranks, token_budget=token_budget, batch_size=batch_size, workers=workers)
    _check(least=0, row=row)
    if progress is not None:
        check_callable("progress", progress)
    to_file = html is not None and not hasattr(html, "write")
    for key, place in (("html", html if to_file else None), ("png_dir", png_dir)):
        if place is not None and is_remote(path_text(place)):
            return _to_store(
                key, os.fspath(place), source, {"html": html, "png_dir": png_dir}, ranks=ranks,
                token_budget=token_budget, row=row, batch_size=batch_size, workers=workers,
                progress=progress, name=name,
            )  # fmt: skip
    html_file = local_path(html) if to_file else None
    png_folder = None if png_dir is None else local_path(png_dir)
    if html_file is not None:
        _check_free(html_file)
    painter = None
    if png_folder is not None:
        from ragged_pipeline.reports.png import Painter

        painter = Painter()  # before the data is read
    is_open = hasattr(source, "ragged_schema")
    found: Any = source if is_open else open_source(source)
    with closing(found) if not is_open and hasattr(found, "close") else nullcontext():
        lineage = found.lineage if isinstance(found, Dataset) else {}
        ranks = ranks or _option(lineage, "ranks") or 1
        budget = token_budget or _option(lineage, "token_budget")
        statistics = gather(
            found, Options(ranks, batch_size, row), workers=workers,
            advance=progress or (lambda _: None),
        )  # fmt: skip
        data = {"source": _describe(found, name or name_of(source))} | statistics.to_json(
            token_budget=budget
        )
    if html is None and painter is None:
        return Report(data)
    from ragged_pipeline.reports.page import HALF, WIDE, figures_of, page, sections_of

    sections = sections_of(data)
    if html is not None:
        text = page(data, sections).encode()
        if html_file is not None:
            with create(html_file) as file:
                file.write(text)
        else:
            html.write(text)
    pngs = []
    if painter is not None and png_folder is not None:
        folder = png_folder
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures_of(sections):
            path = folder / f"{figure.key}.png"
            painter.paint(
                figure.draw(WIDE if figure.wide else 1.25 * HALF), path, title=figure.title
            )
            pngs.append(str(path))
    return Report(data, os.fspath(html) if to_file else None, tuple(pngs))


def _to_store(key: str, url: str, source: Any, outputs: dict[str, Any], **options: Any) -> Report:
    """Write one of the outputs, which is a URL, on this machine, and upload it."""
    from ragged_pipeline.stores.file_output import file_output

    with file_output(url, replaces=key == "html") as path:
        made = report(source, **{**outputs, key: path}, **options)
    if key == "html":
        return replace(made, html=url)
    return replace(made, pngs=tuple(f"{url}/{Path(png).name}" for png in made.pngs))


def _check(*, least: int = 1, **options: int | None) -> None:
    for name, value in options.items():
        if value is None:
            continue
        if type(value) is not int or value < least:
            raise LimitExceededError(
                f"{name} is a number of things", expected=f">= {least}", got=repr(value),
                remedy=f"pass an integer >= {least}",
            )  # fmt: skip


def _check_free(path: Path) -> None:
    """Refuse a place that no report can take, before the data is read."""
    from ragged_pipeline.reports.page import MARK

    if not path.parent.is_dir():
        raise DatasetNotFoundError(
            "there is no directory for the report", where=Where(file=str(path)),
            expected=f"the directory {path.parent}", got="nothing", remedy="make it first",
        )  # fmt: skip
    if path.exists() and not path.is_file():
        raise DatasetExistsError(
            "the place of the report is taken by something else", where=Where(file=str(path)),
            expected="a file, or nothing", got="a directory" if path.is_dir() else "a device",
            remedy="name a file, such as report.html",
        )  # fmt: skip
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(1024)
    if head and MARK.encode() not in head:
        raise DatasetExistsError(
            "the place of the report is taken by another file", where=Where(file=str(path)),
            expected="no file, or an earlier report", got=f"{path.stat().st_size} other bytes",
            remedy="choose another path, or remove the file",
        )  # fmt: skip


def _option(lineage: Any, name: str) -> int | None:
    """Return an option that a job noted in the lineage; the latest, where several did."""
    found = None
    if isinstance(lineage, dict):
        value = lineage.get(name)
        if type(value) is int and value > 0:
            return value
        lineage = list(lineage.values())
    if isinstance(lineage, list):
        for part in lineage:
            found = _option(part, name) or found
    return found


def _describe(source: Source, name: str) -> dict[str, Any]:
    schema = source.ragged_schema
    dataset = None
    kind = "file" if source.is_random_access else "stream"
    if isinstance(source, Dataset):
        kind = "dataset"
        encodings: dict[str, int] = {}
        for shard in source.shards:
            encodings[shard.encoding] = encodings.get(shard.encoding, 0) + 1
        dataset = {
            "generation": source.generation, "fingerprint": source.fingerprint,
            "lineage": source.lineage, "num_shards": len(source.shards),
            "bytes": sum(shard.bytes for shard in source.shards), "encodings": encodings,
            "shards": [shard.to_json() for shard in source.shards[:_LISTED]],
        }  # fmt: skip
    return {
        "name": name, "kind": kind, "profile": schema.profile,
        "format_version": ".".join(map(str, schema.version)), "vocab_size": schema.vocab_size,
        "metadata": schema.metadata, "dataset": dataset,
    }  # fmt: skip


def name_of(place: Any) -> str:
    """Return the last part of a path; a report should not spread where on a disk data lay."""
    if hasattr(place, "read"):
        return Path(str(getattr(place, "name", "stream"))).name
    text = str(getattr(place, "path", place))
    if text == "-":
        return "standard input"
    if "://" in text:
        return text.split("://", 1)[1].split("@")[-1].split("?")[0]
    return Path(text).resolve().name or text
