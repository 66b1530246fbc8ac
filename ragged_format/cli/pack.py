"""``ragged pack``: samples become training rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.cli.sinks import Mode, open_sink
from ragged_format.cli.sources import opened
from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.packing import PackReport, pack_row, plan_rows
from ragged_format.profiles import packed_from_sample
from ragged_format.ragged import concat, take
from ragged_format.record_files import STDIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from ragged_format.packing import Plan
    from ragged_format.sources import Source

__all__ = ["PackOptions", "Packed", "pack", "pack_batches"]

Packing = Literal["tree", "sequence"]
Fork = Literal["token", "transition"]
NullAdvantage = Literal["error", "keep"]
Tail = Literal["keep", "drop"]

# Samples that are held, planned and packed together.
CHUNK_BYTES = 256 << 20


def pack(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="Samples: dataset, file or stream; - reads stdin.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="Dataset to write; - writes a stream to stdout."
        ),
    ],
    packing: Annotated[
        Packing, typer.Option("--packing", help="Share common prefixes, or lay samples end to end.")
    ] = "tree",
    fork: Annotated[
        Fork,
        typer.Option(
            "--fork", help="Share while tokens agree, or only while the next one agrees as well."
        ),
    ] = "token",
    token_budget: Annotated[
        int,
        typer.Option(
            "--token-budget", metavar="N", min=1, help="Most tokens of a row, shared once."
        ),
    ] = 16384,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Ranks between which load is even.")
    ] = 1,
    window: Annotated[
        int, typer.Option("--window", metavar="N", min=1, help="Samples planned together.")
    ] = 4096,
    within_group: Annotated[
        bool, typer.Option("--within-group", help="Share only between samples of one group_id.")
    ] = False,
    null_advantage: Annotated[
        NullAdvantage, typer.Option("--null-advantage", help="A sample whose advantage is null.")
    ] = "error",
    tail: Annotated[
        Tail, typer.Option("--tail", help="Rows left over where ranks need equally many.")
    ] = "keep",
    mode: Annotated[
        Mode, typer.Option("--mode", help="What to do with a dataset that OUT already holds.")
    ] = "error",
    json: Json = False,
) -> None:
    """Pack samples into training rows of at most a number of tokens, evenly over ranks."""
    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    options = PackOptions(
        packing=packing, fork=fork, token_budget=token_budget, ranks=ranks, window=window,
        within_group=within_group, null_advantage=null_advantage, tail=tail,
    )  # fmt: skip
    lineage = {"packed_from": path, "packing": packing, "fork": fork, "token_budget": token_budget}
    packed = Packed()
    with opened(path) as source:
        schema = _packed_schema(source, path)
        with (
            out.progress("packing", source.num_rows) as advance,
            open_sink(target, schema, mode=mode, lineage=lineage) as sink,
        ):
            for row in pack_batches(source.batches(), options, packed, advance):
                sink.write(row)
    out.text(heading(f"{format_count(packed.rows)} rows → {target}"), grid(packed.lines(options)))
    out.result({"path": target, "input": path, **packed.to_json(options)})


def _packed_schema(source: Source, path: str) -> pa.Schema:
    if source.ragged_schema.profile != "sample":
        raise SchemaMismatchError(
            "only samples can be packed", code="RF-S002", where=Where(file=path),
            expected="profile 'sample'", got=f"profile {source.ragged_schema.profile!r}",
        )  # fmt: skip
    return packed_from_sample(source.ragged_schema).to_arrow()


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What the rows are to be; fields as the arguments of ``plan_rows`` and ``pack_row``."""

    packing: Packing = "tree"
    fork: Fork = "token"
    token_budget: int = 16384
    ranks: int = 1
    window: int = 4096
    within_group: bool = False
    null_advantage: NullAdvantage = "error"
    tail: Tail = "keep"


