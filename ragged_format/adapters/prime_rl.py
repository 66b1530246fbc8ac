"""prime-rl: training samples and packed micro-batches, in both directions.

The structs of its transport (``TrainingSample``, ``MicroBatch``, ``SamplingMask``,
``RoutedExperts``) are declared here anew; they need the package msgspec. Masks and log-probs lie at
the token's own position; a count of 0 says "no set", which prime-rl scores over the full
vocabulary whatever the reason. Values of tokens that are not scored are 0 there; others are counted
as unread.

Answers of its engine have binary fields; :func:`expand_response` makes them plain, for
``ragged_format.adapters.vllm``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._msgpack import load_msgspec
from ragged_format.adapters._prime_rl_http import (
    decode_compact_logprobs,
    decode_kept_tokens,
    expand_response,
)
from ragged_format.adapters._prime_rl_in import GIVEN, OWN, Payload, finish, read
from ragged_format.adapters._prime_rl_out import Fields
from ragged_format.adapters._trajectory import Policies, build
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.errors import ConversionError, Where
from ragged_format.packing.unpack import unpack_row
from ragged_format.parse import parse_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._prime_rl_structs import (
        Generation,
        MicroBatch,
        TrainingSample,
    )
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = [
    "ADAPTER",
    "Payload",
    "decode",
    "decode_compact_logprobs",
    "decode_kept_tokens",
    "dummy_micro_batch",
    "encode",
    "expand_response",
    "payloads",
    "to_micro_batch",
    "to_samples",
    "to_training_samples",
    "write",
]

# What prime-rl pads rows with.
PAD_ID = 1
_STRUCTS = ("MicroBatch", "RoutedExperts", "SamplingMask", "TrainingSample")


def __getattr__(name: str) -> Any:
    # Late: everything else of this module is there without msgspec.
    if name in _STRUCTS:
        from ragged_format.adapters import _prime_rl_structs

        return getattr(_prime_rl_structs, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def payloads(path: str) -> Iterator[Payload]:
    """Yield the structs of a ``.bin`` file, one decoded at a time.

    Raises
    ------
    ConversionError
        The file is not MessagePack of a list of these structs (``RF-A002``).
    """
    place = Path(path)
    name = "/".join(part for part in (place.parent.name, place.stem) if part)
    for index, value in enumerate(_decoded(place.read_bytes(), Where(file=path))):
        yield Payload(name, index, value)


def decode(data: bytes) -> list[TrainingSample | MicroBatch]:
    """Return the structs of a message: a list of ``TrainingSample`` or of ``MicroBatch``.

    Raises
    ------
    ConversionError
        The bytes are something else (``RF-A002``).
    """
    return list(_decoded(data, Where()))


def _decoded(data: bytes, where: Where) -> Iterator[TrainingSample | MicroBatch]:
    msgspec = load_msgspec()

    from ragged_format.adapters._prime_rl_structs import PARTS, MicroBatch, TrainingSample

    number = None
    try:
        items = msgspec.msgpack.decode(data, type=PARTS)
        for number, raw in enumerate(items):  # noqa: B007 (errors name it)
            # Which of the two it is shows in the fifth field: a name, or positions.
            fields = msgspec.msgpack.decode(raw, type=PARTS)
            named = len(fields) > 4 and isinstance(msgspec.msgpack.decode(fields[4]), str)
            kind: type[TrainingSample | MicroBatch] = TrainingSample if named else MicroBatch
            yield msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ConversionError(
            "the bytes are not a message of prime-rl", code="RF-A002",
            where=Where(where.file, row=number),
            expected="MessagePack of a list of TrainingSample or MicroBatch", got=str(err),
        ) from err  # fmt: skip


def encode(
    items: Iterable[TrainingSample | MicroBatch], *, generation: Generation = "sampling_mask"
) -> bytes:
    """Return structs as one message, byte for byte as prime-rl writes it.

    Parameters
    ----------
    items : iterable of TrainingSample or MicroBatch
    generation : {"sampling_mask", "kept_tokens"}
        Which structs: ``kept_tokens`` are those of the merge that introduced masks.

    Raises
    ------
    ConversionError
        The older structs lack a field (``RF-A001``).
    """
    msgspec = load_msgspec()

    data: bytes = msgspec.msgpack.encode([_fields(item, generation) for item in items])
    return data


def _fields(item: TrainingSample | MicroBatch, generation: Generation) -> list[Any]:
    from ragged_format.adapters._prime_rl_structs import GENERATIONS, plain

    if generation not in GENERATIONS:
        raise ConversionError(
            "there is no such generation of structs", code="RF-A011",
            expected=" or ".join(GENERATIONS), got=generation,
        )  # fmt: skip
    return plain(item, generation)


def to_samples(
    payloads: Iterable[TrainingSample | MicroBatch | Payload],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: LogProbMode = "processed",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return training samples, and the samples in micro-batches, as one batch.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was. Padding and dummy batches are left out, counted.

    Parameters
    ----------
    payloads : iterable of TrainingSample, MicroBatch or Payload
    vocab_size, columns, schema, logprobs_mode, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there. A trained token with count 0 lacks its set; prime-rl scores it over the full
        vocabulary, which ``full_vocab`` takes over (PrimeIntellect-ai/prime-rl#3235).

    Raises
    ------
    ConversionError
        As there.

    Examples
    --------
    >>> from ragged_format.adapters.prime_rl import SamplingMask, TrainingSample
    >>> mask = SamplingMask(np.array([2, 7], "<i4").tobytes(), np.array([0, 0, 2], "<i4").tobytes())
    >>> sample = TrainingSample(
    ...     [5, 6, 7], [False, False, True], [0, 0, -0.5], [1.0] * 3, "math", sampling_mask=mask
    ... )
    >>> batch = to_samples([sample], vocab_size=10)
    >>> batch.column("candidate_ids").to_pylist(), batch.column("env_name").to_pylist()
    ([[2, 7]], ['math'])
    """
    return build(
        payloads, read, vocab_size=vocab_size, columns=columns, schema=schema,
        logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        given=GIVEN, own=OWN, finish=finish, report=report,
    )  # fmt: skip


