"""The standard columns of the two profiles, and the Arrow schemas made of them.

The tables here are the one source of column names, axes, types and fills; the tables of the
specification are checked against them by a test.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from ragged_format.arguments import check_choice, names_of, shown
from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.schema import PROFILES, RECORD, Column, LogProb, Profile, RaggedSchema

__all__ = [
    "PACKED_COLUMNS",
    "REQUIRED",
    "ROOT_AXES",
    "SAMPLE_COLUMNS",
    "check_standard",
    "member_counts",
    "packed_from_sample",
    "packed_schema",
    "sample_from_packed",
    "sample_schema",
    "standard_column",
]

ROOT_AXES: dict[Profile, tuple[str, ...]] = {
    "sample": ("token",),
    "packed": ("token", "node", "target", "member"),
}
REQUIRED: dict[Profile, tuple[str, ...]] = {
    "sample": ("sample_id", "input_ids", "completion_mask"),
    "packed": (
        "input_ids", "position_ids", "node_lengths", "node_parents", "pred_index", "target_ids",
        "member_index", "member_sample_id", "member_leaf", "member_lengths",
    ),
}  # fmt: skip
# Types that a standard column may have besides its default one.
ALTERNATIVES: dict[str, tuple[pa.DataType, ...]] = {
    "advantages": (pa.float64(),),
    "topk_log_probs": (pa.float16(),),
    "teacher_topk_log_probs": (pa.float16(),),
}

_i32, _i64, _f32, _f64 = pa.int32(), pa.int64(), pa.float32(), pa.float64()
_u8, _string = pa.uint8(), pa.string()
_log_prob = LogProb()
ID_FILL = -1


def _record(name: str, type_: pa.DataType, *, nullable: bool = True) -> Column:
    return Column(name, RECORD, type_, nullable=nullable)


SAMPLE_COLUMNS: tuple[Column, ...] = (
    _record("sample_id", _string, nullable=False),
    _record("group_id", _string),
    _record("rollout_id", _string),
    _record("branch_index", _i32),
    _record("policy_version", _i64),
    _record("temperature", _f64),
    _record("reward", _f64),
    _record("advantage", _f64),
    _record("finish_reason", _string),
    _record("teacher_id", _string),
    _record("env_name", _string),
    _record("metrics", _string),
    _record("provenance", _string),
    _record("token_offset", _i64),
    Column("input_ids", "token", _i32, fill=ID_FILL),
    Column("completion_mask", "token", _u8, opens="target", mask=True),
    Column("loss_weights", "target", _f32),
    Column("rollout_log_probs", "target", _f32, log_prob=_log_prob),
    Column("old_log_probs", "target", _f32, log_prob=_log_prob),
    Column("ref_log_probs", "target", _f32, log_prob=_log_prob),
    Column("advantages", "target", _f32),
    Column("policy_versions", "target", _i64, fill=ID_FILL),
    Column("target_flags", "target", _u8),
    Column("candidate_counts", "target", _i32, opens="candidate", head_kind="set"),
    Column("candidate_ids", "candidate", _i32, fill=ID_FILL),
    Column("candidate_log_probs", "candidate", _f32, log_prob=_log_prob),
    Column("topk_counts", "target", _i32, opens="topk", head_kind="top_k"),
    Column("topk_ids", "topk", _i32, fill=ID_FILL),
    Column("topk_log_probs", "topk", _f32, log_prob=_log_prob),
    Column("teacher_topk_counts", "target", _i32, opens="teacher_topk", head_kind="top_k"),
    Column("teacher_topk_ids", "teacher_topk", _i32, fill=ID_FILL),
    Column("teacher_topk_log_probs", "teacher_topk", _f32, log_prob=_log_prob),
    Column("teacher_log_probs", "target", _f32, log_prob=_log_prob),
    Column("topk_weights", "topk", _f32),
    Column("teacher_topk_weights", "teacher_topk", _f32),
)
# Not in the default set: a left cut and heads that are random draws are exceptions.
_ON_REQUEST = frozenset({"token_offset", "topk_weights", "teacher_topk_weights"})

_PACKED_STRUCTURE: tuple[Column, ...] = (
    Column("input_ids", "token", _i32, fill=ID_FILL),
    Column("position_ids", "token", _i32),
    Column("node_lengths", "node", _i32),
    Column("node_parents", "node", _i32, fill=ID_FILL),
    Column("pred_index", "target", _i32, fill=ID_FILL),
    Column("target_ids", "target", _i32, fill=ID_FILL),
    Column("member_index", "target", _i32, fill=ID_FILL),
    Column("member_leaf", "member", _i32, fill=ID_FILL),
    Column("member_lengths", "member", _i32),
)
MEMBER_PREFIX = "member_"


def _packed(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Return the packed columns that samples with these columns give, in schema order."""
    structure = {column.name: column for column in _PACKED_STRUCTURE}
    out = list(_PACKED_STRUCTURE)
    for column in columns:
        if column.opens == "target" or column.name in structure:
            continue  # its content is in pred_index and target_ids, or in the structure
        if column.axis == RECORD:
            column = column.renamed(MEMBER_PREFIX + column.name, "member")
        out.append(column)
    return tuple(out)


