"""Offline jobs over ragged datasets, of any size, on all cores.

Each function reads datasets or foreign files, and writes a dataset that is committed at once:
:func:`convert`, :func:`filter_dataset`, :func:`advantages`, :func:`dedupe`, :func:`split`,
:func:`merge`, :func:`reshard`, :func:`shuffle`, :func:`pack_dataset`, :func:`compact`,
:func:`expand`. :func:`export`, :func:`to_hf` and :func:`report` write other files. :func:`scan`,
:func:`to_frame` and :func:`from_polars` go to polars and back. :func:`run` runs a job of one's own.
See ``docs/pipeline.md``.

This package imports ``ragged_format`` and never ``ragged_server``. polars is imported by the
functions that use it; it comes with the extra ``ragged-format[pipeline]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragged_pipeline.api import advantages, dedupe, filter_dataset, merge, reshard, split
    from ragged_pipeline.conversion import convert
    from ragged_pipeline.exporting import export, to_hf
    from ragged_pipeline.frames import from_polars, scan, to_frame
    from ragged_pipeline.job import Context, Job
    from ragged_pipeline.jobs.pack import pack_dataset
    from ragged_pipeline.jobs.recode import compact, expand
    from ragged_pipeline.jobs.shuffle import shuffle
    from ragged_pipeline.plan import Plan, Stage, Task
    from ragged_pipeline.progress import Progress
    from ragged_pipeline.reports.api import report
    from ragged_pipeline.runner import Result, run

__all__ = [
    "Context",
    "Job",
    "Plan",
    "Progress",
    "Result",
    "Stage",
    "Task",
    "advantages",
    "compact",
    "convert",
    "dedupe",
    "expand",
    "export",
    "filter_dataset",
    "from_polars",
    "merge",
    "pack_dataset",
    "report",
    "reshard",
    "run",
    "scan",
    "shuffle",
    "split",
    "to_frame",
    "to_hf",
]

# Where each name is; modules are imported when a name of theirs is first used.
_HOMES = {
    "api": ("advantages", "dedupe", "filter_dataset", "merge", "reshard", "split"),
    "conversion": ("convert",),
    "exporting": ("export", "to_hf"),
    "frames": ("from_polars", "scan", "to_frame"),
    "job": ("Context", "Job"),
    "jobs.pack": ("pack_dataset",),
    "jobs.recode": ("compact", "expand"),
    "jobs.shuffle": ("shuffle",),
    "plan": ("Plan", "Stage", "Task"),
    "progress": ("Progress",),
    "reports.api": ("report",),
    "runner": ("Result", "run"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if _HOME_OF[name] == "frames":
        from ragged_pipeline.optional import require_polars

        require_polars("frames")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
