"""Axolotl's knowledge distillation rows, both versions, in and out.

A row has the teacher's lists for its last tokens, aligned on the right, own position. Version 1
has ``logprobs``, per position a list of ``{"token": "token_id:N", "logprob": x}``; version 2 has
``target_token_ids`` and ``logprobs`` as lists; transformed rows have tables with ``target_mask``.
Axolotl cuts rows to one K, which drops a realised token beyond it; nothing is cut here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import Columns, field_of, is_given, rows_where
from ragged_format.adapters._export import Samples, refuse_loss
from ragged_format.adapters._fields import Fields, as_array
from ragged_format.adapters._offline import sequences_of, teacher_samples
from ragged_format.adapters._tables import HeadRows
from ragged_format.adapters._teacher import stored_heads, teacher_mode
from ragged_format.adapters._values import as_float_rows, as_rows, malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import segment_sums

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._values import Bools, Floats, Rows
    from ragged_format.lists import Int64

__all__ = ["ADAPTER", "payloads", "to_rows", "to_samples", "write"]

_ID_TEXT = "token_id:"
_MASKS = ("labels", "completion_mask")
Tokenize = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


def payloads(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, each with a sample id of file and line.

    Raises
    ------
    ConversionError
        A line is no JSON object (``RF-A002``).
    """
    with Path(path).open() as lines:
        for number, line in enumerate(lines):
            if line.strip():
                row = _row(line, Where(file=path, row=number))
                yield {"sample_id": f"{Path(path).stem}/{number}", "source": path} | row


