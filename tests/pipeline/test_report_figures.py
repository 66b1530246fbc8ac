"""The figures of a report against loops over the same records."""

import math
from collections import Counter
from statistics import fmean, pstdev

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.lists import flat, to_list
from ragged_format.packing import pack_row, plan_rows
from ragged_format.parse import parse_schema
from ragged_format.testing import fill_batch, packed_batches, rollouts, sample_batches
from ragged_format.validate import validate_batch
from ragged_pipeline.reports import report
from ragged_pipeline.reports.page import page, sections_of
from ragged_pipeline.reports.statistics import Options, Statistics

COLUMNS = (
    "group_id", "policy_version", "reward", "advantage", "finish_reason", "env_name",
    "policy_versions", "target_flags", "rollout_log_probs", "candidate_counts", "candidate_ids",
    "candidate_log_probs", "topk_counts", "topk_ids", "topk_log_probs",
)  # fmt: skip


def statistics_of(batches, options=None, **more):
    statistics = Statistics(parse_schema(batches[0].schema), options or Options())
    record = 0
    for batch in batches:
        statistics.add(batch, record)
        record += batch.num_rows
    return statistics.to_json(**more)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(5)
    schema = rf.sample_schema(vocab_size=300, columns=COLUMNS)
    return fill_batch(schema, rng, rng.integers(0, 30, 60), max_width=9, nulls=0.2)


@pytest.fixture(scope="module")
def found(samples):
    return statistics_of([samples.slice(0, 7), samples.slice(7, 0), samples.slice(7)])


@pytest.fixture(scope="module")
def rows():
    """Packed rows of samples with shared prompts, and the samples."""
    batch = rollouts(
        np.random.default_rng(3), num_samples=48, vocab_size=500, prompt_length=20,
        response_length=12, group_size=4, turns=3, max_candidates=30, top_k=5,
    )  # fmt: skip
    plan = plan_rows(batch, 256, 2, packing="tree")
    packed = [pack_row(rf.take(batch, members), "tree", "token") for members in plan.rows]
    return rf.concat(packed), batch, plan


def described(values):
    """Count, sum, mean, extremes and median as a report states them."""
    ordered = sorted(values)
    return {
        "count": len(ordered), "total": sum(ordered), "min": ordered[0], "max": ordered[-1],
        "mean": pytest.approx(fmean(ordered)), "p50": ordered[math.ceil(0.5 * len(ordered)) - 1],
    }  # fmt: skip


def same(found, expected):
    assert {key: found[key] for key in expected} == expected
    assert sum(b["count"] for b in found["histogram"]) == found["count"]
    for b in found["histogram"]:
        assert b["low"] <= b["high"]


def test_lengths_are_those_of_every_sample(samples, found):
    tokens = [len(ids) for ids in samples["input_ids"].to_pylist()]
    masks = samples["completion_mask"].to_pylist()
    prompts = [mask.index(1) if 1 in mask else len(mask) for mask in masks]
    same(found["lengths"]["tokens"], described(tokens))
    same(found["lengths"]["prompt"], described(prompts))
    same(
        found["lengths"]["completion"],
        described([a - b for a, b in zip(tokens, prompts, strict=True)]),
    )
    same(found["lengths"]["targets"], described(list(map(sum, masks))))


def test_totals_are_sums_over_axes(samples, found):
    elements = {
        "record": 60,
        "token": sum(map(len, samples["input_ids"].to_pylist())),
        "target": sum(map(sum, samples["completion_mask"].to_pylist())),
        "candidate": sum(map(sum, samples["candidate_counts"].to_pylist())),
        "topk": sum(map(sum, samples["topk_counts"].to_pylist())),
    }
    assert found["totals"]["elements"] == elements
    sizes = {c["name"]: c["bytes"] for c in found["columns"]}
    assert found["totals"]["bytes"] == sum(sizes.values())
    assert sizes["input_ids"] == 4 * elements["token"] + 8 * 60
    assert sizes["finish_reason"] == 4 * 60 + sum(
        len(text or "") for text in samples["finish_reason"].to_pylist()
    )
    nulls = {c["name"]: c["nulls"] for c in found["columns"]}
    assert nulls == {name: samples[name].null_count for name in samples.schema.names}


