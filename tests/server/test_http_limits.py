"""What is too large is refused before memory is spent on it."""

import struct
import tracemalloc

import pyarrow as pa
import pytest
import zstandard
from support.http_server import ARROW, SCHEMA, batch, client, post, stream

import ragged_format as rf
from ragged_server.http.errors import BusyError
from ragged_server.http.limits import Budget


def problem(answer):
    data = answer.json()
    return answer.status_code, data["code"], list(data.get("limits", {}))


@pytest.mark.parametrize(
    ("option", "value", "body"),
    [
        ("max_request_bytes", 1000, stream(batch("a"))),
        ("max_request_records", 2, stream(batch("a", "b", "c"))),
        ("max_request_records", 2, stream(batch("a", "b"), batch("c"))),
        ("max_request_batches", 2, stream(batch("a"), batch("b"), batch("c"))),
        ("max_request_batches", 2, stream(batch("a"), batch(), batch())),
        ("max_request_tokens", 8, stream(batch("a", "b", "c"))),
        ("max_request_tokens", 5, stream(batch("a"), batch("b"))),
        ("max_record_tokens", 5, stream(batch("a"), batch("b", tokens=6))),
        ("max_set_width", 1, stream(batch("a"))),
    ],
)
def test_every_limit_is_named_with_its_value(tmp_path, option, value, body):
    options = {option: value}
    if option == "max_request_tokens":
        options["max_record_tokens"] = value
    with client(tmp_path, **options) as c:
        answer = post(c, body)
        assert problem(answer) == (413, "RF-H008", [option])
        assert answer.json()["limits"][option] == value
        assert c.store.rows == []
        assert c.context.budget.used == 0


def test_what_is_just_within_the_limits_is_taken(tmp_path):
    body = stream(batch("a", "b"), batch("c"))
    options = {
        "max_request_bytes": len(body), "max_request_records": 3,
        "max_request_batches": 2, "max_request_tokens": 9,
        "max_record_tokens": 3, "max_set_width": 2,
    }  # fmt: skip
    with client(tmp_path, **options) as c:
        assert post(c, body).status_code == 201


def test_a_chunked_body_is_cut_at_the_limit(tmp_path):
    sent = []

    def chunks():
        for _ in range(100):
            sent.append(1)
            yield bytes(1000)

    with client(tmp_path, max_request_bytes=5000) as c:
        assert problem(post(c, chunks())) == (413, "RF-H008", ["max_request_bytes"])
        assert c.context.budget.used == 0


