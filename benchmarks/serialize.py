"""One multi-turn sample through a queue: ours against pickling the reference's objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import Figure, Settings, interleave, speed_figure, total
from benchmarks.reference.queue import queue_samples

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["run"]

# Published for the reference's own sample, dumps + loads in ms.
PUBLISHED = {"arrays": "0.5 + 0.5", "dicts": "1.2 + 2.5"}


def run(settings: Settings) -> list[Figure]:
    """Time writing and reading separately, so that neither reuses memory that the other freed."""
    rollouts = shapes.one_sample()
    batch = shapes.to_arrow(rollouts)
    message = rf.encode_message(batch)
    stream = write_stream(batch)
    check_same(batch, message, stream)
    contenders: dict[str, Callable[[], object]] = {
        "encode": lambda: rf.encode_message(batch),
        "decode": lambda: rf.decode_message(message, batch.schema),
        "write": lambda: write_stream(batch),
        "read": lambda: read_stream(stream),
    }
    sizes = {}
    for form in ("arrays", "dicts"):
        sample = queue_samples(rollouts, "arrays" if form == "arrays" else "dicts")[0]
        data = bytes(ForkingPickler.dumps(sample))
        sizes[form] = len(data)
        contenders |= _pickling(form, sample, data)
    samples = interleave(contenders, settings)
    ours = {
        "message": total(samples["encode"], samples["decode"]),
        "stream": total(samples["write"], samples["read"]),
    }
    goals = {"message": 30.0, "stream": 8.0}
    figures = [
        speed_figure(
            f"{way}, write + read: pickle of {form}",
            ours[way],
            total(samples[f"dumps {form}"], samples[f"loads {form}"]),
            label="pickle",
            note=f" (published {PUBLISHED[form]} ms)",
            goal=goal if form == "arrays" else None,
        )
        for way, goal in goals.items()
        for form in ("arrays", "dicts")
    ]
    for way, data in (("message", message), ("stream", stream)):
        figures.append(
            Figure(
                f"{way}, bytes",
                f"{len(data):,}",
                f"pickle {sizes['arrays']:,} (dicts {sizes['dicts']:,})",
                sizes["arrays"] / len(data),
                10.0,
            )
        )
    return figures


def _pickling(form: str, sample: object, data: bytes) -> dict[str, Callable[[], object]]:
    return {
        f"dumps {form}": lambda: ForkingPickler.dumps(sample),
        f"loads {form}": lambda: pickle.loads(data),
    }


def write_stream(batch: pa.RecordBatch) -> bytes:
    """Return the batch as a whole stream with digests and trailer."""
    sink = io.BytesIO()
    rf.write_stream(sink, [batch])
    return sink.getvalue()


def read_stream(stream: bytes) -> list[pa.RecordBatch]:
    """Return the batches of a stream, verified."""
    return list(rf.read_stream(stream))


def check_same(batch: pa.RecordBatch, message: Any, stream: bytes) -> None:
    """Raise unless both ways give the batch back."""
    if not rf.decode_message(message, batch.schema).equals(batch):
        raise RuntimeError("the message does not give the batch back")
    if [b.equals(batch) for b in read_stream(stream)] != [True]:
        raise RuntimeError("the stream does not give the batch back")
