"""The sections of a report on training: packing, balance, forest, staleness, rewards."""

from __future__ import annotations

from typing import Any

from ragged_pipeline.reports.blocks import Figure, Note, Section, Table, Tile
from ragged_pipeline.reports.charts import Bar, bars, columns
from ragged_pipeline.reports.forest_chart import MOST_LINES, forest_chart
from ragged_pipeline.reports.numerals import full, percent, short
from ragged_pipeline.reports.sections import histogram_figure, plural

__all__ = ["balance", "forest", "packing", "rewards", "staleness"]

_RANKS = 32


def packing(data: dict[str, Any]) -> Section:
    """Return the section of packing ratio and row fill."""
    section = Section("packing", "Packing")
    found = data["packing"]
    if found is None:
        section.blocks.append(
            Note("The data is not packed: its records are single samples, without rows to fill, "
                 "ranks to balance and a prefix tree.")
        )  # fmt: skip
        return section
    if not found["tokens"]:
        section.blocks.append(Note("There is no packed token."))
        return section
    section.tiles = [
        Tile("packing ratio", f"{found['ratio']:.3f}", "member tokens per token forwarded"),
        Tile("row fill", percent(found["fill"]), f"of {plural(found['budget'], 'token')}"),
        Tile("members per row", full(found["members_per_row"]["mean"]), "mean"),
        Tile("nodes per row", full(found["nodes_per_row"]["mean"]), "mean"),
    ]
    bins = found["row_tokens"]["histogram"]
    counts = [b["count"] for b in bins]
    labels = [
        "over" if b["high"] is None else f"{100 * b['low']:.0f} to {100 * b['high']:.0f} %"
        for b in bins
    ]
    shown = ["over" if b["high"] is None else f"{100 * b['low']:.0f} %" for b in bins]
    budget = (
        f"the budget of {full(found['budget'])} tokens" if found["budget_is_known"]
        else f"the longest row, {full(found['budget'])} tokens; the data names no budget"
    )  # fmt: skip
    section.blocks = [
        Figure(
            "row-fill", "Row fill",
            f"Tokens of {plural(found['rows'], 'row')} as a share of {budget}; mean "
            f"{percent(found['fill'])}.",
            lambda width: columns(
                width, shown, counts, x_label="share of a full row", y_label="rows",
                paint="series3", edges=True,
            ),
            ("fill", "rows", "share"),
            [
                (label, full(count), percent(count / found["rows"]))
                for label, count in zip(labels, counts, strict=True)
            ],
        ),
        Figure(
            "packing-tokens", "Tokens before and after sharing",
            f"Tokens of {plural(found['members'], 'member')}, one by one, and of their "
            f"{plural(found['rows'], 'row')}, where shared prefixes are stored once.",
            lambda width: bars(
                width,
                [
                    Bar("of the members", found["member_tokens"], short(found["member_tokens"])),
                    Bar("of the rows", found["tokens"], short(found["tokens"]), "series3"),
                    Bar("capacity of the rows", found["rows"] * found["budget"],
                        short(found["rows"] * found["budget"]), "series6"),
                ],
                x_label="tokens",
            ),
            ("what", "tokens"),
            [
                ("of the members", full(found["member_tokens"])),
                ("of the rows", full(found["tokens"])),
                ("capacity of the rows", full(found["rows"] * found["budget"])),
            ],
        ),
    ]  # fmt: skip
    return section


def balance(data: dict[str, Any]) -> Section:
    """Return the section of the load of ranks, for packed data."""
    section = Section("balance", "Load balance")
    found = data["balance"]
    if found is None:
        section.blocks.append(
            Note("One rank takes all rows. Name the number of ranks with --ranks to see how even "
                 "their load is.")
        )  # fmt: skip
    elif not sum(found["by_rank"]):
        section.blocks.append(Note("No row has a token."))
    else:
        _add_balance(section, found)
    return section


