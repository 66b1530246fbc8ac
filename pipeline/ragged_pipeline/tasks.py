"""One task, done durably: its file or directory, then a record that says that it is finished.

Layout of a work directory: ``plan.json``; for task 7 of stage 0 the directory ``00-000007.d`` of
spilled files, or in the last stage the file ``01-000007.arrow``; and beside it ``01-000007.json``
with what was made and a checksum. The record is written last, so that whatever it describes is
whole. Names with ``.tmp-`` are of tasks that did not finish.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ragged_format.compact.files import CompactReader
from ragged_format.digest import canonical_json, text_digest
from ragged_format.errors import RaggedError
from ragged_format.files import FileReader
from ragged_format.local_files import TEMPORARY_MARK, create, sync_directory, temporary_name
from ragged_pipeline.job import Context, Job, Made
from ragged_pipeline.memory import releasing

if TYPE_CHECKING:
    from ragged_pipeline.plan import Plan

__all__ = [
    "clear_unfinished",
    "context_of",
    "file_digest",
    "finished",
    "output_file",
    "read_record",
    "record_names",
    "run_task",
]


def run_task(
    job: Job,
    plan: Plan,
    stage: int,
    index: int,
    *,
    work: Path,
    inputs: Any,
    memory: int,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Do one task and return its record; nothing remains of it if it fails.

    Guarantees: when it returns, what was made survives a power cut. Running it twice, or in two
    processes at once, leaves the same bytes.

    Parameters
    ----------
    job : Job
    plan : Plan
    stage, index : int
        Of the task.
    work : Path
        Work directory, on a file system that all workers share.
    inputs : object
        Of the job, opened in this process.
    memory : int
        Bytes that the task may use, about.
    advance : callable
        Receives bytes of input done.
    """
    task = plan.stages[stage].tasks[index]
    spill = work / f"{stage:02d}-{index:06d}.d"
    temporary = temporary_name(spill)
    context = context_of(work, inputs, memory=memory, spill=temporary, advance=releasing(advance))
    try:
        temporary.mkdir()
        made: Made | None = None
        spilled: dict[str, str] = {}
        batches = job.produce(plan, stage, task, context)
        if stage == len(plan.stages) - 1:
            path = output_file(work, plan, index)
            made = job.write(plan, task, batches, path, context)
        else:
            for _ in batches:
                raise TypeError(f"{type(job).__name__} yields records before its last stage")
            spilled = _settle(temporary, spill)
    except OSError as err:
        # Arrow does not say which file it could not write.
        if err.filename is None and not isinstance(err, RaggedError):
            err.filename = str(work)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    record = {
        "figures": context.figures, "made": None if made is None else asdict(made),
        "spilled": spilled,
    }  # fmt: skip
    with create(_record(work, stage, index)) as file:
        text = canonical_json(record)
        file.write(text_digest(text).hex().encode() + b"\n" + text + b"\n")
    return record


def context_of(
    work: Path,
    inputs: Any,
    *,
    memory: int,
    spill: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Context:
    """Return a context; without `spill`, one that only reads what earlier stages made."""
    return Context(
        inputs=inputs, spill=spill or work, work=work, memory=memory, advance=advance,
        _read=lambda folder, stage, index: dict(read_record(folder, stage, index)["figures"]),
    )  # fmt: skip


def _settle(temporary: Path, final: Path) -> dict[str, str]:
    """Make a directory of spilled files durable under its final name; return their digests."""
    digests: dict[str, str] = {}
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            digests[path.relative_to(temporary).as_posix()] = file_digest(path)
        else:
            sync_directory(path)
    sync_directory(temporary)
    try:
        temporary.rename(final)
    except OSError:
        # A run that was cut off between this and the record left the same files there.
        shutil.rmtree(final)
        temporary.rename(final)
    sync_directory(final.parent)
    return digests


def output_file(work: Path, plan: Plan, index: int) -> Path:
    """Return where a task of the last stage puts its file."""
    return work / f"{len(plan.stages) - 1:02d}-{index:06d}.arrow"


def _record(work: Path, stage: int, index: int) -> Path:
    return work / f"{stage:02d}-{index:06d}.json"


def record_names(work: Path) -> list[str]:
    """Return the names of the records of finished tasks in a work directory."""
    return sorted(path.name for path in work.glob("[0-9]*.json"))


def read_record(work: Path, stage: int, index: int) -> dict[str, Any]:
    """Return the record of a finished task.

    Raises
    ------
    FileNotFoundError
        It is not finished.
    ValueError
        The record is damaged.
    """
    checksum, _, rest = _record(work, stage, index).read_bytes().partition(b"\n")
    text = rest.removesuffix(b"\n")
    if text_digest(text).hex().encode() != checksum:
        raise ValueError("the record does not match its checksum")
    return dict(json.loads(text))


def finished(
    work: Path, plan: Plan, stage: int, index: int, *, moved: Path | None = None
) -> dict[str, Any] | None:
    """Return the record of a task if it is finished and what it made is there, unharmed.

    A task that is not as it should be is undone, so that it can be run again.

    Parameters
    ----------
    moved : Path, optional
        Where the file of a task of the last stage may have been moved by a commit that was cut off.
    """
    try:
        record = read_record(work, stage, index)
    except (FileNotFoundError, ValueError):
        return None
    made = record["made"]
    if made is None:
        folder = work / f"{stage:02d}-{index:06d}.d"
        return record if _spilled_digests(folder) == record.get("spilled") else None
    path = output_file(work, plan, index)
    if moved is not None and moved.exists() and not path.exists():
        path = moved
    return record if _unharmed(path, Made(**made)) else None


def _spilled_digests(folder: Path) -> dict[str, str] | None:
    """Return the digests of spilled files, ``None`` if they cannot be read."""
    try:
        return (
            {
                path.relative_to(folder).as_posix(): file_digest(path)
                for path in folder.rglob("*")
                if path.is_file()
            }
            if folder.is_dir()
            else None
        )
    except OSError:
        return None


def _unharmed(path: Path, made: Made) -> bool:
    try:
        if path.stat().st_size != made.bytes:
            return False
        if made.encoding == "file":
            return file_digest(path) == made.digest
        reader = (CompactReader if made.encoding == "compact" else FileReader)(path)
        return reader.verify().digest == made.digest
    except (RaggedError, OSError):
        return False


def file_digest(path: Path) -> str:
    """Return xxh3-128 of the bytes of a file, 32 hexadecimal digits."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            hasher.update(data)
    return hasher.hexdigest()


def clear_unfinished(work: Path) -> None:
    """Remove what tasks left behind that did not finish."""
    for path in _unfinished(work):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _unfinished(work: Path) -> Iterator[Path]:
    return (path for path in list(work.iterdir()) if TEMPORARY_MARK in path.name)
