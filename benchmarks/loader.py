"""A shuffled epoch into torch: the loader against bare views, memcpy and other loaders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import ragged_format as rf
from benchmarks import loader_peers, shapes
from benchmarks.arena import memcpy
from benchmarks.harness import Figure, Sample, Settings, interleave, median_ratio, median_s, raw
from ragged_format.testing import rollouts
from ragged_format.torch import RaggedBatch, RaggedIterable, RaggedLoader

__all__ = ["run"]

# Samples of each shape (5 KB, as single-turn rollouts; 100 KB, as those of agents; 1 MB, as packed
# rows): how many there are, and how many make a batch.
SHAPES = {"small": (8_192, 64), "large": (1_536, 64), "rows": (160, 8)}
# The goals of each shape: against the fastest peer, bare views, memcpy.
GOALS = {"small": (4.0, 0.8, None), "large": (4.0, None, None), "rows": (None, None, 0.8)}
MEDIANS = {"large": 4_000, "rows": 40_000}


def run(settings: Settings) -> list[Figure]:
    """Time shuffled epochs of one dataset in every format, files in the page cache."""
    figures = []
    for shape, (samples, _) in SHAPES.items():
        count = min(samples, 128) if settings.quick else samples
        with tempfile.TemporaryDirectory(prefix="ragged-bench-") as folder:
            figures += _compare(shape, _samples(shape, count), Path(folder), settings)
    return figures


def _samples(shape: str, count: int) -> pa.RecordBatch:
    """Return `count` samples, of which 512 differ, each under its own id."""
    distinct = min(count, 512)
    if shape in MEDIANS:
        batch = shapes.to_arrow(shapes.many(distinct, median=MEDIANS[shape]))
    else:
        batch = rollouts(
            np.random.default_rng(shapes.SEED), num_samples=distinct, columns=shapes.COLUMNS,
            prompt_length=150, response_length=90, top_k=shapes.HEAD_SIZE,
        )  # fmt: skip
    batch = rf.take(batch, np.arange(count) % distinct)
    ids = pa.array([f"{number:08d}/0" for number in range(count)])
    index = batch.schema.get_field_index("sample_id")
    return batch.set_column(index, batch.schema.field(index), ids)


def _compare(shape: str, batch: pa.RecordBatch, folder: Path, settings: Settings) -> list[Figure]:
    with rf.Writer(folder / "ours", batch.schema) as writer:
        writer.write(batch)
    size = SHAPES[shape][1]
    loaders = {
        "ours": RaggedLoader(folder / "ours", size, shuffle=True, seed=1),
        "inline": RaggedLoader(folder / "ours", size, shuffle=True, seed=1, prefetch=0),
        "blocks": RaggedLoader(folder / "ours", size, shuffle="block", seed=1),
    }
    iterable = RaggedIterable(folder / "ours", size, shuffle=True, seed=1)
    sizes = [loaded.nbytes for loaded in loaders["inline"]]
    contenders: dict[str, Callable[[], object]] = {
        name: partial(epoch, loader) for name, loader in loaders.items()
    }
    contenders["iterable"] = lambda: epoch(iterable)
    contenders["views"] = loader_peers.views(batch, folder, size)
    contenders["memcpy"] = memcpy(sizes)
    missing: dict[str, str] = {}
    for name, prepare in loader_peers.PEERS.items():
        try:
            contenders[name] = prepare(batch, folder / name, size)
        except ImportError as err:
            missing[name] = str(err)
    for name, call in contenders.items():
        if name != "memcpy" and call() != batch.num_rows:
            raise RuntimeError(f"{name} does not deliver {batch.num_rows} samples")
    samples = interleave(contenders, settings)
    for loader in loaders.values():
        loader.close()
    return _figures(shape, batch.num_rows, sum(sizes), samples, missing)


def epoch(loader: RaggedLoader | RaggedIterable) -> int:
    """Take one epoch, make every tensor of every batch, and return the number of samples."""
    count = 0
    for loaded in loader:
        count += loaded.num_rows
        touch(loaded)
    return count


def touch(loaded: RaggedBatch) -> None:
    """Make all tensors of a batch."""
    for name in loaded:
        loaded[name]


def _figures(
    shape: str,
    count: int,
    nbytes: int,
    samples: dict[str, list[Sample]],
    missing: dict[str, str],
) -> list[Figure]:
    versus_peer, versus_views, versus_memcpy = GOALS[shape]
    what = f"{shape}, {count} samples of {nbytes / count / 1e3:.3g} KB"
    peers = [name for name in loader_peers.PEERS if name in samples]
    fastest = min(peers, key=lambda name: median_s(samples[name]), default=None)
    lines = [("ours", "views", "bare views of mapped arrays", versus_views),
             ("inline", "views", "bare views of mapped arrays", None),
             ("ours", "memcpy", "memcpy", versus_memcpy),
             ("inline", "memcpy", "memcpy", None)]  # fmt: skip
    lines += [(way, "views", "bare views of mapped arrays", None)
              for way in ("blocks", "iterable")]  # fmt: skip
    lines += [("ours", name, name, versus_peer if name == fastest else None) for name in peers]
    names = {"ours": "", "inline": ", prefetch=0", "blocks": ", blocks", "iterable": ", iterable"}
    figures = [
        Figure(
            f"{what}{names[ours]}",
            _rate(count, samples[ours]),
            f"{label} {_rate(count, samples[peer])}",
            median_ratio(samples[peer], samples[ours]),
            goal,
            median_ratio(samples[peer], samples[ours], "wall"),
            details=raw(ours=samples[ours], peer=samples[peer]),
        )
        for ours, peer, label, goal in lines
    ]
    figures += [
        Figure(what, _rate(count, samples["ours"]), f"{name}: not installed ({reason})")
        for name, reason in missing.items()
    ]
    return figures


def _rate(count: int, samples: list[Sample]) -> str:
    return f"{count / median_s(samples):,.0f} samples/s"