def _row(line: str, where: Where) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:
        malformed("a line is JSON", where, "a JSON object", str(err))
    if not isinstance(row, dict):
        malformed("a line is an object", where, "a JSON object", row)
    return row


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "raw",
    teacher_temperature: float | None = None,
    tokenize: Tokenize | None = None,
    id_prefix: str = "axolotl",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return distillation rows as one batch of samples.

    Guarantees: every entry is stored or counted in `report`. Scored are the tokens that have a
    label, or without labels those that the lists cover.

    Parameters
    ----------
    payloads : iterable of mappings or objects
        With ``input_ids`` and, as far as there are, ``labels`` (-100 on context) or
        ``completion_mask``; and ``logprobs`` (version 1), ``logprobs`` and ``target_token_ids``
        (version 2), or ``target_logprobs``, ``target_token_ids`` and ``target_mask`` (transformed).
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"raw", "processed"}
        What the teacher's log-probs were.
    teacher_temperature : float, optional
        For the column's metadata.
    tokenize : callable, optional
        For rows of ``messages`` only: takes them and returns ``input_ids`` and ``labels``, as the
        chat template of the training run gives them.
    id_prefix : str
        Rows without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids that contradict, ``RF-A006`` more lists than tokens,
        ``RF-A007`` impossible log-probs, ``RF-A011`` options that do not fit.

    Examples
    --------
    >>> row = {
    ...     "input_ids": [5, 6, 3],
    ...     "labels": [-100, -100, 3],
    ...     "logprobs": [
    ...         [{"token": "token_id:4", "logprob": -0.5}, {"token": "token_id:3", "logprob": -2.0}]
    ...     ],
    ... }
    >>> batch = to_samples([row], vocab_size=10)
    >>> batch.column("teacher_topk_ids").to_pylist(), batch.column("teacher_log_probs").to_pylist()
    ([[4, 3]], [[-2.0]])
    """
    counts = ConversionReport()
    mode = teacher_mode(logprobs_mode, teacher_temperature)
    items = [_tokenized(item, tokenize, row) for row, item in enumerate(records_of(payloads))]
    fields = Fields(items, rows_where(items))
    sequences = sequences_of(fields, id_prefix, masks=_MASKS)
    null = None
    if is_given(items, "target_logprobs"):
        heads, covered = _transformed(fields, sequences.lengths)
    else:
        heads, null, covered = _lists(fields, sequences.lengths, counts)
    if not any(
        field_of(item, m) is not None for item in items for m in ("labels", "completion_mask")
    ):
        sequences.masks = covered
    for item in items:
        if isinstance(item, Mapping) and item.get("messages"):
            counts.unread["messages"] += 1
    return teacher_samples(
        sequences, heads, mode, "logprobs", vocab_size=vocab_size, columns=columns, schema=schema,
        counts=counts, report=report, null=null,
    )  # fmt: skip


def _tokenized(item: Any, tokenize: Tokenize | None, row: int) -> Any:
    if field_of(item, "input_ids") is not None:
        return item
    if tokenize is None or field_of(item, "messages") is None:
        raise ConversionError(
            "a row has no tokens", code="RF-A010", where=Where(row=row, column="input_ids"),
            expected="input_ids, or messages and tokenize=", got=None,
            remedy="pass tokenize=, which applies the chat template of the training run",
        )  # fmt: skip
    return {**item, **tokenize(item["messages"])}


def _lists(
    fields: Fields, lengths: Sequence[int], report: ConversionReport
) -> tuple[HeadRows, Bools | None, list[Bools]]:
    """Return the heads of all tokens of lists that are aligned on the right."""
    ids, values, nulls, counts, covered = [], [], [], [], []
    for row, length in enumerate(lengths):
        part = _row_lists(fields, row, report)
        spare = length - len(part.counts)
        if spare < 0:
            raise ConversionError(
                "a row has at most one list per token", code="RF-A006",
                where=fields.where(row, "logprobs"), expected=f"at most {length}",
                got=len(part.counts),
                remedy="the lists are of other tokens: check the chat template",
            )  # fmt: skip
        counts.append(np.concatenate([np.zeros(spare, np.int64), part.counts]))
        covered.append(np.arange(length) >= spare)
        ids.append(part.ids)
        values.append(part.log_probs)
        nulls.append(np.isnan(part.log_probs) & part.null)
    none = np.zeros(0, np.int64)
    heads = HeadRows(
        np.concatenate([*counts, none]), np.concatenate([*ids, none]),
        np.concatenate([*values, np.zeros(0)]),
    )  # fmt: skip
    return heads, np.concatenate([*nulls, np.zeros(0, bool)]), covered


class _Part:
    def __init__(self, ids: Int64, log_probs: Floats, null: Bools, counts: Int64) -> None:
        self.ids, self.log_probs, self.null, self.counts = ids, log_probs, null, counts


def _row_lists(fields: Fields, row: int, report: ConversionReport) -> _Part:
    payload = fields.payloads[row]
    lists = field_of(payload, "logprobs")

    def place(position: int | None = None) -> Where:
        return fields.where(row, "logprobs", position)

    if not isinstance(lists, Sequence) or isinstance(lists, str | bytes):
        malformed("a row has a list per position", place(), "a list of lists", lists)
    if field_of(payload, "target_token_ids") is not None:
        ids: Rows = as_rows(field_of(payload, "target_token_ids"), place)
        values: Rows = as_float_rows(lists, place)
        if not np.array_equal(ids.counts, values.counts):
            first = int(np.argmax(ids.counts[: len(values.counts)] != values.counts)) if len(
                ids.counts) == len(values.counts) else 0  # fmt: skip
            raise ConversionError(
                "ids and log-probs are lists of one shape", code="RF-A006", where=place(first),
                expected=values.counts.tolist()[:8], got=ids.counts.tolist()[:8],
            )  # fmt: skip
        null = np.isnan(values.values)
        return _Part(ids.values, values.values, null, values.counts)
    entries: list[Mapping[str, Any]] = []
    for position, entry_list in enumerate(lists):
        fits = entry_list is None or isinstance(entry_list, Sequence)
        if not fits or not all(isinstance(e, Mapping) for e in entry_list or ()):
            malformed("a list has objects", place(position), "{token, logprob}", entry_list)
        entries.extend(entry_list or ())
    sizes = np.array([len(entry_list or ()) for entry_list in lists], np.int64)
    texts = [entry.get("token") for entry in entries]
    named = np.array([isinstance(t, str) and t.startswith(_ID_TEXT) for t in texts], bool)
    by_text = int(np.count_nonzero(~named))
    report.head_entries.taken += by_text
    report.head_entries.drop("text_only", by_text)
    try:
        found = [int(t.removeprefix(_ID_TEXT)) for t, k in zip(texts, named, strict=True) if k]  # type: ignore[union-attr]
    except ValueError as err:
        malformed("a token is named by its id", place(), "token_id:N", str(err))
    raw = [entry.get("logprob") for entry, k in zip(entries, named, strict=True) if k]
    floats = as_float_rows([raw], place).values
    null = np.array([value is None for value in raw], bool)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    return _Part(np.array(found, np.int64), floats, null, segment_sums(named, bounds))


def _transformed(fields: Fields, lengths: Sequence[int]) -> tuple[HeadRows, list[Bools]]:
    """Return the heads of transformed rows: slots where the mask is 1."""
    counts, ids, values, covered = [], [], [], []
    for row, length in enumerate(lengths):
        tables = []
        for name in ("target_mask", "target_token_ids", "target_logprobs"):
            payload = field_of(fields.payloads[row], name)
            tables.append(as_array(payload, fields.where(row, name), f"{name} is a table"))
            if tables[-1].ndim != 2 or tables[-1].shape != (length, tables[0].shape[-1]):
                raise ConversionError(
                    "transformed rows are tables of one shape", code="RF-A006",
                    where=fields.where(row, name), expected=f"({length}, {tables[0].shape[-1]})",
                    got=tables[-1].shape,
                    remedy="version 2 cuts the log-probs and not the ids; take the rows before it",
                )  # fmt: skip
        filled = tables[0] != 0
        counts.append(filled.sum(axis=1, dtype=np.int64))
        ids.append(tables[1][filled].astype(np.int64))
        values.append(tables[2][filled])
        covered.append(filled.any(axis=1))
    none = np.zeros(0, np.int64)
    heads = HeadRows(
        np.concatenate([*counts, none]), np.concatenate([*ids, none]),
        np.concatenate([*values, np.zeros(0, np.float32)]),
    )  # fmt: skip
    return heads, covered


def to_rows(
    samples: pa.RecordBatch,
    *,
    version: Literal[1, 2] = 2,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> list[dict[str, Any]]:
    """Return samples as distillation rows, plain JSON values.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` with ``teacher_topk_*``, validated.
    version : {1, 2}
    lossy : bool
        Leave out columns without a place instead of refusing.
    counts : Counter, optional
        Receives what was left out, and the rows whose lists differ in length (``uneven_rows``), of
        which Axolotl cuts the longer lists.

    Returns
    -------
    list of dict
        ``sample_id``, ``input_ids``, ``labels``, ``logprobs`` and, in version 2,
        ``target_token_ids``: lists for the tokens from the first scored one on, empty on context.
    """
    carried = {
        "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
        "teacher_topk_log_probs", "teacher_log_probs", "target_flags",
    }  # fmt: skip
    refuse_loss(samples, {*carried, "sample_id"}, to="Axolotl", lossy=lossy, counts=counts)
    parts = Samples(samples)
    heads = stored_heads(parts)
    per_token = parts.token_counts(heads.counts)
    cuts = np.cumsum(per_token)[:-1]
    ids = [part.tolist() for part in np.split(heads.ids, cuts)]
    values = [part.tolist() for part in np.split(heads.log_probs, cuts)]
    names = parts.record("sample_id")
    out = []
    for row in range(len(parts)):
        begin, end = int(parts.offsets[row]), int(parts.offsets[row + 1])
        scored = np.flatnonzero(parts.mask[begin:end])
        first = begin + int(scored[0]) if len(scored) else end
        sizes = np.unique(per_token[begin:end][scored])
        if counts is not None:
            counts["uneven_rows"] += len(sizes) > 1
        labels = np.where(parts.mask[begin:end] == 1, parts.ids[begin:end], -100)
        made: dict[str, Any] = {
            "sample_id": names[row], "input_ids": parts.ids[begin:end].tolist(),
            "labels": labels.tolist(),
        }  # fmt: skip
        if version == 2:
            made |= {"target_token_ids": ids[first:end], "logprobs": values[first:end]}
        else:
            made["logprobs"] = [
                [
                    {"token": f"{_ID_TEXT}{token}", "logprob": value}
                    for token, value in zip(*pair, strict=True)
                ]
                for pair in zip(ids[first:end], values[first:end], strict=True)
            ]
        out.append(made)
    return out


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    version: Literal[1, 2] = 2,
    lossy: bool = False,
) -> dict[str, int]:
    """Write samples as JSON lines of distillation rows.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        File to make.
    version, lossy
        As in :func:`to_rows`.
    """
    counts: Counter[str] = Counter()
    with Path(path).open("w") as out:
        for batch in batches:
            for row in to_rows(batch, version=version, lossy=lossy, counts=counts):
                out.write(json.dumps(row) + "\n")
                counts["rows"] += 1
    return dict(counts)


def _recognizes(payload: Any) -> bool:
    if not isinstance(payload, Mapping):
        return False
    lists = payload.get("logprobs")
    first = next((part for part in lists if part), None) if isinstance(lists, list) else None
    if not isinstance(first, list) or ("messages" not in payload and "labels" not in payload):
        return False
    return "target_token_ids" in payload or isinstance(first[0], Mapping)


ADAPTER = Adapter(
    name="axolotl",
    title="Axolotl knowledge distillation rows, versions 1 and 2",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(write=write, profile="sample", makes="JSON lines"),
)  # fmt: skip