def test_set_sizes_count_singletons_flags_and_full_sets(samples, found):
    axis = next(a for a in found["axes"] if a["axis"] == "candidate")
    counts = [n for row in samples["candidate_counts"].to_pylist() for n in row]
    flags = [f for row in samples["target_flags"].to_pylist() for f in row]
    same(axis["sizes"], described(counts))
    assert axis["singletons"] == counts.count(1)
    assert axis["zero"] == counts.count(0)
    assert axis["flagged"] == sum(f & 3 != 0 and n == 0 for f, n in zip(flags, counts, strict=True))
    assert axis["singleton_share"] == pytest.approx(
        counts.count(1) / (len(counts) - counts.count(0))
    )
    for b in axis["sizes"]["histogram"]:
        assert b["count"] == sum(b["low"] <= n <= b["high"] for n in counts)


def test_slots_of_dense_forms(samples, found):
    axis = next(a for a in found["axes"] if a["axis"] == "candidate")
    rows = samples["candidate_counts"].to_pylist()
    counts = [n for row in rows for n in row]
    assert axis["slots"] == {
        "elements": sum(counts),
        "power_of_two_buckets": sum(2 ** math.ceil(math.log2(n)) for n in counts if n),
        "table_per_record": sum(len(row) * max(row, default=0) for row in rows),
        "one_table": len(counts) * max(counts),
        "vocabulary": len(counts) * 300,
    }
    lengths = [len(ids) for ids in samples["input_ids"].to_pylist()]
    batches = [lengths[i : i + 8] for i in range(0, 60, 8)]
    assert found["padding"] == {
        "batch_size": 8,
        "tokens": sum(lengths),
        "batches": sum(len(b) * max(b) for b in batches),
        "one_table": 60 * max(lengths),
    }


def test_mass_of_heads(samples, found):
    mass = next(a for a in found["axes"] if a["axis"] == "topk")["mass"]
    heads = []
    for counts, values in zip(
        samples["topk_counts"].to_pylist(), samples["topk_log_probs"].to_pylist(), strict=True
    ):
        for count in counts:
            if count:
                heads.append([math.exp(v) for v in values[:count]])
            values = values[count:]
    assert mass["heads"] == len(heads)
    assert mass["mean"] == pytest.approx(fmean(map(sum, heads)), abs=1e-8)
    widest = max(map(len, heads))
    ks = [p["k"] for p in mass["top"]]
    assert ks == [1, 2, 4, 8, widest][: len(ks)]
    assert ks[-1] == widest
    for point in mass["top"]:
        expected = fmean(sum(head[: point["k"]]) for head in heads)
        assert point["mass"] == pytest.approx(expected, abs=1e-8)
    assert sum(b["count"] for b in mass["tail_histogram"]) == len(heads)


def test_widest_sets_are_found_with_their_place(samples, found):
    expected = []
    masks = samples["completion_mask"].to_pylist()
    for record, (counts, ids) in enumerate(
        zip(
            samples["candidate_counts"].to_pylist(),
            samples["candidate_ids"].to_pylist(),
            strict=True,
        )
    ):
        positions = [i for i, scored in enumerate(masks[record]) if scored]
        for count, position in zip(counts, positions, strict=True):
            token = samples["input_ids"][record].as_py()[position]
            name = samples["sample_id"][record].as_py()
            expected.append((-count, record, position, name, token, ids[:count]))
            ids = ids[count:]
    expected.sort()
    assert [
        (-e["size"], e["record"], e["position"], e["sample_id"], e["token"], e["ids"])
        for e in found["widest"]
    ] == expected[:10]


