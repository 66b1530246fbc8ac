"""DistillKit data sets: bits, curves, alignment, unfilled slots."""

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.adapters import _distillkit_codec as codecs
from ragged_format.adapters import _plain_yaml as plain_yaml
from ragged_format.adapters import distillkit
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, UnsupportedFeatureError
from ragged_format.lists import flat, to_numpy

DATA = Path(__file__).parents[1] / "data" / "distillkit"
SETS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
# How far its own values are from the exact decoding: it computes the curve in float32 (its SVD fit
# of t^-8 has coefficients of 10^4), or sums float16 differences.
TOLERANCE = {
    "synth_legacy_k128": 2e-3, "synth_v49152_k50_delta": 1e-2, "synth_v11_k4_small": 0,
    "synth_v49152_k50_exact_f32": 0, "synth_v65536_k3_boundary": 1e-6,
}  # fmt: skip
EXACT = {"synth_v11_k4_small", "synth_v49152_k50_exact_f32", "synth_v65536_k3_boundary"}


@pytest.mark.parametrize("name", SETS)
def test_data_sets_decode_to_what_its_own_code_returns(name):
    report = ConversionReport()
    batch = distillkit.to_samples(distillkit.payloads(str(DATA / name)), report=report)
    rf.validate(batch)
    assert report.unbalanced() == []
    table = pq.read_table(next((DATA / name).glob("*.parquet")))
    assert batch.column("input_ids").to_pylist() == table.column("input_ids").to_pylist()
    # Row t predicts token t + 1: all tokens but the first are scored.
    assert batch.column("completion_mask").to_pylist() == [
        [0] + [1] * (len(ids) - 1) for ids in table.column("input_ids").to_pylist()
    ]
    with np.load(DATA / name / "decompressed.npz") as stored:
        ids, values = stored["ids"], stored["log_probs"]
    k = ids.shape[1]
    assert set(to_numpy(flat(batch.column("teacher_topk_counts")).values)) == {k}
    got = to_numpy(flat(batch.column("teacher_topk_ids")).values).reshape(-1, k)
    np.testing.assert_array_equal(got, ids)
    got = to_numpy(flat(batch.column("teacher_topk_log_probs")).values).reshape(-1, k)
    np.testing.assert_allclose(got, values, rtol=0, atol=TOLERANCE.get(name, 1e-5))
    column = rf.parse_schema(batch.schema)["teacher_topk_log_probs"]
    assert column.approximate == (name not in EXACT)


@pytest.mark.parametrize("name", sorted(EXACT - {"synth_v65536_k3_boundary"}))
def test_exact_data_sets_are_written_back_to_the_byte(name, tmp_path):
    config = plain_yaml.parse((DATA / name / "compression_config.yaml").read_text())
    batch = distillkit.to_samples(distillkit.payloads(str(DATA / name)))
    written = distillkit.write([batch], str(tmp_path / "out"), k=config["k"])
    assert written["sequences"] == batch.num_rows
    theirs = pq.read_table(DATA / name / "data_0.parquet")
    mine = pq.read_table(tmp_path / "out" / "data_0.parquet")
    for column in theirs.schema.names:
        assert mine.column(column).to_pylist() == theirs.column(column).to_pylist(), column
    text = (tmp_path / "out" / "compression_config.yaml").read_text()
    assert plain_yaml.parse(text) == config
    again = distillkit.to_samples(distillkit.payloads(str(tmp_path / "out")))
    assert again.equals(batch)


def test_float64_values_are_rounded_to_float32():
    batch = distillkit.to_samples(distillkit.payloads(str(DATA / "synth_v65536_k3_boundary")))
    table, config = distillkit.from_samples(batch, k=3, exact_dtype="float64")
    theirs = pq.read_table(DATA / "synth_v65536_k3_boundary" / "data_0.parquet")
    assert (
        table.column("bytepacked_indices").to_pylist()
        == theirs.column("bytepacked_indices").to_pylist()
    )  # ids of 16 bits and no 17th
    assert config["exact_dtype"] == "float64"


def rows(ids, values, tokens, k, bits):
    """One sequence, packed by hand: a string of bits, and little-endian float32."""
    packed = []
    for row in ids:
        text = "".join(f"{i:0{bits}b}" for i in row)
        text += "0" * (-len(text) % 8)
        packed.append([int(text[i : i + 8], 2) for i in range(0, len(text), 8)])
    raw = [list(struct.pack(f"<{k}f", *row)) for row in values]
    return pa.record_batch({
        "input_ids": [tokens], "bytepacked_indices": [packed], "compressed_logprobs": [raw]
    })  # fmt: skip


