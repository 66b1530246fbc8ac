"""The jobs on records as functions: filter, advantages, dedupe, split, merge, reshard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ragged_format.arguments import names_of, parse_bytes
from ragged_format.errors import JobError
from ragged_format.local_files import path_text, scheme_of
from ragged_pipeline.batching import BATCH_ROWS
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.jobs.advantages import Advantages, Baseline, NullReward, Scale, Single
from ragged_pipeline.jobs.dedupe import Dedupe, Respect
from ragged_pipeline.jobs.filter import Filter
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.jobs.sort import Sort
from ragged_pipeline.jobs.split import By, SplitPart, check_parts
from ragged_pipeline.runner import Result, run

if TYPE_CHECKING:
    import polars as pl

__all__ = ["advantages", "dedupe", "filter_dataset", "merge", "reshard", "split"]

PathLike: TypeAlias = str | os.PathLike[str]


def filter_dataset(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    where: str | pl.Expr | None = None,
    *,
    min_policy_version: int | None = None,
    finish_reasons: Sequence[str] | None = None,
    **running: Any,
) -> Result:
    """Keep the records for which all conditions hold.

    Parameters
    ----------
    inputs : path or URL, or a sequence of them
        Datasets or files, of samples or of packed rows.
    out : path or URL
        Of the dataset.
    where : str or polars.Expr, optional
        A condition on one record over the columns of :func:`ragged_pipeline.scan`, that is record
        columns and lengths: SQL as ``"reward > 0 and token_length < 4096"``, or a polars
        expression. A record for which it is null is dropped.
    min_policy_version : int, optional
        Drop records of older policies, and those whose version is not known.
    finish_reasons : sequence of str, optional
        Keep these only.
    **running
        As for :func:`ragged_pipeline.run`: ``mode``, ``workers``, ``memory``, ``engine``,
        ``force``, ``on_duplicate``, ``progress``.

    Returns
    -------
    Result
        ``figures["dropped"]`` counts records by the first reason.

    Raises
    ------
    JobError
        A condition is none, or looks at other records (``RF-J001``).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> batch = rollouts(np.random.default_rng(0), num_samples=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/in", batch.schema) as writer:
    ...         writer.write(batch)
    ...     done = filter_dataset(f"{folder}/in", f"{folder}/out", "target_length >= 150")
    >>> done.rows, done.figures
    (10, {'dropped': {'where': 6}})
    """
    text = where if isinstance(where, str) else None
    reasons = None if finish_reasons is None else names_of("finish_reasons", finish_reasons)
    job = Filter(
        where=text, expression=None if where is None or text is not None else _json(where),
        min_policy_version=min_policy_version,
        finish_reasons=reasons,
    )  # fmt: skip
    return run(job, inputs, out, **running)


def _json(expression: Any) -> str:
    if not hasattr(expression, "meta"):
        raise JobError(
            "this is no condition", expected="SQL as text, or a polars expression",
            got=repr(expression), remedy="pass a condition as 'reward > 0'",
        )  # fmt: skip
    try:
        return str(expression.meta.serialize(format="json"))
    except Exception as err:
        raise JobError(
            "the condition cannot be sent to other processes", got=f"{type(err).__name__}: {err}",
            expected="SQL, or an expression of polars' own functions",
            remedy="write it in SQL",
        ) from err  # fmt: skip


def advantages(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    eps: float = 1e-6,
    single: Single = "zero",
    null_reward: NullReward = "error",
    **running: Any,
) -> Result:
    """Set the record column ``advantage`` to the reward relative to its group, over all shards.

    Parameters
    ----------
    inputs, out, **running
        As for :func:`filter_dataset`; samples with ``group_id`` and ``reward``.
    baseline, scale, eps, single, null_reward
        As for :class:`ragged_pipeline.jobs.advantages.Advantages`: GRPO by default;
        ``scale="none"`` is Dr. GRPO, with ``baseline="leave_one_out"`` RLOO.

    Raises
    ------
    JobError
        A record has no group or no reward, or branches of a conversation differ (``RF-J001``).
    """
    job = Advantages(
        baseline=baseline, scale=scale, eps=eps, single=single, null_reward=null_reward
    )
    return run(job, inputs, out, **running)


def dedupe(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    by: Respect = "sample_id",
    **running: Any,
) -> Result:
    """Keep the first of records that are equal in one respect, in the order of the inputs.

    Parameters
    ----------
    inputs, out, **running
        As for :func:`filter_dataset`.
    by : {"sample_id", "record", "tokens", "prompt", "completion"}
        As for :class:`ragged_pipeline.jobs.dedupe.Dedupe`.
    """
    return run(Dedupe(by=by), inputs, out, **running)


def split(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    parts: Mapping[str, float],
    *,
    by: By = "group",
    seed: int = 0,
    **running: Any,
) -> dict[str, Result]:
    """Split records into named parts, each a dataset ``out/name``.

    Guarantees: every record is in one part; the part depends on its key and `seed` alone, so that
    records that come later do not move earlier ones. Each part is committed by itself.

    Parameters
    ----------
    inputs, **running
        As for :func:`filter_dataset`.
    out : path or URL
        Directory of the parts.
    parts : mapping of str to float
        Fractions by name; they add up to one. Sizes are those fractions up to chance.
    by : {"group", "record"}
        Keep groups together, or not.
    seed : int
        Another seed, another split.

    Returns
    -------
    dict of str to Result
        By part.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> batch = rollouts(np.random.default_rng(0), num_samples=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/in", batch.schema) as writer:
    ...         writer.write(batch)
    ...     done = split(f"{folder}/in", f"{folder}/out", {"train": 0.75, "test": 0.25})
    >>> sum(part.rows for part in done.values())
    64
    """
    shares = check_parts(parts)
    base = path_text(out)
    return {
        part: run(
            SplitPart(parts=shares, part=part, by=by, seed=seed), inputs, _below(base, part),
            **running,
        )
        for part in shares
    }  # fmt: skip


def _below(base: str, name: str) -> str:
    return str(Path(base) / name) if scheme_of(base) is None else f"{base.rstrip('/')}/{name}"


def merge(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    sort_by: str | Sequence[str] | None = None,
    descending: bool = False,
    shard_bytes: int | str = TASK_BYTES,
    batch_rows: int = BATCH_ROWS,
    **running: Any,
) -> Result:
    """Write the records of all inputs, one after the other or sorted, in shards of even size.

    Parameters
    ----------
    inputs, out, **running
        As for :func:`filter_dataset`; all of one schema identity.
    sort_by : str or sequence of str, optional
        Record columns or lengths as ``token_length`` to sort by; earlier ones count first, nulls
        come last, equal records stay in the order of the inputs. The keys of all records are held
        in memory, about 50 bytes each.
    descending : bool
        The largest first.
    shard_bytes : int or str
        Input, uncompressed, that becomes one shard, about: "256MiB".
    batch_rows : int
        Records of a stored batch, at most.
    """
    size = parse_bytes(shard_bytes)
    job: Merge | Sort = Merge(shard_bytes=size, batch_rows=batch_rows)
    if sort_by is not None:
        by = [sort_by] if isinstance(sort_by, str) else list(names_of("sort_by", sort_by))
        job = Sort(by=by, descending=descending, shard_bytes=size, batch_rows=batch_rows)
    return run(job, inputs, out, **running)


def reshard(source: PathLike, out: PathLike, **options: Any) -> Result:
    """Write the records of one dataset in other shards, batches or order; as :func:`merge`."""
    return merge([source], out, **options)