def test_rewards_of_groups(samples, found):
    groups = {}
    for group, reward in zip(
        samples["group_id"].to_pylist(), samples["reward"].to_pylist(), strict=True
    ):
        if group is not None and reward is not None and math.isfinite(reward):
            groups.setdefault(group, []).append(reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    data = found["groups"]
    assert data["kept"] == len(groups)
    assert data["one_in"] == 1
    assert data["of_one"] == len(groups) - len(several)
    assert data["without_spread"] == sum(len(set(rewards)) == 1 for rewards in several)
    assert data["mean"]["mean"] == pytest.approx(fmean(map(fmean, groups.values())))
    assert data["std"]["mean"] == pytest.approx(fmean(map(pstdev, several)))
    assert data["size"]["total"] == sum(map(len, groups.values()))
    assert len(data["named"]) == 12
    for entry in data["named"]:
        rewards = groups[entry["group_id"]]
        assert entry["samples"] == len(rewards)
        assert entry["mean"] == pytest.approx(fmean(rewards))
        assert (entry["min"], entry["max"]) == (min(rewards), max(rewards))


def test_rewards_and_nulls(samples, found):
    rewards = [r for r in samples["reward"].to_pylist() if r is not None and math.isfinite(r)]
    assert found["reward"]["count"] == len(rewards)
    assert found["reward"]["total"] == math.fsum(rewards)
    assert found["reward"]["null"] == samples["reward"].null_count
    assert found["reward"]["count"] + found["reward"]["null"] + found["reward"]["not_finite"] == 60


def test_staleness(samples, found):
    versions = [v for v in samples["policy_version"].to_pylist() if v is not None]
    data = found["staleness"]
    assert (data["newest"], data["oldest"]) == (max(versions), min(versions))
    same(data["behind"], described([max(versions) - v for v in versions]))
    spans = [max(v) - min(v) for v in samples["policy_versions"].to_pylist() if v]
    same(data["span"], described(spans))
    assert data["null"] == 60 - len(versions)


def test_words_and_flags(samples, found):
    reasons = Counter(samples["finish_reason"].to_pylist())
    data = found["finish_reason"]
    assert {e["value"]: e["count"] for e in data["values"]} | {None: data["null"]} == reasons
    flags = [f for row in samples["target_flags"].to_pylist() for f in row]
    assert found["flags"]["log_prob_missing"] == sum(f & 4 != 0 for f in flags)
    assert found["flags"]["teacher_missing"] == sum(f & 16 != 0 for f in flags)
    assert found["teacher_id"] is None


def test_packing_balance_and_tree(rows):
    packed, _, plan = rows
    data = statistics_of([packed.slice(0, 3), packed.slice(3)], Options(ranks=2), token_budget=256)
    tokens = [len(ids) for ids in packed["input_ids"].to_pylist()]
    members = [sum(lengths) for lengths in packed["member_lengths"].to_pylist()]
    packing = data["packing"]
    assert packing["rows"] == packed.num_rows == len(plan.rows)
    assert packing["ratio"] == pytest.approx(sum(members) / sum(tokens))
    assert packing["fill"] == pytest.approx(fmean(tokens) / 256)
    assert packing["row_tokens"]["histogram"][-1]["count"] == sum(t >= 0.95 * 256 for t in tokens)

    loads = [sum(p + 1 for p in row) for row in packed["position_ids"].to_pylist()]
    assert loads == plan.load.tolist()
    steps = [loads[i : i + 2] for i in range(0, len(loads), 2)]
    balance = data["balance"]
    assert balance["by_rank"] == [sum(loads[0::2]), sum(loads[1::2])]
    assert balance["imbalance"] == pytest.approx(2 * sum(map(max, steps)) / sum(loads))
    assert balance["missing_rows"] == len(loads) % 2

    tree = data["tree"]
    shared = [m - t for m, t in zip(members, tokens, strict=True)]
    assert tree["record"] == shared.index(max(shared))
    row = packed.slice(tree["record"], 1).to_pylist()[0]
    assert [n["length"] for n in tree["nodes"]] == row["node_lengths"]
    assert [n["parent"] for n in tree["nodes"]] == row["node_parents"]
    assert sum(n["targets"] for n in tree["nodes"]) == len(row["pred_index"])
    assert [m["sample_id"] for m in tree["members"]] == row["member_sample_id"]


def test_packed_and_unpacked_samples_look_alike(rows):
    packed, batch, _ = rows
    before, after = statistics_of([batch]), statistics_of([packed])
    for key in ("lengths", "finish_reason", "reward", "advantage", "staleness"):
        assert after[key] == before[key]
    assert after["groups"]["mean"] == before["groups"]["mean"]
    sizes = [next(a for a in d["axes"] if a["axis"] == "candidate") for d in (before, after)]
    assert sizes[0]["sizes"] == sizes[1]["sizes"]
    assert sizes[0]["mass"] == sizes[1]["mass"]
    key = lambda e: (-e["size"], e["sample_id"], e["position"])  # noqa: E731
    found = [
        [
            (e["size"], e["sample_id"], e["position"], e["token"])
            for e in sorted(d["widest"], key=key)
        ]
        for d in (before, after)
    ]
    last = found[0][-1][0]  # equal sets at the end may be others
    assert [e for e in found[0] if e[0] > last] == [e for e in found[1] if e[0] > last]


@given(data=st.data(), batch=st.one_of(sample_batches(), packed_batches()))
def test_figures_do_not_depend_on_how_the_data_is_divided(data, batch):
    cuts = sorted(data.draw(st.lists(st.integers(0, batch.num_rows), max_size=3)))
    options = Options(ranks=2, batch_size=3)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, batch.num_rows], strict=True):
        part = Statistics(parse_schema(batch.schema), options)
        part.add(batch.slice(start, end - start), start)
        parts.append(part)
    merged = Statistics(parse_schema(batch.schema), options)
    for part in parts:
        merged.merge(part)
    whole, found = statistics_of([batch], options), merged.to_json()
    for statistics in (whole, found):
        statistics.pop("groups")  # float sums
    assert found == whole