SMALL = {"d": 11, "k": 4, "exact_k": 4, "delta_encoding": False}


def test_hand_computed_bytes():
    """k = 4 of d = 11: four bits an id, two bytes a position."""
    batch = rows([[6, 9, 5, 7]], [[-0.5, -1.5, -2.5, -3.5]], [5, 6], 4, 4)
    assert batch.column("bytepacked_indices").to_pylist() == [[[0x69, 0x57]]]
    got = distillkit.to_samples([{"rows": batch, "config": SMALL}])
    assert got.column("teacher_topk_ids").to_pylist() == [[6, 9, 5, 7]]
    assert got.column("teacher_topk_log_probs").to_pylist() == [[-0.5, -1.5, -2.5, -3.5]]
    assert got.column("teacher_log_probs").to_pylist() == [[-0.5]]
    table, config = distillkit.from_samples(got, k=4)
    assert table.column("bytepacked_indices").to_pylist() == [[[0x69, 0x57]]]
    assert config["k"] == config["exact_k"] == 4


def test_row_t_becomes_the_head_of_token_t_plus_one():
    """vllm-project/vllm#5846, modelscope/ms-swift#8196: three tokens, two rows, there and back."""
    batch = rows([[1, 2], [3, 4]], [[-0.5, -1.5], [-0.25, -2.5]], [7, 1, 3], 2, 4)
    config = {"d": 11, "k": 2, "exact_k": 2, "delta_encoding": False}
    got = distillkit.to_samples([{"rows": batch, "config": config}])
    assert got.column("completion_mask").to_pylist() == [[0, 1, 1]]
    assert got.column("teacher_log_probs").to_pylist() == [[-0.5, -0.25]]
    table, _ = distillkit.from_samples(got, k=2)
    assert (
        table.column("compressed_logprobs").to_pylist()
        == batch.column("compressed_logprobs").to_pylist()
    )


def test_unfilled_slots_are_dropped_whatever_their_id():
    """DistillKit leaves the id of a slot without a rank uninitialised, with -inf beside it."""
    inf = float("inf")
    batch = rows([[6, 15, 15, 6], [1, 14, 2, 14]], [[-0.5, -inf, -inf, -inf], [-inf] * 4],
                 [5, 6, 7], 4, 4)  # fmt: skip
    report = ConversionReport()
    got = distillkit.to_samples([{"rows": batch, "config": SMALL}], report=report)
    rf.validate(got)
    assert got.column("teacher_topk_counts").to_pylist() == [[1, 0]]
    assert got.column("target_flags").to_pylist() == [[0, 16]]
    assert report.head_entries.dropped == {"log_prob_minus_infinity": 7}
    assert report.unbalanced() == []
    table, _ = distillkit.from_samples(got, k=4)
    back = distillkit.to_samples([
        {"rows": table.combine_chunks().to_batches()[0], "config": SMALL}
    ])  # fmt: skip
    assert back.column("teacher_topk_ids").equals(got.column("teacher_topk_ids"))
    bad = rows([[6, 12, 1, 2]], [[-0.5, -1, -2, -3]], [5, 6], 4, 4)
    with pytest.raises(ConversionError, match="outside the vocabulary"):
        distillkit.to_samples([{"rows": bad, "config": SMALL}])


def test_sequences_of_one_position_decode_alone():
    """DistillKit's own decoder fails on them in several layouts."""
    for name in ("synth_v49152_k50_delta", "synth_v151936_k128_recommended_normalized"):
        payload = next(iter(distillkit.payloads(str(DATA / name))))
        whole = distillkit.to_samples([payload])
        for number in range(payload["rows"].num_rows):
            one = payload | {"rows": payload["rows"].slice(number, 1), "first_row": number}
            got = distillkit.to_samples([one])
            expected = rf.take(whole, [number])
            assert got.column("teacher_topk_log_probs").equals(
                expected.column("teacher_topk_log_probs")
            )


