"""Compact files, read by the words of the specification (§5.5) with plain Arrow and lists."""

import base64
import json

import numpy as np
import pyarrow as pa

import ragged_format as rf
from ragged_format.compact.files import CompactWriter
from ragged_format.testing import rollouts


def block(encoded, header, name):
    """The values of a block, without its transform."""
    size, dtype, planes, _ = header["blocks"][name]
    data = encoded[name][0].as_py()
    stored = iter([data[i : i + size] for i in range(0, len(data), size or 1)])
    columns = [[p] * size if p is not None else list(next(stored)) for p in planes]
    raw = b"".join(bytes(element) for element in zip(*columns, strict=True))
    return np.frombuffer(raw, dtype).tolist()


def sets(stored, order, counts, sampled):
    out, values = [], iter(stored)
    for count, token in zip(counts, sampled, strict=True):
        ids, rank = [], 0
        for _ in range(max(count - 1, 0)):
            rank += next(values)
            ids.append(order[rank])
        out += sorted([*ids, token]) if count else []
    return out


def iter_sets(values, counts):
    """The values of each target."""
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in counts]


def test_a_compact_file_is_what_the_specification_says(tmp_path):
    data = rollouts(np.random.default_rng(3), num_samples=5, prompt_length=6, response_length=9)
    writer = CompactWriter(tmp_path / "x.arrow", data.schema)
    writer.write(data)
    writer.close()
    file = pa.ipc.open_file(pa.memory_map(str(tmp_path / "x.arrow")))
    metadata = file.schema.metadata
    assert json.loads(metadata[b"ragged_format:required_features"]) == ["compact"]
    message = base64.b64decode(metadata[b"ragged_format:schema"])
    assert pa.ipc.read_schema(pa.py_buffer(message)).equals(data.schema, check_metadata=True)
    assert file.num_record_batches == 2
    encoded, custom = file.get_batch_with_custom_metadata(0)
    assert custom[b"ragged_format:digest"].decode() == rf.digest(data).hex()
    assert file.get_batch(1).num_rows == 0
    header = json.loads(encoded["header"][0].as_py())
    assert header["rows"] == 5
    records = pa.ipc.open_stream(encoded["record"][0].as_py()).read_next_batch()
    assert records["sample_id"].equals(data["sample_id"])
    assert block(encoded, header, "axis:token") == [len(ids) for ids in data["input_ids"]]
    flat = {
        name.removeprefix("column:"): block(encoded, header, name)
        for name in header["blocks"]
        if name.startswith("column:")
    }
    assert header["blocks"]["column:candidate_ids"][3] == "ranks"
    assert header["blocks"]["order:candidate_ids"][3] == "differences"
    order = np.cumsum(block(encoded, header, "order:candidate_ids")).tolist()
    pairs = zip(flat["input_ids"], flat["completion_mask"], strict=True)
    sampled = [token for token, scored in pairs if scored]
    flat["candidate_ids"] = sets(flat["candidate_ids"], order, flat["candidate_counts"], sampled)
    members = iter_sets(flat["candidate_ids"], flat["candidate_counts"])
    assert header["blocks"]["column:topk_ids"][3] == "positions:candidate"
    heads = [
        [s[v] if v < len(s) else v - len(s) for v in head]
        for head, s in zip(iter_sets(flat["topk_ids"], flat["topk_counts"]), members, strict=True)
    ]
    flat["topk_ids"] = [i for head in heads for i in head]
    assert header["blocks"]["column:rollout_log_probs"][3] == "shared:topk"
    log_probs = iter_sets(flat["topk_log_probs"], flat["topk_counts"])
    rest = iter(flat["rollout_log_probs"])
    flat["rollout_log_probs"] = [
        own[head.index(token)] if token in head else next(rest)
        for token, head, own in zip(sampled, heads, log_probs, strict=True)
    ]
    for name, values in flat.items():
        assert values == [v for row in data[name].to_pylist() for v in row], name
