"""Hugging Face ``Trainer`` and ``accelerate``: a collator, the options that ragged data needs.

Two options drop or break ragged batches unless they are set, so they are checked, not assumed:
``remove_unused_columns`` takes away what the model's ``forward`` does not name, and
``dispatch_batches`` reads on one rank and joins the batches of all ranks along dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from ragged_format.arguments import column_names
from ragged_format.canonical import canonical
from ragged_format.errors import RaggedError, SchemaMismatchError, Where
from ragged_format.parse import parse_schema
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.iterable import RaggedIterable
from ragged_format.torch.loader import RaggedLoader
from ragged_format.validate import validate_batch

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
    ``datasets.Dataset``, say), for which it needs the schema and which it validates in full.

    Parameters
    ----------
    schema : pyarrow.Schema, optional
        Of rows that come as mappings.
    columns : iterable of str, optional
        Columns that every batch must have.

    Raises
    ------
    SchemaMismatchError
        A column is missing, or its values are not of its type (``RF-S003``); where a trainer has
        dropped it, the remedy says so.
    InvariantError
        Rows that come as mappings break an invariant.

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
        self.columns = column_names(columns)

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
        if not isinstance(features, list | tuple):
            raise SchemaMismatchError(
                "these cannot be joined", expected="a list of records",
                got=f"a {type(features).__name__}", remedy="pass the records of one batch",
            )  # fmt: skip
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
        arrays = {
            column.name: _array([row.get(column.name) for row in rows], column.name)
            for column in schema
        }
        try:
            # Exact: pyarrow itself would cut 1.5 to 1 where integers are declared.
            batch = canonical(pa.table(arrays), schema.to_arrow())
            validate_batch(_numbered(batch), schema, "full", Where())
        except RaggedError as err:
            err.remedy = err.remedy or "repair the dataset, or give the schema that its rows have"
            raise
        return RaggedBatch.from_arrow(batch)


def _numbered(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with other ids: samplers repeat records to fill up the last batch."""
    index = batch.schema.get_field_index("sample_id")
    if index < 0:
        return batch
    numbers = pa.array(map(str, range(batch.num_rows)), pa.string())
    return batch.set_column(index, batch.schema.field(index), numbers)


def _array(values: list[Any], name: str) -> pa.Array:
    plain = [value.numpy() if isinstance(value, torch.Tensor) else value for value in values]
    try:
        return pa.array(plain)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as err:
        raise SchemaMismatchError(
            "the values of a column are of no one type", code="RF-S003", where=Where(column=name),
            expected="numbers, text or lists of them", got=str(err),
            remedy="give every row a list of numbers there",
        ) from err  # fmt: skip


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
    unused = getattr(arguments, "remove_unused_columns", "nothing")
    if unused is not False:
        raise SchemaMismatchError(
            "the trainer would drop the columns that the model's forward does not name",
            expected="remove_unused_columns=False", got=unused, remedy=_UNUSED,
        )  # fmt: skip
    config = getattr(arguments, "accelerator_config", None)
    given = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    _check_dispatch(given.get("dispatch_batches"))


def check_accelerator(accelerator: Any) -> None:
    """Raise unless an ``Accelerator`` lets every rank read its own batches.

    Raises
    ------
    SchemaMismatchError
        ``dispatch_batches`` is on, or left to accelerate, which turns it on for iterable datasets.
    """
    _check_dispatch(getattr(accelerator, "dispatch_batches", None))


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
    ``"keep"``, so that all ranks have equally many steps; another loader is refused before it
    trains all ranks on the same rows, or hangs. Batches reach ``compute_loss`` as they are::

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
            As :func:`check_arguments`; or the loader deals out other ranks than the trainer has.
        """
        check_arguments(self.args)
        loader = self.train_dataset
        if not isinstance(loader, RaggedLoader | RaggedIterable):
            raise SchemaMismatchError(
                "the train_dataset of a RaggedTrainerMixin is a loader", expected="RaggedLoader",
                got=f"a {type(loader).__name__}",
                remedy="pass a RaggedLoader; a RaggedDataset needs no mixin, but a RaggedCollator",
            )  # fmt: skip
        _check_ranks(loader.state_dict(), self.args)
        return loader


def _check_ranks(dealt: Mapping[str, Any], arguments: Any) -> None:
    rank = getattr(arguments, "process_index", 0)
    world_size = getattr(arguments, "world_size", 1)
    if (dealt["rank"], dealt["world_size"]) != (rank, world_size):
        raise SchemaMismatchError(
            "the loader deals out other ranks than the trainer has",
            expected=f"rank={rank}, world_size={world_size}",
            got=f"rank={dealt['rank']}, world_size={dealt['world_size']}",
            remedy="RaggedLoader(..., rank=args.process_index, world_size=args.world_size)",
        )  # fmt: skip
    if world_size > 1 and dealt["tail"] == "keep":
        raise SchemaMismatchError(
            "ranks with unequal numbers of steps wait for each other for ever",
            expected="tail='drop', 'pad' or 'empty'", got="tail='keep'",
            remedy="choose one of these for the loader",
        )  # fmt: skip