def to_training_samples(
    samples: pa.RecordBatch, *, temperature: float | None = None, experts_dtype: str = "uint8"
) -> list[TrainingSample]:
    """Return samples as prime-rl's training samples.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid, with ``rollout_log_probs``. Record columns other than
        ``advantage``, ``temperature``, ``env_name``, ``rollout_id`` and ``branch_index`` have no
        place.
    temperature : float, optional
        Of samples that state none.
    experts_dtype : str
        Integer type of routed experts.

    Raises
    ------
    ConversionError
        Columns that the structs cannot hold, flagged targets, no log-probs, no temperature
        (``RF-A001``).
    """
    from ragged_format.adapters._prime_rl_structs import TrainingSample

    out = Fields(samples, temperature, experts_dtype)
    found = []
    traces, branches = out.source.record("rollout_id"), out.source.record("branch_index")
    names = out.source.record("env_name")
    for row, (begin, end) in enumerate(pairwise(out.source.offsets.tolist())):
        item = TrainingSample(
            out.source.tokens[begin:end].tolist(), out.source.scored[begin:end].tolist(),
            out.by_token["logprobs"][begin:end].tolist(),
            out.by_token["temperatures"][begin:end].tolist(), names[row] or "",
            trace_id=traces[row], branch_index=branches[row],
        )  # fmt: skip
        out.fill(item, row, row + 1)
        found.append(item)
    return found


def to_micro_batch(
    batch: pa.RecordBatch,
    *,
    pad_to_multiple_of: int = 1,
    temperature: float | None = None,
    experts_dtype: str = "uint8",
) -> MicroBatch:
    """Return samples, or one packed row, as one micro-batch: its samples end to end.

    Prefixes that a row shares are written out for every sample, as prime-rl has them.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Profile ``sample`` (all of its records) or ``packed`` (one record).
    pad_to_multiple_of : int
        Tokens with id 1 lengthen the last sample until the row has such a length.
    temperature, experts_dtype
        As in :func:`to_training_samples`.

    Raises
    ------
    ConversionError
        As :func:`to_training_samples`; some samples have an advantage and others none
        (``RF-A001``).
    """
    from ragged_format.adapters._prime_rl_structs import MicroBatch

    if parse_schema(batch.schema).profile == "packed":
        batch = unpack_row(batch)
    out = Fields(batch, temperature, experts_dtype)
    source = out.source
    if not out.advantages.all() and out.advantages.any():
        raise ConversionError(
            "a row has samples with and without advantage",
            where=Where(row=int(np.argmin(out.advantages)), column="advantage"),
            expected="a number", got=None, remedy="leave samples without advantage out",
        )  # fmt: skip
    size = len(source.tokens)
    padding = -size % pad_to_multiple_of
    lengths = out.lengths.tolist()
    if lengths:
        lengths[-1] += padding
    positions = np.arange(size) - np.repeat(source.offsets[:-1], out.lengths)
    names = np.repeat(np.array([n or "" for n in source.record("env_name")], object), out.lengths)
    item = MicroBatch(
        source.tokens.tolist() + [PAD_ID] * padding, source.scored.tolist() + [False] * padding,
        None, out.by_token["logprobs"].tolist() + [0.0] * padding,
        positions.tolist() + list(range(padding)), lengths,
        out.by_token["temperatures"].tolist() + [1.0] * padding, names.tolist() + [""] * padding,
        list(lengths),
    )  # fmt: skip
    out.fill(item, 0, source.num_records, padding=padding)
    return item


