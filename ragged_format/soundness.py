"""Whether Arrow arrays are what they claim to be: nothing else may be read before this is known."""

from __future__ import annotations

import pyarrow as pa

from ragged_format.errors import InvariantError, Where

__all__ = ["check_array", "check_arrays", "is_sound"]


def is_sound(data: pa.Array | pa.RecordBatch) -> bool:
    """Return whether Arrow arrays are valid: of a batch, all at once."""
    return _fault(data) is None


def check_arrays(batch: pa.RecordBatch) -> None:
    """Raise ``RF-I001`` unless every Arrow array of the batch is valid.

    Arrow's readers do not check offsets; used unchecked, wrong ones crash other readers.
    """
    fault = _fault(batch)
    if fault is not None:
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            check_array(array, name)
        raise _error(fault, Where()) from fault


def check_array(array: pa.Array, column: str) -> None:
    """Raise ``RF-I001``, with the first row at fault where one is, unless an array is valid."""
    fault = _fault(array)
    if fault is not None:
        raise _error(fault, Where(row=_faulty_row(array), column=column)) from fault


def _error(fault: pa.ArrowException, where: Where) -> InvariantError:
    return InvariantError(
        "an Arrow array is invalid",
        code="RF-I001",
        where=where,
        expected="non-decreasing offsets inside their child, whole buffers, UTF-8 text",
        got=str(fault),
        remedy="do not use the data: its producer wrote broken lists",
    )


def _fault(array: pa.Array | pa.RecordBatch) -> pa.ArrowException | None:
    try:
        array.validate(full=True)
    except pa.ArrowException as err:
        return err
    return None


def _faulty_row(array: pa.Array) -> int | None:
    if _fault(array.slice(0, 0)) is not None:
        return None
    sound, faulty = 0, len(array)
    while faulty - sound > 1:
        middle = (sound + faulty) // 2
        if _fault(array.slice(0, middle)) is None:
            sound = middle
        else:
            faulty = middle
    return sound