def test_packed_sequences_are_cut_at_their_segments():
    """NVIDIA-NeMo/RL#2105: bounds of packed samples were lost, and heads crossed them."""
    batch = rows([[1, 2], [3, 4], [5, 6], [7, 8]], [[-0.5, -1.5]] * 4, [7, 1, 3, 5, 0], 2, 4)
    batch = batch.append_column("attention_mask", pa.array([[1, 1, 2, 2, 0]]))
    config = {"d": 11, "k": 2, "exact_k": 2, "delta_encoding": False}
    report = ConversionReport()
    got = distillkit.to_samples([{"rows": batch, "config": config}], report=report)
    rf.validate(got)
    assert got.column("input_ids").to_pylist() == [[7, 1], [3, 5]]
    assert got.column("teacher_topk_ids").to_pylist() == [[1, 2], [5, 6]]
    assert got.column("sample_id").to_pylist() == ["distillkit/0/0", "distillkit/0/1"]
    assert report.noted["rows_across_segments"] == 1
    assert report.head_entries.dropped == {"padding": 2, "context": 2}
    assert report.unbalanced() == []
    wrong = batch.drop_columns("attention_mask").append_column(
        "attention_mask", pa.array([[1, 1]])
    )  # fmt: skip
    with pytest.raises(ConversionError, match="attention_mask has one entry"):
        distillkit.to_samples([{"rows": wrong, "config": config}])


def test_raw_tables_need_no_configuration():
    batch = pa.record_batch({
        "input_ids": [[5, 6]], "token_ids": [[[6, 1]]], "top_values": [[[-0.5, -1.5]]]
    })  # fmt: skip
    got = distillkit.to_samples([{"rows": batch}], vocab_size=10)
    assert got.column("teacher_topk_ids").to_pylist() == [[6, 1]]


@given(st.data())
def test_fields_of_any_width_are_unpacked(data):
    bits = data.draw(st.integers(1, 64))
    count = data.draw(st.integers(0, 9))
    one = st.integers(0, 2**bits - 1)
    table = data.draw(st.lists(st.lists(one, min_size=count, max_size=count), min_size=1))
    packed = codecs.pack_bits(np.array(table, np.uint64).reshape(len(table), count), bits)
    text = ["".join(f"{value:0{bits}b}" for value in row) for row in table]
    expected = [
        [int(t[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(t), 8)] for t in text
    ]  # fmt: skip
    assert packed.tolist() == expected
    assert codecs.unpack_bits(packed, bits, count).tolist() == table


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_residuals_are_steps_around_zero(bits):
    """The configurations of several bins, decoded by hand."""
    config = {
        "d": 11, "k": 5, "exact_k": 1, "exact_dtype": "float16", "delta_encoding": True,
        "polynomial_terms": [0, "exp"], "term_dtype": "bfloat16", "normalize_t": True,
        "residual_bins": [{"scale_dtype": "float32", "element_bits": bits, "num_elements": 3}],
    }  # fmt: skip
    codec = codecs.read_config(config)
    fields = [0, 2**bits - 1, 1]
    text = "".join(f"{f:0{bits}b}" for f in fields)
    text += "0" * (-len(text) % 8)
    raw = struct.pack("<e", -0.5) + struct.pack("<f", -1.0)[2:] + struct.pack("<f", 0.25)[2:]
    raw += struct.pack("<f", 0.125) + bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
    assert codec.value_bytes == len(raw)
    got = codec.log_probs(np.frombuffer(raw, np.uint8)[None])
    steps = [-1, 1, 1] if bits == 1 else [f - 2 ** (bits - 1) for f in fields]
    curve = [-1 + 0.25 * np.exp(t) for t in (0, 1 / 3, 2 / 3, 1)]
    deltas = [-0.5, *(c + 0.125 * s for c, s in zip(curve, [*steps, 0], strict=True))]
    np.testing.assert_allclose(got[0], np.cumsum(deltas))


def test_the_number_of_bits_is_that_of_distillkit():
    sizes = {11: 4, 16: 4, 17: 5, 49152: 16, 49153: 16, 65536: 16, 65537: 17, 151936: 18}
    assert {size: codecs.index_bits(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    "config",
    [
        {"d": 11, "k": 4}, {"d": 11, "k": 4, "exact_k": 5}, {"d": 0, "k": 4, "exact_k": 4},
        {"d": 11, "k": 4, "exact_k": 4, "exact_dtype": "int8"},
        {"d": 11, "k": 4, "exact_k": 1, "polynomial_terms": ["log"]},
        {"d": 11, "k": 4, "exact_k": 1,
         "residual_bins": [{"scale_dtype": "float16", "element_bits": 65, "num_elements": 3}]},
        {"d": 11, "k": 4, "exact_k": 1,
         "residual_bins": [{"scale_dtype": "float16", "element_bits": 8, "num_elements": 4}]},
        {"vocab_size": 11, "k": 4},
    ],
)  # fmt: skip
def test_configurations_that_are_none_are_refused(config):
    with pytest.raises(ConversionError) as info:
        codecs.read_config(config)
    assert info.value.code == "RF-A002"


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2\n", "a: &x 1\n", "nothing", "- 1\n  b: 2\n", "a: [1, 2]\n",
     "a:\n   b: 1\n  c: 2\n"],
)  # fmt: skip
def test_yaml_beyond_the_plain_part_is_refused(text):
    with pytest.raises(ConversionError, match="plain YAML"):
        plain_yaml.parse(text)


