"""TransferQueue: its packed messages byte for byte, batches of nested rows, and no pickles."""

import pickle
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.adapters import transfer_queue
from ragged_format.adapters.report import ConversionReport
from ragged_format.adapters.transfer_queue import Jagged
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal

DATA = Path(__file__).parents[1] / "data" / "transfer_queue"
VOCAB = 49152
SETS = ["candidate_counts", "candidate_ids", "rollout_log_probs", "advantage", "group_id"]
PLAIN = (
    "input_ids", "response_mask", "rollout_log_probs", "sampling_mask_ids",
    "sampling_mask_counts", "advantage", "group_id",
)  # fmt: skip


def packed():
    return (DATA / "samples_packed.bin").read_bytes()


def messages():
    return list(transfer_queue.payloads(str(DATA / "samples_packed.bin")))


def converted(payloads, vocab_size=12, **options):
    report = ConversionReport()
    batch = transfer_queue.to_samples(payloads, vocab_size=vocab_size, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


def sample(**changes):
    return {
        "uid": "a",
        "input_ids": np.array([5, 6, 7]),
        "response_mask": np.array([0, 1, 1]),
        "rollout_log_probs": np.array([0, -0.5, 0], np.float32),
        "sampling_mask_ids": np.array([2, 6, 7], np.int32),
        "sampling_mask_counts": np.array([0, 2, 1], np.int32),
        "teacher_topk_ids": np.array([[-1, -1], [6, 3], [7, -1]]),
        "teacher_topk_logprobs": np.array(
            [[-np.inf] * 2, [-0.5, -1.5], [-0.25, -np.inf]], np.float32
        ),
    } | changes


def test_messages_come_back_byte_for_byte():
    found = messages()
    assert b"".join(transfer_queue.encode(transfer_queue.decode(m)) for m in found) == packed()


def test_messages_hold_the_recorded_values():
    expected = np.load(DATA / "values.npz")
    for row, message in enumerate(map(transfer_queue.decode, messages())):
        for key, value in message.items():
            if key == "uid":
                assert value == expected["uid"][row]
            elif f"{key}.values" in expected:
                part = slice(*expected[f"{key}.offsets"][row : row + 2])
                np.testing.assert_array_equal(value, expected[f"{key}.values"][part])
                assert value.dtype == expected[f"{key}.values"].dtype
                assert not value.flags.writeable
            else:
                assert value == expected[key][row]


def test_samples_come_back():
    batch, report = converted(messages(), VOCAB, columns=SETS)
    assert batch.column("sample_id").to_pylist() == ["u3", "u7", "u16"]
    # The teacher's columns were not asked for.
    assert set(report.head_entries.dropped) == {"column_not_wanted", "token_not_scored"}
    for mine, message in zip(transfer_queue.from_samples(batch), messages(), strict=True):
        theirs = transfer_queue.decode(message)
        for name in PLAIN:
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])
        assert mine["uid"] == theirs["uid"]


def test_heads_that_are_no_distribution_are_refused():
    """axolotl-ai-cloud/axolotl#2692: a mass above 1 would give a negative loss."""
    with pytest.raises(ConversionError, match="RF-A007"):
        converted(messages(), VOCAB)


def test_teacher_heads_come_back():
    batch, report = converted([sample()])
    assert batch.column("teacher_topk_counts").to_pylist() == [[2, 1]]
    assert batch.column("teacher_topk_ids").to_pylist() == [[6, 3, 7]]
    assert report.head_entries.stored == 3
    lost = sample(uid="b", sampling_mask_counts=np.array([0, 3, 0]), sampling_mask_ids=[2, 6, 7])
    part, report = converted([sample(), lost], on_missing_support="drop_target")
    assert part.column("teacher_topk_counts").to_pylist() == [[2, 1], [2]]
    assert report.head_entries.dropped == {"target_dropped": 1}
    (back,) = transfer_queue.from_samples(batch)
    for name, value in sample().items():
        np.testing.assert_array_equal(back[name], value)
    with pytest.raises(ConversionError, match="wider than the table"):
        transfer_queue.from_samples(batch, top_k=1)
    assert transfer_queue.from_samples(batch, top_k=4)[0]["teacher_topk_ids"].shape == (3, 4)