@given(batch=st.one_of(sample_batches(), packed_batches()))
def test_a_page_can_be_made_of_any_data(batch):
    data = {"source": source(batch)} | statistics_of([batch], Options(ranks=2))
    assert page(data, sections_of(data)).endswith("</html>\n")


def source(batch):
    schema = parse_schema(batch.schema)
    return {
        "name": "data", "kind": "stream", "profile": schema.profile, "format_version": "0.1",
        "vocab_size": schema.vocab_size, "metadata": {}, "dataset": None,
    }  # fmt: skip


@pytest.mark.parametrize("columns", [(), COLUMNS], ids=["bare", "all"])
def test_empty_data_and_absent_columns(columns, tmp_path):
    schema = rf.sample_schema(vocab_size=10, columns=columns)
    with rf.Writer(tmp_path / "data", schema):
        pass
    found = report(tmp_path / "data", tmp_path / "r.html")
    assert found.statistics["totals"]["records"] == 0
    assert (found.statistics["reward"] is None) == (not columns)
    assert "There is no sample." in (tmp_path / "r.html").read_text()


def test_a_record_number_outside_the_data_is_refused(rows, tmp_path):
    with rf.Writer(tmp_path / "rows", rows[0].schema) as writer:
        writer.write(rows[0])
    with pytest.raises(rf.OutOfRangeError) as caught:
        report(tmp_path / "rows", row=10_000)
    assert caught.value.code == "RF-L002"
    assert report(tmp_path / "rows", row=1).statistics["tree"]["record"] == 1


def test_an_index_outside_its_axis_is_named(rows):
    packed = rows[0].slice(0, 1)
    column = packed["pred_index"].to_pylist()
    column[0][2] = 10_000
    place = packed.schema.get_field_index("pred_index")
    field = packed.schema.field(place)
    broken = packed.set_column(place, field, pa.array(column, field.type))
    with pytest.raises(rf.InvariantError) as caught:
        statistics_of([broken])
    assert (caught.value.code, caught.value.where.position) == ("RF-I034", 2)


EXTREMES = {
    "f": [np.nan, np.inf, -np.inf, 1e30, -1e30],
    "i": [-(2**31), 2**31 - 1, -1, 0, 1, 2],
    "u": [0, 1, 2, 255],
}


@pytest.mark.parametrize("profile", ["sample", "packed"])
def test_impossible_values_end_in_figures_or_in_an_error_that_names_them(profile):
    rng = np.random.default_rng(2)
    schema = rf.sample_schema(vocab_size=60)
    batch = fill_batch(schema, rng, rng.integers(0, 12, 12), max_width=6)
    if profile == "packed":
        parts = [batch.slice(i, 4) for i in (0, 4, 8)]
        batch = rf.concat([pack_row(part, null_advantage="keep") for part in parts])
    declared = parse_schema(batch.schema)
    seen = set()
    for column in declared:
        if column.axis == "record" or pa.types.is_string(column.type):
            continue
        values, offsets = flat(batch.column(column.name))
        if values.null_count or not len(values):
            continue
        for extreme in EXTREMES[np.dtype(column.type.to_pandas_dtype()).kind]:
            broken = values.to_numpy().copy()
            broken[rng.integers(len(broken))] = extreme
            place = batch.schema.get_field_index(column.name)
            changed = batch.set_column(
                place, batch.schema.field(place), to_list(broken, offsets, column)
            )
            try:
                validate_batch(changed, declared, "structural", rf.Where())
                data = {"source": source(batch)} | statistics_of([changed], Options(ranks=2))
                page(data, sections_of(data))
            except rf.InvariantError as err:
                seen.add(err.code)
    assert "RF-I005" in seen or "RF-I004" in seen