def _add_balance(section: Section, found: dict[str, Any]) -> None:
    loads, ranks = found["by_rank"], found["ranks"]
    mean = sum(loads) / ranks
    section.tiles = [
        Tile("imbalance", f"{found['imbalance']:.4f}", "largest over mean load, over all steps"),
        Tile("ranks", full(ranks)),
        Tile("steps", full(found["steps"]),
             f"{plural(found['missing_rows'], 'row')} missing" if found["missing_rows"] else ""),
    ]  # fmt: skip
    shown = list(enumerate(loads))
    note = ""
    if ranks > _RANKS:
        order = sorted(shown, key=lambda item: (-item[1], item[0]))
        shown = order[: _RANKS // 2] + order[-_RANKS // 2 :]
        note = f" The {_RANKS // 2} heaviest and lightest of {ranks} are shown."
    items = [
        Bar(f"rank {rank}", load, f"{load / mean - 1:+.2%}".replace("%", " %"))
        for rank, load in shown
    ]
    section.blocks = [
        Figure(
            "rank-load", "Load by rank",
            f"Attention score pairs of the rows of each rank over {plural(found['steps'], 'step')}"
            f", and the difference from the mean; row i belongs to rank i mod {ranks}.{note}",
            lambda width: bars(width, items, x_label="score pairs"),
            ("rank", "score pairs", "from the mean"),
            [(str(rank), full(load), f"{load / mean - 1:+.3%}") for rank, load in enumerate(loads)],
        ),
        histogram_figure(
            "step-imbalance", "Imbalance of steps", found["steps_ratio"], integer=False,
            unit="largest over mean load of a step", of="step", paint="series2",
            caption="1 is even; what is above is time in which ranks wait.",
        ),
    ]  # fmt: skip


def forest(data: dict[str, Any]) -> Section:
    """Return the section with the prefix forest of one row, for packed data."""
    section = Section("forest", "Prefix tree of one row")
    tree = data["tree"]
    if tree is None or not tree["nodes"]:
        section.blocks.append(Note("No row has a node."))
        return section
    nodes, members = tree["nodes"], tree["num_members"]
    leaves = len(set(range(len(nodes))) - {node["parent"] for node in nodes})
    cut = f" The first {MOST_LINES} branches are drawn." if leaves > MOST_LINES else ""
    shared = (
        "Strongly colored nodes are shared: stored once, of several members."
        if tree["member_tokens"] > tree["tokens"] else "Nothing is shared."
    )  # fmt: skip
    depths: list[int] = []
    for node in nodes:
        above = node["parent"]
        depths.append(0 if above < 0 else depths[above] + nodes[above]["length"])
    section.blocks.append(
        Figure(
            "prefix-tree", f"Record {full(tree['record'])}",
            f"{plural(members, 'member')} of together {full(tree['member_tokens'])} tokens in "
            f"{plural(tree['num_nodes'], 'node')} of {full(tree['tokens'])}. A node is as long as "
            "its tokens and as high as its branches; numbers are tokens, and \u00d7 members. "
            + shared + cut,
            lambda width: forest_chart(width, tree),
            ("node", "parent", "first position", "tokens", "targets"),
            [
                (str(number), "-" if node["parent"] < 0 else str(node["parent"]),
                 full(depths[number]), full(node["length"]), full(node["targets"]))
                for number, node in enumerate(nodes[:100])
            ],
            wide=True,
        )
    )  # fmt: skip
    return section


def staleness(data: dict[str, Any]) -> Section:
    """Return the section of policy versions."""
    section = Section("staleness", "Staleness")
    found = data["staleness"]
    if found is None:
        section.blocks.append(Note("The data has no column policy_version."))
        return section
    if found["newest"] is None:
        section.blocks.append(Note("policy_version is null in every sample."))
        return section
    behind = found["behind"]
    section.tiles = [
        Tile("newest version", full(found["newest"])), Tile("oldest", full(found["oldest"])),
        Tile("mean lag", full(behind["mean"]), "versions behind the newest"),
        Tile("unknown", full(found["null"]), "samples"),
    ]  # fmt: skip
    section.blocks = [
        histogram_figure(
            "versions", "Samples by policy version", found["versions"], unit="policy version",
            of="sample", paint="series1",
        ),
        histogram_figure(
            "behind", "Versions behind the newest", behind, unit="versions behind the newest of "
            "the data", of="sample", paint="series2",
        ),
    ]  # fmt: skip
    if found["span"] is not None:
        section.blocks.append(
            histogram_figure(
                "version-span",
                "Versions within one sample",
                found["span"],
                log=True,
                unit="newest minus oldest version of a sample's targets",
                of="sample",
                paint="series4",
            )
        )
    return section


def rewards(data: dict[str, Any]) -> Section:
    """Return the section of rewards, by sample and by group."""
    section = Section("rewards", "Rewards")
    for name, paint in (("reward", "series1"), ("advantage", "series4")):
        found = data[name]
        if found is None:
            section.blocks.append(Note(f"The data has no column {name}."))
        elif not found["count"]:
            section.blocks.append(Note(f"{name} is null in every sample."))
        else:
            section.tiles.append(
                Tile(
                    f"mean {name}",
                    full(found["mean"]),
                    f"{full(found['null'])} null" if found["null"] else "",
                )
            )
            section.blocks.append(
                histogram_figure(
                    name,
                    f"{name.capitalize()} of samples",
                    found,
                    unit=name,
                    of="sample",
                    paint=paint,
                    integer=False,
                )
            )
    groups = data["groups"]
    if groups is None:
        section.blocks.append(Note("Groups are not shown: that needs group_id and reward."))
    elif not groups["kept"]:
        section.blocks.append(Note("No sample has both a group_id and a reward."))
    else:
        _add_groups(section, groups)
    return section


def _add_groups(section: Section, groups: dict[str, Any]) -> None:
    several = groups["kept"] - groups["of_one"]
    share = groups["without_spread"] / several if several else None
    kept = (
        f" A sample of 1 in {groups['one_in']} groups, chosen by hash of their ids."
        if groups["one_in"] > 1 else ""
    )  # fmt: skip
    section.tiles += [
        Tile("groups", full(groups["kept"] * groups["one_in"]),
             "estimated" if groups["one_in"] > 1 else f"{full(groups['of_one'])} of one sample"),
        Tile("without signal", percent(share), "groups in which all rewards are equal"),
    ]  # fmt: skip
    for name, title, unit, paint in (
        ("mean", "Mean reward of groups", "mean reward", "series3"),
        ("std", "Spread within groups", "standard deviation of reward", "series5"),
        ("size", "Size of groups", "samples with a reward", "series6"),
    ):
        section.blocks.append(
            histogram_figure(
                f"group-{name}",
                title,
                groups[name],
                unit=unit,
                of="group",
                paint=paint,
                integer=name == "size",
                caption="Groups of two samples or more." + kept if name == "std" else kept.strip(),
            )
        )
    section.blocks.append(_named_groups(groups))


def _named_groups(groups: dict[str, Any]) -> Table:
    named = groups["named"]
    return Table(
        "Single groups",
        f"{len(named)} of {full(groups['kept'] * groups['one_in'])} groups, chosen by hash of "
        "their ids." if len(named) < groups["kept"] else "All groups.",
        ("group_id", "samples", "mean", "std", "min", "max"),
        [
            (g["group_id"], *(full(g[k]) for k in ("samples", "mean", "std", "min", "max")))
            for g in named
        ],
        numbers=("samples", "mean", "std", "min", "max"),
    )  # fmt: skip