def test_plain_yaml_is_read():
    text = "# note\n---\na: 1.5 # x\nb: 'q'\nc: true\nd:\ne: []\nf:\n  g: x y\nh:\n  - -1\n"
    assert plain_yaml.parse(text) == {
        "a": 1.5, "b": "q", "c": True, "d": None, "e": [], "f": {"g": "x y"}, "h": [-1]
    }  # fmt: skip
    assert plain_yaml.parse("") == {}


def test_mismatched_columns_are_refused(tmp_path):
    good = rows([[6, 9, 5, 7]], [[-0.5, -1.5, -2.5, -3.5]], [5, 6], 4, 4)
    for changed, code in (
        ({"compressed_logprobs": [[[0] * 8]]}, "RF-A006"),
        ({"bytepacked_indices": [[[0, 0], [0, 0]]]}, "RF-A006"),
        ({"input_ids": [[5]]}, "RF-A006"),
    ):
        columns = {name: good.column(name) for name in good.schema.names}
        bad = pa.record_batch(columns | {n: pa.array(v) for n, v in changed.items()})
        with pytest.raises(ConversionError) as info:
            distillkit.to_samples([{"rows": bad, "config": SMALL}])
        assert info.value.code == code
    with pytest.raises(ConversionError, match="has this column"):
        distillkit.to_samples([{"rows": good.drop_columns("input_ids"), "config": SMALL}])
    with pytest.raises(ConversionError, match="not those of DistillKit"):
        distillkit.to_samples([{"rows": good.select(["input_ids"]), "config": SMALL}])
    with pytest.raises(ConversionError, match="no Parquet file"):
        next(distillkit.payloads(str(tmp_path)))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConversionError, match="Parquet files and a configuration"):
        next(distillkit.payloads(str(tmp_path)))


def test_heads_longer_than_k_are_refused():
    """axolotl-ai-cloud/axolotl#2700: a row of K + 1 entries in a table of K."""
    batch = distillkit.to_samples([
        {"rows": rows([[6, 9, 5, 7]], [[-0.5, -1.5, -2.5, -3.5]], [5, 6], 4, 4), "config": SMALL}
    ])  # fmt: skip
    with pytest.raises(ConversionError, match="longer than k"):
        distillkit.from_samples(batch, k=2)
    counts = Counter()
    distillkit.from_samples(batch, k=2, lossy=True, counts=counts)
    assert counts["head_entries_cut"] == 2
    curved = codecs.Codec(11, 4, 1, polynomial_terms=(0, 1))
    with pytest.raises(UnsupportedFeatureError):
        curved.pack_log_probs(np.zeros((1, 4)))
    bare = batch.select(["sample_id", "input_ids", "completion_mask"])
    with pytest.raises(ConversionError, match="holds a teacher's heads"):
        distillkit.from_samples(bare, k=4)


def test_legacy_words_are_packed_as_they_were():
    """Its own writer fails on 16-bit vocabularies, whose words have the top bit set."""
    table = pq.read_table(DATA / "synth_legacy_k128" / "data_0.parquet")
    config = plain_yaml.parse(
        (DATA / "synth_legacy_k128" / "legacy_logit_compression.yaml").read_text()
    )
    codec = codecs.read_config(config)
    words = np.array(table.column("packed_indices")[0].as_py(), np.uint64)
    assert codec.pack_ids(codec.ids(words)).tolist() == words.tolist()
    wide = codecs.LegacyCodec(vocab_size=65536, k=4, exact_k=4, polynomial_degree=0)
    ids = np.array([[1, 2, 3, 65535]])
    packed = wide.pack_ids(ids)
    assert packed.tolist() == [[1 | 2 << 16 | 3 << 32 | 65535 << 48]]
    assert wide.ids(packed).tolist() == ids.tolist()
    curve = codecs.LegacyCodec(65536, 3, 1, 1, invert_polynomial=False, with_sqrt_term=True)
    got = curve.log_probs(np.array([[-1.0]]), np.array([[0.5, -1.0, 2.0]]))
    np.testing.assert_allclose(got, [[-1.0, 0.5 - 1 + 2, 0.5 - 2 + 2 * np.sqrt(2)]])
