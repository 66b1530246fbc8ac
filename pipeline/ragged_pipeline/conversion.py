"""``ragged_pipeline.convert``: the files of another system become a dataset of samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragged_format.adapters import registry
from ragged_format.adapters.conversion import detect, parse_record
from ragged_format.dataset import Dataset
from ragged_format.errors import ConversionError, DatasetNotFoundError, JobError, Where
from ragged_format.local_files import local_path, scheme_of
from ragged_format.profiles import REQUIRED, SAMPLE_COLUMNS
from ragged_format.record_files import STDIN
from ragged_format.storage import is_remote
from ragged_pipeline.defaults import CONVERT_BYTES, MEMORY
from ragged_pipeline.foreign import find_foreign, first_record, is_own_table, spooled
from ragged_pipeline.jobs.convert import Convert, schema_text
from ragged_pipeline.runner import Mode, Result, jobs_of, places_of, run

if TYPE_CHECKING:
    from ragged_format.record_files import Line
    from ragged_format.unique_ids import OnDuplicate
    from ragged_pipeline.foreign import ForeignFile
    from ragged_pipeline.progress import Report

__all__ = ["convert", "detect_adapter"]


def convert(
    inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    options: Mapping[str, Any] | None = None,
    mode: Mode = "error",
    task_bytes: int = CONVERT_BYTES,
    workers: int | None = None,
    memory: int | str = MEMORY,
    engine: str = "local",
    force: bool = False,
    on_duplicate: OnDuplicate = "error",
    progress: Report | None = None,
    stdin: IO[bytes] | None = None,
) -> Result:
    """Convert another system's files to a dataset of samples, through the adapter for them.

    Guarantees: nothing is committed unless all of the input converts. Memory does not grow with the
    input. Sample ids are unique; those of a dataset that is appended to are compared as well,
    unless `on_duplicate` is "keep".

    Parameters
    ----------
    inputs : path or sequence of paths
        JSON or JSON lines, plain, gzip or zstd; Parquet files and datasets saved by Hugging Face
        ``datasets``, whose rows are the records; the adapter's own files; directories of these.
        ``"-"`` reads JSON lines from standard input.
    out : path or URL
        Of the dataset.
    adapter : str, optional
        Whose data it is, as "vllm". Default: the first record tells.
    options : mapping, optional
        Arguments of the adapter's ``to_samples`` as ``vocab_size``, JSON values.
    mode : {"error", "append", "overwrite"}
        What to do with a dataset that is there. Appending converts to its columns.
    task_bytes : int
        Input from which one shard is made, about.
    workers, memory, engine, force, on_duplicate, progress
        As in :func:`ragged_pipeline.run`.
    stdin : binary file object, optional
        Instead of standard input.

    Returns
    -------
    Result
        ``figures["report"]`` has what was taken, stored, dropped and noted.

    Raises
    ------
    ConversionError
        A record cannot be converted, or there is none.
    InvariantError
        Two samples have one id (``RF-I006``).
    JobError, DatasetExistsError, DatasetNotFoundError

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import ragged_format as rf
    >>> choice = {"index": 0, "token_ids": [4, 2], "finish_reason": "stop"}
    >>> record = {
    ...     "request": {"token_ids": [5, 6, 7], "sampling_params": {}},
    ...     "response": {"request_id": "a", "prompt_token_ids": [5, 6, 7], "choices": [choice]},
    ... }
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = pathlib.Path(folder, "a.jsonl")
    ...     _ = source.write_text(json.dumps(record))
    ...     done = convert(source, f"{folder}/out", adapter="vllm", options={"vocab_size": 10})
    ...     done.rows, rf.Dataset(f"{folder}/out")[0]["input_ids"].to_pylist()
    (1, [[5, 6, 7, 4, 2]])
    """
    places = places_of(inputs)
    if not places:
        raise JobError(
            "a conversion reads at least one input", expected="a file", got="none",
            remedy="name the files, or their directory",
        )  # fmt: skip
    name = detect_adapter(places) if adapter is None else adapter
    given = registry.adapter_arguments(registry.choose_reader(name).to_samples, options)
    with ExitStack() as stack:
        pipe = None
        if STDIN in places:
            _refuse_payloads(name)
            pipe = _pipe(stack, out, stdin)
        job = Convert(adapter=name, options=given, task_bytes=task_bytes)
        job.pipe = pipe
        common: dict[str, Any] = {
            "mode": mode, "workers": workers, "memory": memory, "engine": engine,
            "on_duplicate": on_duplicate, "progress": progress,
        }  # fmt: skip
        existing = _existing(out) if mode == "append" else None
        if existing is not None:
            if not force and _made_already(job, places, existing):
                return run(job, places, out, **common)
            if "columns" not in given:
                schema = schema_text(existing.schema)
                job = Convert(adapter=name, options=given, task_bytes=task_bytes, schema=schema)
                job.pipe = pipe
        return run(job, places, out, force=force, **common)


def _existing(out: str | os.PathLike[str]) -> Dataset | None:
    try:
        return Dataset(out)
    except DatasetNotFoundError:
        return None


def _made_already(job: Convert, places: Sequence[str], existing: Dataset) -> bool:
    plan = job.plan(job.open(places))
    return any(made.get("plan") == plan.digest for made in jobs_of(existing.lineage))


def _refuse_payloads(name: str) -> None:
    from ragged_format.adapters.conversion import find_files

    find_files(registry.choose_reader(name), [STDIN])


def _pipe(stack: ExitStack, out: str | os.PathLike[str], stdin: IO[bytes] | None) -> str:
    """Spool standard input beside the output, and return where it lies."""
    folder = Path() if scheme_of(os.fspath(out)) not in (None, "file") else local_path(out)
    while not folder.is_dir():
        folder = folder.parent
    file = stack.enter_context(spooled(stdin or sys.stdin.buffer, folder))
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def detect_adapter(places: Sequence[str]) -> str:
    """Return the name of the adapter that recognizes the first record.

    Raises
    ------
    ConversionError
        None does, or more than one (``RF-A001``).
    """
    if is_remote(places[0]):
        from ragged_pipeline.stores.copies import local_copy

        try:
            return detect_adapter([os.fspath(local_copy(places[0]))])
        except ConversionError as err:
            err.where = replace(err.where, file=places[0])  # the copy's name says nothing
            raise
    if places[0] != STDIN and Path(places[0]).exists():
        files = find_foreign(registry.Reader(to_samples=_none), places[:1])
        record = first_record(files)
        if record is not None or is_own_table(files):
            return _adapter_of_table(files, record)
    return detect(places)


def _adapter_of_table(files: Sequence[ForeignFile], first: Line | None) -> str:
    """Return the adapter for the rows of a table."""
    found = [] if first is None else registry.recognize(parse_record(first))
    row = first.record if first is not None and isinstance(first.record, Mapping) else {}
    # Trainers' rows share names with ours, but no counts columns.
    named = row.keys() >= set(REQUIRED["sample"])
    counted = any(
        column.name in row for column in SAMPLE_COLUMNS if column.opens not in (None, "target")
    )
    if is_own_table(files) or (named and (counted or not found)):
        if files[0].kind == "parquet":
            return "parquet"
        raise ConversionError(
            "columns of this format are read from Parquet", where=Where(file=files[0].shown),
            expected="Parquet", got="a dataset that Hugging Face's save_to_disk wrote",
            remedy="write it as Parquet: datasets.load_from_disk(PATH).to_parquet(FILE)",
        )  # fmt: skip
    if first is not None and len(found) != 1:
        raise registry.unrecognized(first.record, first.where)
    return found[0]


def _none(records: Sequence[Any]) -> Any:
    raise NotImplementedError