PACKED_COLUMNS: tuple[Column, ...] = _packed(SAMPLE_COLUMNS)

STANDARD: dict[Profile, dict[str, Column]] = {
    "sample": {column.name: column for column in SAMPLE_COLUMNS},
    "packed": {column.name: column for column in PACKED_COLUMNS},
}


def standard_column(name: str, profile: Profile = "sample") -> Column:
    """Return the standard declaration of a column.

    Use :func:`dataclasses.replace` on it to state another log-prob mode or an alternative type.

    Raises
    ------
    SchemaMismatchError
        The profile has no such standard column (``RF-S003``).
    """
    check_choice("profile", profile, PROFILES)
    try:
        return STANDARD[profile][name]
    except (KeyError, TypeError):
        raise SchemaMismatchError(
            f"profile {profile!r} has no such standard column", code="RF-S003",
            expected=", ".join(STANDARD[profile]), got=shown(name),
            remedy="pass a ragged_format.Column to declare a column of your own",
        ) from None  # fmt: skip


def _asked(columns: Iterable[str | Column], profile: Profile) -> list[Column]:
    """Return the columns that names and declarations ask for."""
    if isinstance(columns, Iterable) and not isinstance(columns, str):
        given = list(columns)
        if all(isinstance(column, str | Column) for column in given):
            return [standard_column(c, profile) if isinstance(c, str) else c for c in given]
    raise SchemaMismatchError(
        "columns are a list of names and declarations", code="RF-S003",
        expected="names of standard columns, rf.Column", got=repr(columns),
        remedy="pass a list, as in columns=['candidate_counts', 'candidate_ids']",
    )  # fmt: skip


def _schema(
    profile: Profile,
    vocab_size: int,
    columns: Iterable[str | Column] | None,
    root_axes: Iterable[str],
) -> pa.Schema:
    standard = STANDARD[profile]
    if columns is None:
        off = {MEMBER_PREFIX * (profile == "packed") + name for name in _ON_REQUEST} | _ON_REQUEST
        chosen = [column for name, column in standard.items() if name not in off]
    else:
        asked = _asked(columns, profile)
        by_name = {column.name: column for column in asked}
        if len(asked) > len(by_name):
            names = [column.name for column in asked]
            raise SchemaMismatchError(
                "a column is asked for twice", code="RF-S008", expected="one each",
                got=sorted({name for name in names if names.count(name) > 1}),
            )  # fmt: skip
        for name in REQUIRED[profile]:
            by_name.setdefault(name, standard[name])
        # Standard columns keep the standard order, so that equal sets give equal schemas.
        chosen = [by_name.pop(name) for name in standard if name in by_name] + list(
            by_name.values()
        )
    roots = (*ROOT_AXES[profile], *names_of("root_axes", root_axes))
    schema = RaggedSchema(profile, vocab_size, chosen, roots)
    check_standard(schema)
    return schema.to_arrow()


def sample_schema(
    vocab_size: int,
    columns: Iterable[str | Column] | None = None,
    *,
    root_axes: Iterable[str] = (),
) -> pa.Schema:
    """Return the Arrow schema of the ``sample`` profile.

    Parameters
    ----------
    vocab_size : int
        Size of the model's vocabulary (it can exceed the tokenizer's).
    columns : iterable of str or Column, optional
        The optional columns wanted, by standard name or as own declarations. ``None``: all
        standard ones. The result has exactly the three required columns and these.
    root_axes : iterable of str
        Further axes that each record opens itself, for own columns.

    Raises
    ------
    SchemaMismatchError
        An unknown name, or columns whose axis nothing opens.

    Examples
    --------
    >>> schema = sample_schema(vocab_size=49152, columns=["candidate_counts", "candidate_ids"])
    >>> schema.names
    ['sample_id', 'input_ids', 'completion_mask', 'candidate_counts', 'candidate_ids']
    >>> sample_schema(vocab_size=49152, columns=["candidate_ids"])
    Traceback (most recent call last):
    ...
    ragged_format.errors.SchemaMismatchError: [RF-S006] no column opens axis 'candidate'
      where:    column 'candidate_ids'
      expected: one of record, token, target
      got:      candidate
      remedy:   add the counts column that opens the axis, such as candidate_counts, or ...
    """
    return _schema("sample", vocab_size, columns, root_axes)


