"""Hugging Face ``Trainer`` and ``accelerate``: a collator, the options that ragged data needs.

Two options drop or break ragged batches unless they are set, so they are checked, not assumed:
``remove_unused_columns`` takes away what the model's ``forward`` does not name, and
``dispatch_batches`` reads on one rank and joins the batches of all ranks along dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.parse import parse_schema
from ragged_format.torch.batch import RaggedBatch

__all__ = ["RaggedCollator", "RaggedTrainerMixin", "check_accelerator", "check_arguments",
           "training_arguments"]  # fmt: skip

_UNUSED = "set remove_unused_columns=False in TrainingArguments"
_DISPATCH = (
    "set dispatch_batches=False: accelerator_config={'dispatch_batches': False} in"
    " TrainingArguments, or DataLoaderConfiguration(dispatch_batches=False) for Accelerator"
)


class RaggedCollator:
    """Join records to one :class:`RaggedBatch`, for use as ``data_collator`` or ``collate_fn``.

    Takes what :class:`RaggedDataset` gives, record batches, or rows as mappings (of a
    ``datasets.Dataset``, say), for which it needs the schema.

    Parameters
    ----------
    schema : pyarrow.Schema, optional
        Of rows that come as mappings.
    columns : iterable of str, optional
        Columns that every batch must have.

    Raises
    ------
    SchemaMismatchError
        A column is missing (``RF-S003``); where a trainer has dropped it, the remedy says so.

    Examples
    --------
    >>> import ragged_format as rf
    >>> collate = RaggedCollator(rf.sample_schema(vocab_size=9, columns=[]))
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> collate([row, row])["input_ids"]
    tensor([1, 2, 1, 2], dtype=torch.int32)
    >>> collate([{"input_ids": [1, 2]}])
    Traceback (most recent call last):
    ...
    ragged_format.errors.SchemaMismatchError: [RF-S003] a row lacks a column
      where:    row 0, column 'sample_id'
      expected: sample_id, input_ids, completion_mask
      got:      input_ids
      remedy:   set remove_unused_columns=False in TrainingArguments
    """

    def __init__(
        self, schema: pa.Schema | None = None, columns: Iterable[str] | None = None
    ) -> None:
        self.schema = schema
        self.columns = None if columns is None else tuple(columns)

    def __call__(self, features: RaggedBatch | Sequence[Any]) -> RaggedBatch:
        """Return the records as one batch."""
        batch = self._join(features)
        for name in self.columns or ():
            if name not in batch:
                raise SchemaMismatchError(
                    "the batch lacks a column", code="RF-S003", where=Where(column=name),
                    expected=", ".join(self.columns or ()), got=", ".join(batch),
                    remedy=f"load it; if the data has it: {_UNUSED}",
                )  # fmt: skip
        return batch

    def _join(self, features: RaggedBatch | Sequence[Any]) -> RaggedBatch:
        if isinstance(features, RaggedBatch):
            return features
        kinds = {type(feature) for feature in features}
        if kinds == {str}:
            # A collator of the trainer's has walked over a batch, which gives its column names.
            raise SchemaMismatchError(
                "the trainer took the batch apart to remove columns", expected="a RaggedBatch",
                got="its column names", remedy=_UNUSED,
            )  # fmt: skip
        if all(issubclass(kind, RaggedBatch) for kind in kinds):
            return RaggedBatch.collate(features)
        if all(issubclass(kind, pa.RecordBatch) for kind in kinds):
            return RaggedBatch.from_arrow(features)
        if self.schema is None or not all(issubclass(kind, Mapping) for kind in kinds):
            raise SchemaMismatchError(
                "these cannot be joined", expected="RaggedBatch, RecordBatch, or mappings",
                got=sorted(kind.__name__ for kind in kinds),
                remedy="pass the schema of the rows: RaggedCollator(schema)",
            )  # fmt: skip
        return self._from_mappings(features)

    def _from_mappings(self, rows: Sequence[Mapping[str, Any]]) -> RaggedBatch:
        schema = parse_schema(self.schema)
        for number, row in enumerate(rows):
            for column in schema:
                if column.name not in row and not column.nullable:
                    raise SchemaMismatchError(
                        "a row lacks a column", code="RF-S003",
                        where=Where(row=number, column=column.name),
                        expected=", ".join(schema.columns), got=", ".join(row), remedy=_UNUSED,
                    )  # fmt: skip
        names = schema.to_arrow().names
        plain = [{name: row.get(name) for name in names} for row in rows]
        return RaggedBatch.from_arrow(pa.RecordBatch.from_pylist(plain, schema=schema.to_arrow()))


def training_arguments() -> dict[str, Any]:
    """Return the keyword arguments that ``TrainingArguments`` needs for ragged batches."""
    return {
        "remove_unused_columns": False,
        "accelerator_config": {"dispatch_batches": False, "split_batches": False},
    }


def check_arguments(arguments: Any) -> None:
    """Raise unless a ``TrainingArguments`` keeps ragged batches whole.

    Raises
    ------
    SchemaMismatchError
        ``remove_unused_columns`` or ``dispatch_batches`` would break them; the remedy says what to
        set.
    """
    if arguments.remove_unused_columns:
        raise SchemaMismatchError(
            "the trainer would drop the columns that the model's forward does not name",
            expected="remove_unused_columns=False", got=arguments.remove_unused_columns,
            remedy=_UNUSED,
        )  # fmt: skip
    config = arguments.accelerator_config
    _check_dispatch(getattr(config, "dispatch_batches", None))


def check_accelerator(accelerator: Any) -> None:
    """Raise unless an ``Accelerator`` lets every rank read its own batches.

    Raises
    ------
    SchemaMismatchError
        ``dispatch_batches`` is on, or left to accelerate, which turns it on for iterable datasets.
    """
    _check_dispatch(accelerator.dispatch_batches)


def _check_dispatch(dispatch: bool | None) -> None:  # noqa: FBT001
    if dispatch is not False:
        raise SchemaMismatchError(
            "one rank would read for all and join batches of different widths",
            expected="dispatch_batches=False", got=f"dispatch_batches={dispatch}",
            remedy=_DISPATCH,
        )  # fmt: skip


class RaggedTrainerMixin:
    """Let a ``Trainer`` train on a :class:`RaggedLoader`, given as its ``train_dataset``.

    The loader deals out ranks itself: give it ``rank``, ``world_size`` and a `tail` other than
    ``"keep"``, so that all ranks have equally many steps. Batches reach ``compute_loss`` as they
    are::

        class MyTrainer(RaggedTrainerMixin, Trainer):
            def compute_loss(self, model, inputs, **_): ...
    """

    args: Any
    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        """Return the loader itself, once the arguments are found to fit.

        Raises
        ------
        SchemaMismatchError
            As :func:`check_arguments`.
        """
        check_arguments(self.args)
        return self.train_dataset