def test_files_come_back_byte_for_byte(tmp_path):
    batch, _ = converted([sample(), sample(uid="b")])
    counts = transfer_queue.write([batch], str(tmp_path / "a"))
    assert counts == {"samples": 2, "bytes": (tmp_path / "a").stat().st_size}
    again, _ = converted(transfer_queue.payloads(str(tmp_path / "a")))
    assert_ragged_equal(again, batch)
    transfer_queue.write([again], str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Batches whose rows are of equal length, of one row, and with an empty row stay rows:
# volcengine/verl#6407, #6073.
LENGTHS = {"equal": [3, 3], "one": [3], "different": [2, 3], "one empty": [0, 3]}


def nested(lengths):
    rows = []
    for number, length in enumerate(lengths):
        mask = np.array([0, 1, 1])[:length]
        counts = np.array([0, 2, 1], np.int32)[:length]
        rows.append({
            "uid": f"u{number}", "input_ids": np.array([5, 6, 7])[:length], "response_mask": mask,
            "sampling_mask_counts": counts,
            "sampling_mask_ids": np.array([2, 6, 7], np.int32)[: counts.sum()],
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_batches_of_nested_rows(lengths):
    """volcengine/verl#6407, #6073: rows stay rows whatever their lengths."""
    rows = nested(lengths)
    expected, _ = converted(rows)
    names = [name for name in rows[0] if name != "uid"]
    jagged = {name: Jagged(row[name] for row in rows) for name in names}
    uids = {"uid": [row["uid"] for row in rows]}
    marked = {"__tq_tensordict__": True, "batch_size": [len(rows)], "data": jagged | uids}
    message = transfer_queue.encode(marked)
    assert transfer_queue.encode(transfer_queue.decode(message)) == message
    tensors = {
        name: torch.nested.as_nested_tensor(
            [torch.from_numpy(row[name]) for row in rows], layout=torch.jagged
        )
        for name in names
    }
    for form in (jagged | uids, marked, message, tensors | uids):
        assert_ragged_equal(converted([form])[0], expected)


def test_pickled_objects_are_refused():
    class Attack:
        def __reduce__(self):
            return (print, ("run",))

    def message(code, body):
        item = msgspec.msgpack.encode({"input_ids": msgspec.msgpack.Ext(code, body)})
        return struct.pack("<III", 1, 12, len(item)) + item

    for code in (1, 2, 3):
        with pytest.raises(ConversionError, match="RF-A002"):
            transfer_queue.decode(message(code, pickle.dumps(Attack())))
    whole = struct.pack("<III", 1, 12, 3) + b"\xc1\xfe\xed"
    with pytest.raises(ConversionError, match="pickled message"):
        transfer_queue.decode(whole)


@pytest.mark.parametrize("cut", [1, 3, 40, 100, 5000, -1])
def test_cut_files_are_errors(cut, tmp_path):
    place = tmp_path / "cut.bin"
    place.write_bytes(packed()[:cut])
    with pytest.raises(ConversionError, match="RF-A002"):
        [transfer_queue.decode(m) for m in transfer_queue.payloads(str(place))]


def test_types_that_numpy_lacks_are_errors():
    """A bfloat16 column is refused by name."""
    body = pickle.dumps(("bfloat16", (1,), 1), protocol=5)
    item = msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(3, body)})
    begin = 4 + 2 * 8
    table = struct.pack("<IIIII", 2, begin, len(item), begin + len(item), 2)
    with pytest.raises(ConversionError, match="bfloat16"):
        transfer_queue.decode(table + item + b"\0\0")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"input_ids": None}, "RF-A002"),
        ({"response_mask": None}, "RF-A002"),
        ({"response_mask": np.array([0, 1])}, "RF-A006"),
        ({"response_mask": np.array([1, 1, 1])}, "RF-A006"),
        ({"sampling_mask_ids": None}, "RF-A002"),
        ({"sampling_mask_counts": np.array([0, 2, 2])}, "RF-A006"),
        ({"sampling_mask_counts": np.array([0, 4, -1])}, "RF-A002"),
        ({"sampling_mask_counts": np.array([0, 3, 0])}, "RF-A004"),
        ({"sampling_mask_ids": np.array([2, 3, 7])}, "RF-A005"),
        ({"teacher_topk_ids": np.array([[-1, -1]])}, "RF-A006"),
        ({"teacher_topk_ids": np.array([[-1, -1], [6, 99], [7, -1]])}, "RF-A005"),
    ],
)
def test_contradictions_are_errors(change, code):
    with pytest.raises(ConversionError) as caught:
        converted([sample(**change)])
    assert caught.value.code == code