def packed_schema(
    vocab_size: int,
    columns: Iterable[str | Column] | None = None,
    *,
    root_axes: Iterable[str] = (),
) -> pa.Schema:
    """Return the Arrow schema of the ``packed`` profile; parameters as :func:`sample_schema`."""
    return _schema("packed", vocab_size, columns, root_axes)


def packed_from_sample(schema: RaggedSchema) -> RaggedSchema:
    """Return the packed schema that samples of `schema` are packed into.

    A root axis of one's own is there opened by the members: ``member_<axis>_counts`` says how many
    of its elements each member has.

    Raises
    ------
    SchemaMismatchError
        An own column or axis has a name that packing gives to one of its own (``RF-S008``,
        ``RF-S006``).
    """
    for name in (column.name for column in _PACKED_STRUCTURE if column.name != "input_ids"):
        if name in schema:
            raise SchemaMismatchError(
                "a column of samples has a name that packing needs", code="RF-S008",
                where=Where(column=name), expected="another name", got=name,
            )  # fmt: skip
    own_axes = [axis for axis in schema.root_axes if axis not in ROOT_AXES["sample"]]
    counts = [Column(member_counts(axis), "member", _i32, opens=axis) for axis in own_axes]
    return RaggedSchema(
        "packed", schema.vocab_size, [*_packed(schema), *counts], ROOT_AXES["packed"],
        required_features=schema.required_features, metadata=schema.metadata,
    )  # fmt: skip


def member_counts(axis: str) -> str:
    """Return the name of the packed column that opens a root axis of the samples' own."""
    return f"{MEMBER_PREFIX}{axis}_counts"


def sample_from_packed(schema: RaggedSchema) -> RaggedSchema:
    """Return the sample schema whose packed schema is `schema`."""
    structure = {column.name for column in _PACKED_STRUCTURE} - {"input_ids"}
    columns = []
    own_axes = [axis for axis in schema.root_axes if axis not in ROOT_AXES["packed"]]
    for column in schema:
        if column.name in structure:
            continue
        if column.axis == "member":
            if column.opens is not None:
                own_axes.append(column.opens)
                continue
            column = column.renamed(column.name.removeprefix(MEMBER_PREFIX), RECORD)
        columns.append(column)
        if column.name == "input_ids":
            columns.append(STANDARD["sample"]["completion_mask"])
    order = list(STANDARD["sample"])
    columns.sort(key=lambda c: order.index(c.name) if c.name in order else len(order))
    return RaggedSchema(
        "sample", schema.vocab_size, columns, (*ROOT_AXES["sample"], *own_axes),
        required_features=schema.required_features, metadata=schema.metadata,
    )  # fmt: skip


def check_standard(schema: RaggedSchema) -> None:
    """Check required columns, and standard names against their declarations."""
    standard = STANDARD[schema.profile]
    for name in REQUIRED[schema.profile]:
        if name not in schema:
            raise SchemaMismatchError(
                f"profile {schema.profile!r} requires a column that is missing",
                code="RF-S003", where=Where(column=name), expected=name,
                got=", ".join(schema.columns),
            )  # fmt: skip
    for column in schema:
        known = standard.get(column.name)
        if known is None:
            continue
        where = Where(column=column.name)
        types = (known.type, *ALTERNATIVES.get(column.name, ()))
        if column.type not in types or column.shape:
            raise SchemaMismatchError(
                "a standard column has its standard type", where=where,
                expected=" or ".join(map(str, types)),
                got=column.value_type if column.shape else column.type,
            )  # fmt: skip
        if column.nullable != known.nullable:
            raise SchemaMismatchError(
                "a standard column has its standard nullability",
                code="RF-S005", where=where, expected=known.nullable, got=column.nullable,
                remedy="convert the data with rf.canonical(batch, schema)",
            )  # fmt: skip
        for key, code in (("axis", "RF-S006"), ("opens", "RF-S006"), ("mask", "RF-S006"),
                          ("fill", "RF-S007")):  # fmt: skip
            if getattr(column, key) != getattr(known, key):
                raise SchemaMismatchError(
                    f"a standard column has its standard {key}", code=code, where=where,
                    expected=getattr(known, key), got=getattr(column, key),
                )  # fmt: skip
        if (column.head_kind == "set") != (known.head_kind == "set"):
            raise SchemaMismatchError(
                "a candidate set stays one, and a head a head", code="RF-S009", where=where,
                expected=known.head_kind, got=column.head_kind,
            )  # fmt: skip
        if (column.log_prob is None) != (known.log_prob is None):
            raise SchemaMismatchError(
                "a standard log-prob column states its mode",
                code="RF-S009", where=where, expected="log_prob metadata as the standard has it",
                got=column.log_prob,
            )  # fmt: skip
