"""Every code is raised for its breach alone, and names the place exactly."""

import pyarrow as pa
import pytest
from support.rule_oracle import broken_codes

import ragged_format as rf
from ragged_format.codes import CODES
from ragged_format.lists import flat
from ragged_format.rules import FULL_RULES
from ragged_format.schema import RECORD
from ragged_format.validate import _check_arrays, _structure
from spec.vectors.breaches import BREACHES

STRUCTURAL = {code for code, entry in CODES.items() if entry.level == "structural"}
FULL = {code for code, entry in CODES.items() if entry.level == "full"}


@pytest.fixture(params=BREACHES, ids=lambda breach: breach.stem)
def breach(request):
    return request.param


def caught(data, **options):
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(data, **options)
    return info.value


def numbered(breach, count):
    """Return `count` copies of the good record with ids of their own."""
    ids = "member_sample_id" if "member_sample_id" in breach.good else "sample_id"
    return [
        {**breach.good, ids: f"{i}" if ids == "sample_id" else [f"{i}a", f"{i}b"]}
        for i in range(count)
    ]


def test_breaches_cover_every_code_that_values_can_break():
    assert {breach.code for breach in BREACHES} == (STRUCTURAL | FULL) - {"RF-I001"}


def test_every_full_code_has_one_rule():
    rules = [rule.code for rule in FULL_RULES]
    assert sorted(rules) == sorted(FULL)
    for number, rule in enumerate(FULL_RULES):
        assert set(rule.after) <= set(rules[:number]), rule.code


def test_bad_record_breaks_this_rule_alone_by_the_oracle(breach):
    schema = rf.parse_schema(breach.schema)
    assert broken_codes(breach.batch(breach.good), schema) == set()
    assert broken_codes(breach.batch(breach.good, breach.bad), schema) == {breach.code}


def test_good_record_is_valid(breach):
    rf.validate(breach.batch(*numbered(breach, 3)))


def some(wanted):
    """Parametrize a test over the breaches that are wanted."""
    chosen = [breach for breach in BREACHES if wanted(breach)]
    return pytest.mark.parametrize("breach", chosen, ids=lambda breach: breach.stem)


# A repeated id has no place of its own.
@some(lambda breach: breach.stem != "RF-I006-twice")
@pytest.mark.parametrize("row", [0, 1, 3])
def test_place_within_a_batch(breach, row):
    rows = numbered(breach, 4)
    rows[row] = breach.bad
    error = caught(breach.batch(*rows))
    where = rf.Where(None, None, row, breach.column, breach.position)
    assert (error.code, error.where) == (breach.code, where)
    assert error.expected is not None
    assert error.got is not None


@pytest.mark.parametrize("start", [1, 2])
def test_place_within_a_slice(breach, start):
    rows = [*numbered(breach, 4), breach.bad, *numbered(breach, 2)]
    if breach.stem == "RF-I006-twice":
        rows[3] = breach.good
    batch = breach.batch(*rows).slice(start, 5 - start)
    error = caught(batch)
    assert (error.code, error.where.row) == (breach.code, 4 - start)
    assert error.where.position == breach.position


def test_breach_outside_a_slice_does_not_count(breach):
    """apache/arrow#37733: the values of a sliced list are those of its parent."""
    rows = [breach.bad, *numbered(breach, 2), breach.bad]
    rf.validate(breach.batch(*rows).slice(1, 2))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_place_within_a_table(breach, number):
    first = breach.batch(*numbered(breach, 2))
    batches = [breach.batch(*numbered(breach, 3)[2:]) for _ in range(3)]
    rows = [breach.bad] if breach.stem != "RF-I006-twice" else [breach.good, breach.bad]
    if breach.schema.names[0] == "sample_id":
        batches = [breach.batch({**breach.good, "sample_id": f"b{i}"}) for i in range(len(batches))]
    batches[number] = breach.batch(*rows)
    error = caught(pa.Table.from_batches([first, *batches]))
    assert error.code == breach.code
    assert (error.where.batch, error.where.row) == (number + 1, len(rows) - 1)


def test_place_within_a_stream_that_goes_on(breach):
    batch = breach.batch(breach.bad)
    if breach.stem == "RF-I006-twice":
        batch = breach.batch(breach.good, breach.bad)
    error = caught(batch, where=rf.Where(file="x.arrows", batch=7))
    assert (error.where.file, error.where.batch) == ("x.arrows", 7)
    error = caught(pa.Table.from_batches([batch]), where=rf.Where(file="x.arrows", batch=7))
    assert (error.where.file, error.where.batch) == ("x.arrows", 7)


def test_structural_level_checks_structure_only(breach):
    batch = breach.batch(breach.good, breach.bad)
    if breach.code in STRUCTURAL:
        assert caught(batch, level="structural").code == breach.code
    else:
        rf.validate(batch, level="structural")


@some(lambda breach: breach.code in FULL)
def test_every_other_rule_passes(breach):
    batch = breach.batch(breach.good, breach.bad)
    schema = rf.parse_schema(batch.schema)
    view = _structure(batch, schema, _check_arrays(batch, schema))
    blocked = {breach.code}
    for rule in FULL_RULES:
        if rule.profile not in {None, schema.profile}:
            continue
        if rule.code == breach.code:
            with pytest.raises(rf.InvariantError) as info:
                rule.check(view)
            assert info.value.code == breach.code
        elif blocked & set(rule.after):
            blocked.add(rule.code)
        else:
            rule.check(view)


def test_breach_in_any_physical_form(breach):
    """A first offset above 0, unused values behind the lists."""
    batch = breach.batch(breach.good, breach.bad)
    arrays = []
    for column in rf.parse_schema(breach.schema):
        array = batch.column(column.name)
        if column.axis != RECORD and not array.null_count:
            values, offsets = flat(array)
            if len(values):
                values = pa.concat_arrays([values[:1], values, values[-1:]])
                array = pa.LargeListArray.from_arrays(
                    pa.array(offsets + 1), values, type=array.type
                )
        arrays.append(array)
    error = caught(pa.RecordBatch.from_arrays(arrays, schema=batch.schema))
    assert (error.code, error.where) == (
        breach.code, rf.Where(None, None, 1, breach.column, breach.position),
    )  # fmt: skip
