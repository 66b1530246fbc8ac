"""Fields of a trainer's samples as flat arrays: per token, nested lists, dicts, padded tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._build import field_of
from ragged_format.adapters._tables import HeadRows, unpad_rows
from ragged_format.adapters._values import as_float_rows, as_ids, as_rows, malformed
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools
    from ragged_format.lists import Int64

__all__ = ["Fields", "as_array"]

Array = npt.NDArray[Any]


def as_array(value: Any, where: Where, what: str) -> Array:
    """Return a list, array or CPU tensor of numbers as an ndarray; views stay views."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a tensor, without importing its library
        value = value.detach().cpu()
        # bfloat16 has no counterpart in numpy; float32 holds it exactly.
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        out: Array = value.numpy()
        return out
    try:
        found = np.asarray(value)
    except ValueError:
        found = np.zeros(0, object)
    if found.dtype.kind not in "biuf" and found.size:
        malformed(what, where, "numbers of one shape", value)
    return found


class Fields:
    """The fields of all samples of a call.

    Parameters
    ----------
    payloads : sequence
        Mappings or objects.
    wheres : sequence of Where
        Of each.
    """

    def __init__(self, payloads: Sequence[Any], wheres: Sequence[Where]) -> None:
        self.payloads, self.wheres = payloads, wheres

    def where(self, row: int, name: str, position: int | None = None) -> Where:
        """Return the place of a field."""
        where = self.wheres[row]
        return Where(where.file, row=where.row, column=name, position=position)

    def ids(self, name: str) -> list[Int64]:
        """Return a field of token ids of every sample."""
        out = []
        for row, payload in enumerate(self.payloads):
            value = field_of(payload, name)
            if value is None:
                malformed("a sample has its tokens", self.where(row, name), "token ids", value)
            if hasattr(value, "detach"):
                value = as_array(value, self.where(row, name), "token ids are integers")
            out.append(as_ids(value, lambda p=None, r=row: self.where(r, name, p)))
        return out

    def masks(self, name: str, lengths: Sequence[int]) -> list[Bools]:
        """Return a 0/1 field with one entry per token."""
        out = []
        for row, (array, length) in enumerate(zip(self._arrays(name), lengths, strict=True)):
            self._check_length(row, name, len(array), length)
            scored = array != 0
            if ((array != 1) & scored).any():
                malformed("a mask is 0 or 1", self.where(row, name), "0 or 1", array.tolist())
            out.append(scored)
        return out

    def floats(self, name: str, lengths: Sequence[int]) -> tuple[npt.NDArray[np.float64], Bools]:
        """Return a field with one number per token, end to end, and where it is null (and NaN)."""
        out, nulls = [], [np.zeros(0, bool)]
        for row, length in enumerate(lengths):
            value = field_of(self.payloads[row], name)
            null = np.zeros(length, bool)
            if isinstance(value, list | tuple) and None in value:
                null = np.array([item is None for item in value], bool)
                value = [np.nan if item is None else item for item in value]
            array = as_array(value, self.where(row, name), f"{name} are numbers")
            self._check_length(row, name, len(array), length)
            out.append(array.astype(np.float64, copy=False))
            nulls.append(null)
        return np.concatenate([*out, np.zeros(0)]), np.concatenate(nulls)

    def _arrays(self, name: str) -> list[Array]:
        return [
            as_array(field_of(payload, name), self.where(row, name), f"{name} are numbers")
            for row, payload in enumerate(self.payloads)
        ]

    def id_rows(
        self, name: str, lengths: Sequence[int], counts_name: str
    ) -> tuple[Int64, Int64, Bools]:
        """Return a field of id lists per token as flat ids and counts, and which rows are null.

        Accepted: a list of lists (or nulls), a table padded with -1, flat ids with `counts_name`.
        """
        ids, counts, null = [], [], []
        for row, (payload, length) in enumerate(zip(self.payloads, lengths, strict=True)):
            value, sizes = field_of(payload, name), field_of(payload, counts_name)
            where = self.where(row, name)
            if sizes is not None:
                flat = as_array(value, where, "candidate ids are integers").astype(np.int64)
                per = as_array(sizes, where, "counts are integers").astype(np.int64)
                if (per < 0).any() or int(per.sum()) != len(flat):
                    self._torn(row, counts_name, int(per.sum()), len(flat))
                missing = np.zeros(len(per), bool)
            elif hasattr(value, "shape"):
                table = as_array(value, where, "candidate ids are integers")
                flat, per, _ = unpad_rows(table.reshape(len(table), -1))
                flat = flat.astype(np.int64)
                missing = np.zeros(len(per), bool)
            else:
                rows = as_rows(value, lambda p=None, r=row: self.where(r, name, p))
                flat, per = rows.values, rows.counts
                missing = np.zeros(len(per), bool) if rows.null is None else rows.null
            self._check_length(row, name, len(per), length)
            ids.append(flat)
            counts.append(per)
            null.append(missing)
        none = np.zeros(0, np.int64)
        return (
            np.concatenate([*ids, none]), np.concatenate([*counts, none]),
            np.concatenate([*null, np.zeros(0, bool)]),
        )  # fmt: skip

    def parallel(self, name: str, lengths: Sequence[int], counts: Int64) -> npt.NDArray[np.float64]:
        """Return a field of number lists, or a padded table, parallel to rows of `counts`.

        Raises
        ------
        ConversionError
            A row has another length (``RF-A006``).
        """
        out = []
        begin = 0
        for row, length in enumerate(lengths):
            value = field_of(self.payloads[row], name)
            expected = counts[begin : begin + length]
            begin += length
            if hasattr(value, "shape"):
                table = as_array(value, self.where(row, name), f"{name} are numbers")
                self._check_length(row, name, len(table), length)
                if table.ndim != 2 or table.shape[1] < expected.max(initial=0):
                    self._torn(row, name, int(expected.max(initial=0)), table.shape[-1])
                out.append(table[np.arange(table.shape[1]) < expected[:, None]])
                continue
            rows = as_float_rows(value, lambda p=None, r=row: self.where(r, name, p))
            self._check_length(row, name, len(rows.counts), length)
            if not np.array_equal(rows.counts, expected):
                self._torn(row, name, int(expected.sum()), int(rows.counts.sum()))
            out.append(rows.values)
        return np.concatenate([*out, np.zeros(0)]).astype(np.float64)

    def check_lengths(self, name: str, got: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ``RF-A006`` unless a field has one row per token of every sample."""
        for row, (size, length) in enumerate(zip(got, lengths, strict=True)):
            self._check_length(row, name, size, length)

    def dict_heads(self, name: str, lengths: Sequence[int]) -> tuple[HeadRows, Bools]:
        """Return a field of dicts ``{id: log-prob}`` per token, and which log-probs are null."""
        keys: list[Any] = []
        values: list[Any] = []
        counts: list[int] = []
        for row, (payload, length) in enumerate(zip(self.payloads, lengths, strict=True)):
            value = field_of(payload, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                malformed(f"{name} are dicts per token", self.where(row, name), "a list", value)
            self._check_length(row, name, len(value), length)
            for position, head in enumerate(value):
                if head is not None and not isinstance(head, Mapping):
                    malformed(
                        f"{name} are dicts per token", self.where(row, name, position),
                        "an object or null", head,
                    )  # fmt: skip
            dicts = [head or {} for head in value]
            keys.extend(chain.from_iterable(dicts))
            values.extend(chain.from_iterable(head.values() for head in dicts))
            counts.extend(map(len, dicts))
        null = np.array([item is None for item in values], bool)
        try:
            ids = np.array([int(key) for key in keys], np.int64)
            floats = np.array([np.nan if v is None else float(v) for v in values], np.float64)
        except (TypeError, ValueError) as err:
            malformed(f"{name} have ids and numbers", Where(column=name), "id: number", str(err))
        return HeadRows(np.array(counts, np.int64), ids, floats), null

    def ranked_heads(self, name: str, lengths: Sequence[int]) -> tuple[HeadRows, Bools]:
        """Return a field of dicts ``{id: {logprob, rank}}`` per token, in order of their ranks.

        A position may be null. Also returned: which log-probs are null.
        """
        keys: list[Any] = []
        entries: list[Any] = []
        counts: list[int] = []
        for row, (payload, length) in enumerate(zip(self.payloads, lengths, strict=True)):
            value = field_of(payload, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                malformed(f"{name} are objects per token", self.where(row, name), "a list", value)
            self._check_length(row, name, len(value), length)
            for position, head in enumerate(value):
                fits = head is None or isinstance(head, Mapping)
                if not fits or not all(isinstance(e, Mapping) for e in (head or {}).values()):
                    malformed(
                        f"{name} are objects by id", self.where(row, name, position),
                        "{id: {logprob, rank}} or null", head,
                    )  # fmt: skip
            keys.extend(chain.from_iterable(head or () for head in value))
            entries.extend(chain.from_iterable((head or {}).values() for head in value))
            counts.extend(len(head or ()) for head in value)
        given = [entry.get("logprob") for entry in entries]
        floats = as_float_rows([given], lambda p=None: Where(column=name, position=p)).values
        null = np.array([item is None for item in given], bool)
        try:
            ids = np.array([int(key) for key in keys], np.int64)
        except ValueError as err:
            malformed(f"{name} are keyed by token id", Where(column=name), "an id", str(err))
        # Entries without a rank come last, as they came.
        last = np.iinfo(np.int64).max
        ranks = np.array([last if (r := e.get("rank")) is None else r for e in entries], np.int64)
        sizes = np.array(counts, np.int64)
        order = np.lexsort((ranks, np.repeat(np.arange(len(sizes)), sizes)))
        return HeadRows(sizes, ids[order], floats[order]), null[order]

    def pair_heads(self, name: str, lengths: Sequence[int]) -> tuple[HeadRows, Bools]:
        """Return a field of lists of (id, log-prob) per token; a position may be null."""
        pairs: list[Any] = []
        counts: list[int] = []
        for row, (payload, length) in enumerate(zip(self.payloads, lengths, strict=True)):
            value = field_of(payload, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                malformed(f"{name} are lists per token", self.where(row, name), "a list", value)
            self._check_length(row, name, len(value), length)
            for position, head in enumerate(value):
                fits = head is None or isinstance(head, list | tuple)
                if not fits or not all(len(p) == 2 for p in head or ()):
                    malformed(
                        f"{name} are pairs per token", self.where(row, name, position),
                        "(id, log-prob) pairs or null", head,
                    )  # fmt: skip
            pairs.extend(chain.from_iterable(head or () for head in value))
            counts.extend(len(head or ()) for head in value)
        place = lambda p=None: Where(column=name, position=p)  # noqa: E731
        ids = as_ids([pair[0] for pair in pairs], place)
        floats = as_float_rows([[pair[1] for pair in pairs]], place).values
        null = np.array([pair[1] is None for pair in pairs], bool)
        return HeadRows(np.array(counts, np.int64), ids, floats), null

    def table_heads(
        self, ids_name: str, values_name: str, lengths: Sequence[int], *, fill: float = -1
    ) -> HeadRows:
        """Return two padded (tokens, K) fields as heads of all tokens; ids equal to `fill` pad."""
        parts = []
        for row, length in enumerate(lengths):
            payload = self.payloads[row]
            where = self.where(row, ids_name)
            ids = as_array(field_of(payload, ids_name), where, "ids are integers")
            values = as_array(field_of(payload, values_name), where, "log-probs are numbers")
            if ids.ndim != 2 or ids.shape != values.shape:
                raise ConversionError(
                    "ids and log-probs are tables of one shape", code="RF-A006", where=where,
                    expected=f"({length}, K) both", got=f"{ids.shape} and {values.shape}",
                )  # fmt: skip
            self._check_length(row, ids_name, len(ids), length)
            flat, counts, filled = unpad_rows(ids, fill=fill)
            parts.append((flat.astype(np.int64, copy=False), counts, values[filled]))
        none = np.zeros(0, np.int64)
        return HeadRows(
            np.concatenate([*(p[1] for p in parts), none]),
            np.concatenate([*(p[0] for p in parts), none]),
            np.concatenate([*(p[2] for p in parts), np.zeros(0, np.float32)]),
        )

    def _check_length(self, row: int, name: str, got: int, expected: int) -> None:
        if got != expected:
            self._torn(row, name, expected, got)

    def _torn(self, row: int, name: str, expected: int, got: int) -> NoReturn:
        raise ConversionError(
            f"{name} has one entry per token", code="RF-A006", where=self.where(row, name),
            expected=expected, got=got,
            remedy="the fields of this sample are not aligned; do not cut or pad them",
        )  # fmt: skip
