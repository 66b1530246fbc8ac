"""A slow and plain model of a batch: records hold elements, elements hold elements.

Built from ``to_pylist()`` alone, so that it shares nothing with the library's arithmetic on
offsets. Counts are not stored: they are the number of children.
"""

from dataclasses import dataclass, field

from ragged_format import parse_schema

RECORD = "record"


@dataclass
class Element:
    values: dict = field(default_factory=dict)
    children: dict = field(default_factory=dict)


def records(batch):
    """Return the records of a batch as elements."""
    schema = parse_schema(batch.schema)
    return [_record(row, schema) for row in batch.to_pylist()]


def _record(row, schema):
    cursor = dict.fromkeys(schema.axes, 0)

    def element(axis):
        at = cursor[axis]
        cursor[axis] += 1
        values = {c.name: row[c.name][at] for c in schema.on(axis) if c.opens is None}
        children = {
            child.name: [element(child.name) for _ in range(row[child.counts][at])]
            for child in schema.children(axis)
        }
        return Element(values, children)

    out = Element({c.name: row[c.name] for c in schema.on(RECORD)})
    for root in schema.children(RECORD):
        lengths = {len(row[c.name]) for c in schema.on(root.name)}
        assert len(lengths) < 2, "columns of one root axis differ in length"
        size = lengths.pop() if lengths else 0
        out.children[root.name] = [element(root.name) for _ in range(size)]
    for name, used in cursor.items():
        assert all(used == len(row[c.name]) for c in schema.on(name)), "counts and lists differ"
    return out


def rows(elements, schema):
    """Return records as ``to_pylist()`` gives them for a batch with this schema."""
    return [_row(element, schema) for element in elements]


def _row(record, schema):
    out = dict(record.values) | {c.name: [] for c in schema if c.axis != RECORD}

    def visit(axis, element):
        for column in schema.on(axis):
            value = (
                element.values[column.name]
                if column.opens is None
                else len(element.children[column.opens])
            )
            out[column.name].append(value)
        for child in schema.children(axis):
            for inner in element.children[child.name]:
                visit(child.name, inner)

    for root in schema.children(RECORD):
        for element in record.children[root.name]:
            visit(root.name, element)
    return {column.name: out[column.name] for column in schema}


def path(schema, axis):
    """Return the axes from the root axis down to `axis`."""
    out = [axis]
    while schema.axes[out[0]].parent != RECORD:
        out.insert(0, schema.axes[out[0]].parent)
    return out


def lists(elements, steps):
    """Return the lists of elements of the last axis of `steps`, one per parent."""
    for step in steps[:-1]:
        elements = [child for element in elements for child in element.children[step]]
    return [element.children[steps[-1]] for element in elements]


def with_lists(elements, steps, replacements):
    """Return `elements` with the lists that :func:`lists` names replaced, in order."""
    new = iter(replacements)

    def rebuild(element, remaining):
        step, rest = remaining[0], remaining[1:]
        inner = next(new) if not rest else [rebuild(e, rest) for e in element.children[step]]
        return Element(element.values, {**element.children, step: inner})

    return [rebuild(element, steps) for element in elements]


def take(elements, schema, axis, indices, lengths):
    if axis == RECORD:
        return [elements[i] for i in indices]
    steps = path(schema, axis)
    flat = [element for one in lists(elements, steps) for element in one]
    picked = iter([flat[i] for i in indices])
    return with_lists(elements, steps, [[next(picked) for _ in range(n)] for n in lengths])


def select(elements, schema, axis, keep):
    if axis == RECORD:
        return [element for element, kept in zip(elements, keep, strict=True) if kept]
    steps = path(schema, axis)
    flags = iter(keep)
    new = [[e for e in one if next(flags)] for one in lists(elements, steps)]
    return with_lists(elements, steps, new)


def slice_axis(elements, schema, axis, start, stop):
    if axis == RECORD:
        return elements[start:stop]
    steps = path(schema, axis)
    return with_lists(elements, steps, [one[start:stop] for one in lists(elements, steps)])


def join(elements, counts):
    out, at = [], 0
    for count in counts:
        run = elements[at : at + count]
        at += count
        children = {
            root: [child for element in run for child in element.children[root]]
            for root in run[0].children
        }
        out.append(Element(run[0].values, children))
    return out


def size(elements, schema, axis):
    if axis == RECORD:
        return len(elements)
    return sum(len(one) for one in lists(elements, path(schema, axis)))
