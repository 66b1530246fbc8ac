"""How the columns of a sample schema become those of its packed schema, worked out once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ragged_format.errors import SchemaMismatchError
from ragged_format.packing.sharing import ShareRules
from ragged_format.parse import parse_schema
from ragged_format.profiles import MEMBER_PREFIX, packed_from_sample
from ragged_format.schema import RECORD, RaggedSchema

__all__ = ["Layout", "OneLists", "layout_of"]


class Layout:
    """The packed schema of a sample schema, and where each of its columns comes from.

    Attributes
    ----------
    schema : RaggedSchema
        The sample schema.
    packed : pyarrow.Schema
        The packed one; ``names`` and ``types`` are those of its columns.
    rules : ShareRules
        What restricts sharing.
    member_columns : list of (str, str)
        Packed name and sample name of each record column.
    joined_columns : list of (str, list of Column)
        Root axes whose columns are joined end to end (target, and axes of one's own), with all
        columns on and below them, parents first.
    token_columns : list of Column
        Token columns beside ids and mask.
    """

    def __init__(self, schema: RaggedSchema) -> None:
        if schema.profile != "sample":
            raise SchemaMismatchError(
                "only samples can be packed", code="RF-S002", expected="profile 'sample'",
                got=schema.profile, remedy="unpack_row gives the samples of a packed row",
            )  # fmt: skip
        self.schema = schema
        self.rules = ShareRules.of(schema)
        packed = packed_from_sample(schema)
        self.packed = packed.to_arrow()
        self.names = self.packed.names
        self.types = {column.name: column.arrow_type for column in packed}
        self.member_columns = [
            (MEMBER_PREFIX + column.name, column.name) for column in schema.on(RECORD)
        ]
        self.own_roots = [axis for axis in schema.root_axes if axis != "token"]
        self.joined_columns = [
            (root, [column for axis in schema.below(root) for column in schema.on(axis)])
            for root in ("target", *self.own_roots)
        ]
        self.token_columns = [
            column
            for column in schema.on("token")
            if column.name != "input_ids" and column.opens != "target"
        ]


class OneLists:
    """Makes packed columns of one list each; columns of one length share their offsets.

    Parameters
    ----------
    layout : Layout
        Gives the column types.
    """

    def __init__(self, layout: Layout) -> None:
        self._types = layout.types
        self._bounds: dict[int, pa.Buffer] = {}

    def __call__(self, name: str, values: pa.Array) -> pa.Array:
        """Return the column that has all of these values as its one list, a view."""
        size = len(values)
        bounds = self._bounds.get(size)
        if bounds is None:
            bounds = self._bounds[size] = pa.py_buffer(np.array([0, size], np.int64))
        # Without the checks of LargeListArray.from_arrays: values and bounds are our own.
        return pa.Array.from_buffers(self._types[name], 1, [None, bounds], 0, 0, [values])


_recent: list[Layout] = []


def layout_of(schema: pa.Schema) -> Layout:
    """Return the layout of an Arrow schema of profile ``sample``; the last few are remembered."""
    parsed = parse_schema(schema)
    for known in _recent:
        if known.schema is parsed:
            return known
    layout = Layout(parsed)
    _recent.insert(0, layout)
    del _recent[8:]
    return layout