def dummy_micro_batch(first: MicroBatch) -> MicroBatch:
    """Return what prime-rl gives a rank that has no batch left: `first` without loss and mask."""
    msgspec = load_msgspec()

    size = len(first.input_ids)
    out: MicroBatch = msgspec.structs.replace(
        first, loss_mask=[False] * size, advantages=[0.0] * size, sampling_mask=None
    )
    return out


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    world_size: int = 1,
    pad_to_multiple_of: int = 1,
    temperature: float | None = None,
    generation: Generation = "sampling_mask",
) -> Mapping[str, int]:
    """Write packed rows as the files that trainer ranks read: ``rank_N.bin`` in `path`.

    Row i goes to rank i modulo `world_size`; ranks that end up with one row less get a dummy batch.

    Guarantees: memory for one row at a time and the first.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``packed``.
    path : str
        Directory to make.
    world_size : int
        Ranks.
    pad_to_multiple_of, temperature
        As in :func:`to_micro_batch`.
    generation
        As in :func:`encode`.

    Returns
    -------
    mapping of str to int
        Rows, dummy batches and tokens written, padding included.
    """
    msgspec = load_msgspec()

    if world_size < 1:
        raise ConversionError(
            "there is at least one rank", code="RF-A011", expected=">= 1", got=world_size
        )
    folder = Path(path)
    folder.mkdir()
    places = [folder / f"rank_{rank}.bin" for rank in range(world_size)]
    counts = {"rows": 0, "dummy_batches": 0, "tokens": 0}
    first: MicroBatch | None = None
    # The number of structs, which a message begins with, is known last.
    with ExitStack() as stack:
        bodies = [stack.enter_context(p.with_suffix(".body").open("wb")) for p in places]
        for batch in batches:
            for row in range(batch.num_rows):
                item = to_micro_batch(
                    batch.slice(row, 1), pad_to_multiple_of=pad_to_multiple_of,
                    temperature=temperature,
                )  # fmt: skip
                first = first or item
                bodies[counts["rows"] % world_size].write(
                    msgspec.msgpack.encode(_fields(item, generation))
                )
                counts["rows"] += 1
                counts["tokens"] += len(item.input_ids)
        per_rank = -(-counts["rows"] // world_size)
        if first is not None:
            for rank in range(counts["rows"] % world_size or world_size, world_size):
                dummy = dummy_micro_batch(first)
                bodies[rank].write(msgspec.msgpack.encode(_fields(dummy, generation)))
                counts["dummy_batches"] += 1
                counts["tokens"] += len(dummy.input_ids)
    for place in places:
        body = place.with_suffix(".body")
        with place.open("wb") as out, body.open("rb") as source:
            out.write(_list_header(per_rank))
            shutil.copyfileobj(source, out)
        body.unlink()
    return counts


def _list_header(size: int) -> bytes:
    """Return what MessagePack begins a list of `size` elements with."""
    if size < 16:
        return bytes([0x90 | size])
    if size < 1 << 16:
        return b"\xdc" + size.to_bytes(2, "big")
    return b"\xdd" + size.to_bytes(4, "big")


def _recognizes(payload: Any) -> bool:
    """Return whether it is a struct of the transport, or one with its place."""
    struct = payload.value if isinstance(payload, Payload) else payload
    fields = getattr(type(struct), "__struct_fields__", ())
    return "sampling_mask" in fields and not {"env_name", "env_names"}.isdisjoint(fields)


ADAPTER = Adapter(
    name="prime_rl",
    title="prime-rl, TrainingSample and MicroBatch messages",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(".bin",), recognizes=_recognizes
    ),
    writes=Writer(write=write, profile="packed", makes="a directory with rank_N.bin per rank"),
)
