"""``ragged demo``: the whole way of the data, on rollouts that are part of the package."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragged_format.cli.histogram import Counts, histogram_table
from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.cli.totals import Totals
from ragged_format.cli.validate import validate_source
from ragged_format.dataset import Dataset
from ragged_format.errors import DatasetExistsError, DatasetNotFoundError, Where
from ragged_format.local_files import local_path, usable_place
from ragged_format.packing import PackReport, pack_row, plan_rows
from ragged_format.profiles import packed_from_sample
from ragged_format.record_files import read_lines
from ragged_format.writer import Writer, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_format.adapters.report import ConversionReport

__all__ = ["demo"]

VOCAB_SIZE = 49152  # SmolLM2-135M, whose rollouts these are
TOKEN_BUDGET = 4096
LINEAGE = "ragged demo"
# Compiling takes many seconds, or a few milliseconds when what was compiled is loaded.
_WORTH_A_WORD_S = 2.0
STAGES = ("convert", "validate", "pack", "load", "pad")


def demo(
    ctx: typer.Context,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where the data goes; made if need be.")
    ] = "demo-output",
    json: Json = False,
) -> None:
    """Run the main job on real vLLM rollouts: convert, validate, pack, load, pad.

    Leaves the engine's JSON and two datasets, samples and packed rows, for you to inspect. Run
    again, it replaces these three and touches nothing else.
    """
    out = Output(ctx, json=json)
    job = _Demo(local_path(directory), out)
    out.text(heading("Real vLLM rollouts, from the engine's JSON to padded tensors"))
    job.run()
    job.show()
    out.result(job.to_json())


@dataclass
class _Demo:
    """One run: its places, and what every stage found."""

    directory: Path
    out: Output
    seconds: dict[str, float] = field(default_factory=dict)
    compiled_s: float = 0.0
    json_bytes: int = 0
    dense_bytes: int = 0
    cells: int = 0
    filled: int = 0

    def __post_init__(self) -> None:
        self.rollouts = self.directory / "rollouts.jsonl.gz"
        self.samples = self.directory / "samples"
        self.rows = self.directory / "packed"
        self.packed = PackReport()
        self.planned: dict[str, Any] = {}
        self.report: ConversionReport
        self.totals: Totals

    def run(self) -> None:
        """Run all stages."""
        _refuse_foreign(self.samples)
        _refuse_foreign(self.rows)
        self._place_rollouts()
        self._compile()
        self._convert()
        with self.stage("validate"):
            self.totals = validate_source(Dataset(self.samples), str(self.samples), lambda _: None)
        self._pack()
        if find_spec("torch") is not None:
            self._load_and_pad()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        with self.out.progress(name):
            started = time.perf_counter()
            yield
            self.seconds[name] = time.perf_counter() - started

    def _place_rollouts(self) -> None:
        shipped = resources.files("ragged_format") / "demo_data" / self.rollouts.name
        content = shipped.read_bytes()
        if self.rollouts.exists() and self.rollouts.read_bytes() != content:
            raise _foreign(self.rollouts, "another file")
        with usable_place(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self.rollouts.write_bytes(content)
        self.json_bytes = sum(
            len(line.record) for line in read_lines([str(self.rollouts)], lambda _: None)
        )

    def _compile(self) -> None:
        """Have the parser compiled before anything is timed; what is compiled is kept on disk."""
        from ragged_format.adapters.conversion import parse_record

        first = next(iter(read_lines([str(self.rollouts)], lambda _: None)))
        with self.out.progress("compile the parser, once"):
            started = time.perf_counter()
            parse_record(first)
            self.compiled_s = time.perf_counter() - started

    def _convert(self) -> None:
        from ragged_format.adapters.conversion import Conversion
        from ragged_format.adapters.registry import choose_reader

        reader = choose_reader("vllm")
        conversion = Conversion(reader, [str(self.rollouts)], {"vocab_size": VOCAB_SIZE})
        with self.stage("convert"):
            batches = list(conversion.batches(lambda _: None))
            lineage = {"made_by": LINEAGE}
            schema = batches[0].schema
            with Writer(self.samples, schema, mode="overwrite", lineage=lineage) as writer:
                writer.write(batches)
        self.report = conversion.report
        sweep(self.samples, grace_s=0)  # the shards of the run before

    def _pack(self) -> None:
        samples = Dataset(self.samples)
        schema = packed_from_sample(samples.ragged_schema).to_arrow()
        with (
            self.stage("pack"),
            Writer(self.rows, schema, mode="overwrite", lineage={"made_by": LINEAGE}) as writer,
        ):
            records = samples[:]
            plan = plan_rows(records, TOKEN_BUDGET)
            self.planned = plan.metrics()
            for row in plan.rows:
                writer.write(pack_row(samples.take(row), report=self.packed))
        sweep(self.rows, grace_s=0)

    def _load_and_pad(self) -> None:
        with self.out.progress("importing PyTorch"):
            from ragged_format.torch import RaggedLoader

        with self.stage("load"):
            batches = list(RaggedLoader(str(self.rows), batch_size=1, shuffle=True, seed=0))
        with self.stage("pad"):
            for batch in batches:
                table = batch.padded("candidate_ids")
                self.cells += table.numel()
                self.filled += batch["candidate_ids"].numel()
                ragged = batch["candidate_ids"].nbytes
                self.dense_bytes += batch.nbytes - ragged + table.nbytes

    @property
    def ragged_bytes(self) -> int:
        """Bytes of the packed rows on disk."""
        return sum(shard.bytes for shard in Dataset(self.rows).shards)

    def show(self) -> None:
        """Print what the stages found, and what to try next."""
        out, report, packed = self.out, self.report, self.packed
        elements = {axis: format_count(n) for axis, n in self.totals.elements.items()}
        found = {
            "convert": f"{format_count(report.responses.stored)} responses of vLLM → "
            f"{elements['record']} samples",
            "validate": f"{elements['token']} tokens, {elements['target']} scored, "
            f"{elements['candidate']} candidate ids",
            "pack": f"{self.packed.rows} rows, shared prefixes once: "
            f"{format_count(packed.tokens)} → {format_count(packed.unique_tokens)} tokens",
            "load": f"{self.packed.rows} rows → tensors, views of one allocation each",
            "pad": f"candidate sets → tables, {format_count(self.filled)} of "
            f"{format_count(self.cells)} slots used",
        }
        table = Table.grid(padding=(0, 2, 0, 0))
        for stage in STAGES:
            took = self.seconds.get(stage)
            if took is None:
                table.add_row(f"  {stage}", Text("skipped: pip install 'ragged-format[torch]'"), "")
            else:
                table.add_row(f"  {stage}", found[stage], Text(f"{took * 1e3:,.0f} ms", "dim"))
        table.columns[0].style = "bold green"
        table.columns[2].justify = "right"
        out.text("", table)
        if self.compiled_s > _WORTH_A_WORD_S:
            text = f"  The parser was compiled first, {self.compiled_s:.0f} s; later runs have it."
            out.text(Text(text, "dim"))
        out.text("", heading("Ids that survived truncation, per scored token"))
        out.text(Text("  " + self.counts.sentence(), style="dim"))
        out.text(histogram_table(self.counts), "", heading("What it saves"), self._savings())
        out.text("", heading("Look at it"), Text("\n".join("  " + c for c in self._next())))

    @property
    def counts(self) -> Counts:
        """Sizes of the candidate sets."""
        return self.totals.counts["candidate"]

    def _savings(self) -> Table:
        ragged = self.ragged_bytes
        sizes = [("the engine's JSON", self.json_bytes)]
        if self.cells:
            sizes.append(("rows with padded sets", self.dense_bytes))
        lines: list[tuple[str, Any]] = [("ragged rows, on disk", format_bytes(ragged))]
        lines += [
            (label, f"{format_bytes(size)}, {size / ragged:.1f} times as much")
            for label, size in sizes
        ]
        if self.cells:
            lines.append(("padding avoided", f"{self.avoided:.1%} of the tables' slots"))
        lines.append(("packing ratio", f"{self.packed.packing_ratio:.2f} tokens per "
                      "forwarded token"))  # fmt: skip
        return grid(lines)

    @property
    def avoided(self) -> float:
        """Share of the padded tables that is padding."""
        return 1 - self.filled / self.cells if self.cells else 0.0

    def _next(self) -> list[str]:
        return [
            f"ragged inspect {self.samples} --head 1",
            f"ragged inspect {self.rows} --record 0",
            f"ragged pack {self.samples} rows --fork transition",
            "ragged convert --help",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything found as JSON values."""
        return {
            "directory": str(self.directory),
            **self.totals.to_json(),
            "counts": {axis: counts.to_json() for axis, counts in self.totals.counts.items()},
            "conversion": self.report.to_dict(),
            "packing": self.planned,
            "packing_ratio": round(self.packed.packing_ratio, 4),
            "padding": {
                "slots": self.cells, "used": self.filled, "avoided": round(self.avoided, 4),
            },
            "bytes": {
                "json": self.json_bytes, "dense": self.dense_bytes, "ragged": self.ragged_bytes,
            },
            "seconds": {stage: round(s, 6) for stage, s in self.seconds.items()},
        }  # fmt: skip


def _refuse_foreign(path: Path) -> None:
    """Raise if there is a dataset that the demo did not make; other files stay as they are."""
    try:
        made_by = Dataset(path).lineage.get("made_by")
    except DatasetNotFoundError:
        return
    if made_by != LINEAGE:
        raise _foreign(path, "a dataset that the demo did not write")


def _foreign(path: Path, got: str) -> DatasetExistsError:
    return DatasetExistsError(
        "the demo replaces its own output only", where=Where(file=str(path)),
        expected="nothing, or the output of an earlier demo", got=got,
        remedy="name another directory: ragged demo DIR",
    )  # fmt: skip