def compressed(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("has_size", [True, False], ids=["sized", "unsized"])
def test_zstd_bodies_are_taken(tmp_path, level, has_size):
    body = compressed(stream(batch("a", "b")), level=level, write_content_size=has_size)
    with client(tmp_path) as c:
        assert post(c, body, content_encoding="zstd").json()["stored"] == 2


def test_several_zstd_frames_are_one_body(tmp_path):
    body = stream(batch("a", "b"))
    with client(tmp_path) as c:
        frames = b"".join(compressed(body[at : at + 100]) for at in range(0, len(body), 100))
        assert post(c, frames, content_encoding="zstd").json()["stored"] == 2


LIMIT = 1 << 20


def bombs():
    """Small bodies that say, or become, much; with the coding they come in."""
    zeros = compressed(bytes(64 << 20), level=19)
    yield "zstd-zeros", zeros, "zstd"
    head = stream(schema=SCHEMA)[:-8]
    yield "zstd-endless-stream", compressed(head + bytes(64 << 20)), "zstd"
    yield "zstd-large-stream", compressed(stream(batch("a", tokens=100_000))), "zstd"
    yield "zstd-twice", compressed(zeros), "zstd"
    yield "zstd-long-window", compressed_long(stream(batch("a"))), "zstd"
    for size in (1 << 20, 1 << 31, 1 << 45, (1 << 63) - 1, -1):
        yield f"body-length-{size}", lying(size), None
        yield f"body-length-{size}-zstd", compressed(lying(size)), "zstd"
    yield "metadata-length", b"\xff\xff\xff\xff" + struct.pack("<i", 60 << 20), None
    yield "ipc-compressed", ipc_bomb(), None
    yield "ipc-compressed-zstd", compressed(ipc_bomb()), "zstd"


def compressed_long(data):
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def lying(size):
    """A stream whose batch message declares a body of another size."""
    data = bytearray(stream(batch("a")))
    message = pa.RecordBatch.from_pylist([], schema=SCHEMA)
    start = len(SCHEMA.serialize())
    assert message.num_rows == 0
    real = struct.pack("<q", true_body_bytes(data, start))
    at = data.index(real, start)
    data[at : at + 8] = struct.pack("<q", size)
    return bytes(data)


def true_body_bytes(data, start):
    from ragged_format.flatbuffer import parse_header, prefix_size

    size = prefix_size(bytes(data[start : start + 8]))
    return parse_header(bytes(data[start + 8 : start + 8 + size])).body_bytes


def ipc_bomb():
    """A batch whose buffers are compressed: kilobytes that become megabytes."""
    record = batch("a", tokens=100_000)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        digest = rf.digest(record).hex()
        writer.write_batch(record, custom_metadata={"ragged_format:digest": digest})
    return sink.getvalue().to_pybytes()


BOMBS = {name: (body, coding) for name, body, coding in bombs()}


# Buffers may outlive a test, and a pool must outlive its buffers.
POOLS = []


@pytest.fixture
def peak():
    """Returns the most bytes that Arrow and Python have held since the test began."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield lambda: pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


STATUS = {
    "zstd-zeros": (400, "RF-S001"),
    "zstd-large-stream": (413, "RF-H008"),
    "zstd-twice": (400, "RF-V002"),
    "zstd-endless-stream": (400, "RF-C001"),
    "zstd-long-window": (400, "RF-C001"),
    "body-length-1048576": (413, "RF-H008"),
    "body-length-2147483648": (413, "RF-H008"),
    "body-length-35184372088832": (413, "RF-H008"),
    "body-length-9223372036854775807": (413, "RF-H008"),
    "body-length--1": (400, "RF-C001"),
    "metadata-length": (413, "RF-H008"),
    "ipc-compressed": (413, "RF-H008"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_lying_lengths_cost_nothing(tmp_path, name, peak):
    body, coding = BOMBS[name]
    options = {
        "max_request_bytes": "1MiB", "max_decoded_bytes": LIMIT, "max_json_bytes": LIMIT,
        "max_in_flight_bytes": "4MiB",
    }  # fmt: skip
    with client(tmp_path, **options) as c:
        post(c, stream(batch("warm")))
        tracemalloc.clear_traces()
        headers = {} if coding is None else {"content-encoding": coding}
        answer = post(c, body, **headers)
        assert problem(answer)[:2] == STATUS[name.removesuffix("-zstd")], answer.text
        assert peak() <= 3 * LIMIT + len(body)
        assert c.context.budget.used == 0
        assert len(c.store.rows) == 1


def test_the_json_limit_counts_decompressed_bytes(tmp_path):
    with client(tmp_path, max_json_bytes=1000) as c:
        for body, coding in ((b" " * 1001, "identity"), (compressed(b" " * 5000), "zstd")):
            answer = c.post(
                "/v1/samples?source=vllm&vocab_size=10", content=body,
                headers={"content-type": "application/json", "content-encoding": coding},
            )  # fmt: skip
            assert problem(answer) == (413, "RF-H008", ["max_json_bytes"])


def test_when_the_budget_is_used_up_bodies_wait_outside(tmp_path):
    body = stream(batch("a"))
    options = {
        "max_request_bytes": len(body), "max_decoded_bytes": "1MiB", "max_json_bytes": "1MiB",
        "max_in_flight_bytes": "1MiB",
    }  # fmt: skip
    with client(tmp_path, **options) as c:
        with c.context.budget.reserve((1 << 20) - len(body) + 1):
            answer = post(c, body)
            assert problem(answer)[:2] == (503, "RF-H014")
            assert int(answer.headers["retry-after"]) >= 1
        assert post(c, body).status_code == 201


def test_a_chunked_body_reserves_the_cap(tmp_path):
    with client(tmp_path, max_request_bytes="1MiB") as c:
        limit = c.context.budget.total
        with c.context.budget.reserve(limit - (1 << 20) + 1):
            body = stream(batch("a"))
            assert post(c, iter([body])).status_code == 503
            assert post(c, body).status_code == 201


def test_what_decompression_makes_is_in_the_budget(tmp_path):
    body = stream(batch("a", tokens=10_000))
    with client(tmp_path) as c:
        packed = compressed(body)
        room = len(packed) + len(body) // 2
        with c.context.budget.reserve(c.context.budget.total - room):
            assert problem(post(c, packed, content_encoding="zstd"))[:2] == (503, "RF-H014")
        assert c.context.budget.used == 0
        assert post(c, packed, content_encoding="zstd").status_code == 201


def test_a_budget_gives_nothing_twice():
    budget = Budget(10)
    first = budget.reserve(4)
    second = budget.reserve(6)
    with pytest.raises(BusyError):
        budget.reserve(1)
    first.grow(0)
    with pytest.raises(BusyError):
        first.grow(1)
    second.release()
    second.release()
    assert budget.used == 4
    first.shrink(1)
    first.shrink(3)
    assert budget.used == 1


@pytest.mark.parametrize("length", ["-1", "abc", "1" * 30, "+5", "1.5"])
def test_a_malformed_content_length_is_refused(tmp_path, length):
    with client(tmp_path) as c:
        headers = {"content-type": ARROW, "content-length": length}
        answer = c.post("/v1/samples", content=b"", headers=headers)
        assert answer.status_code in (400, 413)
