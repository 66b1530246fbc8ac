"""Whether what a job writes has one record of each sample id: over its inputs, and on appending."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ragged_format.storage import open_storage
from ragged_format.unique_ids import SAMPLE_ID, TakenIds, file_ids, ids_of, numbered, require_unique
from ragged_pipeline.inputs import RecordInputs
from ragged_pipeline.tasks import output_file

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from ragged_format.errors import Where
    from ragged_pipeline.job import Job, Made
    from ragged_pipeline.outputs import Output
    from ragged_pipeline.plan import Plan

__all__ = ["require_unique_inputs", "taken_ids"]

_REMEDY = (
    "ragged dedupe IN OUT, with all inputs, keeps the first of each; or pass on_duplicate='keep'"
)


def require_unique_inputs(job: Job, plan: Plan, inputs: Any, folder: Path) -> None:
    """Raise if a job would bring two samples of one id together from several inputs.

    Raises
    ------
    InvariantError
        With both places (``RF-I006``).
    """
    if not (job.unites and isinstance(inputs, RecordInputs) and len(inputs.inputs) > 1):
        return
    if _has_ids(plan.schema) and SAMPLE_ID in inputs.ragged:
        require_unique(ids_of(inputs.placed_ids, folder), remedy=_REMEDY)


def taken_ids(
    job: Job, plan: Plan, schema: pa.Schema, output: Output, made: list[Made], folder: Path
) -> TakenIds | None:
    """Return what compares the ids that a job made with those of the dataset that it appends to.

    Returns
    -------
    TakenIds or None
        None where records have no ids. Made before the files are put into the output.
    """
    if not _has_ids(schema):
        return None

    def read() -> Iterator[tuple[Where, pa.Array]]:
        for index, part in enumerate(made):
            if part.rows:
                file = output_file(folder, plan, index)
                if not file.exists():  # a commit that was cut off has moved it
                    file = output.moved(names[index]) or file
                yield from file_ids(file, compact=part.encoding == "compact")

    names = [job.file_name(plan, index) for index in range(len(made))]
    new = ids_of(lambda: numbered(read(), f"what {plan.job} made"), folder)
    return TakenIds(open_storage(output.place), new, folder, leaving=names)


def _has_ids(schema: pa.Schema | None) -> bool:
    return schema is not None and SAMPLE_ID in schema.names