@dataclass(slots=True)
class Packed:
    """What became of all samples, over all chunks."""

    report: PackReport = field(default_factory=PackReport)
    lost: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    missing_rows: int = 0
    steps: int = 0
    worst_load: int = 0
    load: int = 0

    def add(self, plan: Plan) -> None:
        """Add the plan of a chunk."""
        self.samples += plan.num_samples
        for reason in ("without_target", "oversize", "dropped"):
            self.lost[reason] += len(getattr(plan, reason))
        self.missing_rows += plan.missing_rows
        steps = np.pad(plan.load, (0, plan.missing_rows)).reshape(-1, plan.ranks)
        self.steps += len(steps)
        self.worst_load += int(steps.max(axis=1, initial=0).sum())
        self.load += int(plan.load.sum())

    @property
    def rows(self) -> int:
        """Rows made."""
        return self.report.rows

    def fill(self, options: PackOptions) -> float:
        """Return the mean share of the budget that rows use."""
        return self.report.unique_tokens / max(self.rows * options.token_budget, 1)

    def imbalance(self, options: PackOptions) -> float:
        """Return the time lost to waiting: largest load over mean load of a step."""
        return self.worst_load * options.ranks / self.load if self.load else 1.0

    def to_json(self, options: PackOptions) -> dict[str, Any]:
        """Return sums and ratios as JSON values."""
        report = self.report
        return {
            "packing": options.packing,
            "fork": options.fork,
            "token_budget": options.token_budget,
            "ranks": options.ranks,
            "samples": self.samples,
            "planned": report.kept,
            **{reason: self.lost[reason] for reason in ("without_target", "oversize", "dropped")},
            "rows": self.rows,
            "steps": self.steps,
            "missing_rows": self.missing_rows,
            "tokens": report.tokens,
            "unique_tokens": report.unique_tokens,
            "targets": report.targets,
            "packing_ratio": round(report.packing_ratio, 4),
            "fill": round(self.fill(options), 4),
            "imbalance": round(self.imbalance(options), 4),
            "null_advantages": report.null_advantages,
            "conflicts": report.conflicts,
        }

    def lines(self, options: PackOptions) -> list[tuple[str, str]]:
        """Return the same for people."""
        report = self.report
        lines = [
            ("samples", f"{format_count(self.samples)}, {format_count(report.kept)} in rows"),
            ("tokens", f"{format_count(report.tokens)}, forwarded "
             f"{format_count(report.unique_tokens)}: packing ratio {report.packing_ratio:.2f}"),
            ("targets", format_count(report.targets)),
            ("fill", f"{self.fill(options):.1%} of {format_count(options.token_budget)} tokens"),
        ]  # fmt: skip
        if options.ranks > 1:
            lines.append(("imbalance", f"{self.imbalance(options):.3f} over {options.ranks} ranks, "
                          f"{format_count(self.steps)} step{'s' * (self.steps != 1)}"))  # fmt: skip
        labels = {
            "without_target": "left out: nothing in them is scored",
            "oversize": "left out: longer than the budget",
            "dropped": "left out: no row for every rank",
        }
        lines += [("samples", f"{format_count(self.lost[r])} {label}")
                  for r, label in labels.items() if self.lost[r]]  # fmt: skip
        if self.missing_rows:
            lines.append(("rows", f"{self.missing_rows} missing in the last step: too few samples"))
        if report.null_advantages:
            lines.append(("advantages", f"{format_count(report.null_advantages)} null, kept"))
        lines += [("conflicts", f"{name}: {format_count(n)} tokens differ from the shared copy")
                  for name, n in report.conflicts.items()]  # fmt: skip
        return lines


def pack_batches(
    batches: Iterable[pa.RecordBatch],
    options: PackOptions,
    packed: Packed,
    advance: Callable[[int], None],
) -> Iterator[pa.RecordBatch]:
    """Yield packed rows; memory is bounded by chunks of 256 MiB, which are planned each by itself.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Samples.
    options : PackOptions
    packed : Packed
        Receives the counts.
    advance : callable
        Called with the number of samples done since the last call.
    """
    for chunk in _chunks(batches):
        plan = plan_rows(
            chunk, options.token_budget, options.ranks, packing=options.packing, fork=options.fork,
            within_group=options.within_group, window=options.window, tail=options.tail,
        )  # fmt: skip
        packed.add(plan)
        advance(chunk.num_rows - sum(map(len, plan.rows)))
        for members in plan.rows:
            yield pack_row(
                take(chunk, members), options.packing, options.fork,
                within_group=options.within_group, null_advantage=options.null_advantage,
                report=packed.report,
            )  # fmt: skip
            advance(len(members))


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield concat(held)
            held, size = [], 0
    if held:
        yield concat(held)
