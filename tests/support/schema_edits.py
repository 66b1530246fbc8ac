"""Schemas with one thing changed, and the errors that this must raise."""

import pyarrow as pa
import pytest

from ragged_format.schema import NAMESPACE


def fails(error, code, call, *args, column=None, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    err = caught.value
    assert err.code == code, err
    assert err.where.column == column, err
    assert err.expected is not None, err
    assert isinstance(err, ValueError)
    return err


def with_header(schema, **changes):
    """The schema with metadata keys replaced, or removed where the value is None."""
    metadata = dict(schema.metadata)
    for key, value in changes.items():
        metadata.pop(f"{NAMESPACE}{key}".encode(), None)
        if value is not None:
            metadata[f"{NAMESPACE}{key}".encode()] = value
    return schema.with_metadata(metadata)


def with_field(schema, name, *, type_=None, nullable=None, **changes):
    """The schema with one field's type, nullability or metadata replaced."""
    index = schema.get_field_index(name)
    field = schema.field(index)
    metadata = dict(field.metadata)
    for key, value in changes.items():
        metadata.pop(f"{NAMESPACE}{key}".encode(), None)
        if value is not None:
            metadata[f"{NAMESPACE}{key}".encode()] = value
    field = pa.field(
        name,
        field.type if type_ is None else type_,
        nullable=field.nullable if nullable is None else nullable,
        metadata=metadata,
    )
    return schema.set(index, field)
