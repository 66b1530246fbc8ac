"""Routes of the page: its files, and the JSON that only it needs."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from ragged_server.http.browse import record_json, summaries
from ragged_server.http.context import Context
from ragged_server.http.errors import NotFoundError
from ragged_server.http.problems import MEDIA_TYPE, STATUSES
from ragged_server.http.routes import context_of, known_parameters, require
from ragged_server.http.texts import Texts
from ragged_server.store.cursors import encode_cursor
from ragged_server.store.seal import LINEAGE_KEY, current_manifest
from ragged_server.store.shards import ShardFacts

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.manifest import Shard

__all__ = ["router", "texts_of"]

router = APIRouter()

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FILES = (
    "index.html", "style.css", "app.js", "api.js", "charts.js", "dom.js", "overview.js",
    "browser.js", "record.js", "icon.svg",
)  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_GUARDS = [Depends(require("read")), Depends(known_parameters)]
_MOST_RECORDS = 100
_MOST_TOKENS = 1024
# Read at a time to list records.
_LIST_BYTES = 4 << 20
_MOST_SEQUENCE = (1 << 63) - 1
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": STATUSES[status],
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status in (401, 403, 404, 410)
}


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its entity tag."""
    content = (files(__package__) / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _answer_file(request: Request, name: str) -> Response:
    content, tag = _file(name)
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Answer the page."""
    return _answer_file(request, "index.html")


@router.get("/page/{name}", include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    """Answer a file of the page."""
    if name not in _FILES:
        raise NotFoundError("there is nothing at this path", got=f"/page/{name[:100]}")
    return _answer_file(request, name)


def _json(value: Any) -> Response:
    # orjson writes NaN and infinities as null.
    return Response(
        orjson.dumps(value), media_type="application/json", headers={"Cache-Control": "no-store"}
    )


texts_of = cache(Texts)


def _texts(context: Context) -> Texts:
    texts: Texts = texts_of(context.settings.tokenizer)
    return texts


@router.get(
    "/v1/browse", tags=["page"], summary="Records in short, one after the other",
    dependencies=_GUARDS, responses=_PROBLEMS,
)  # fmt: skip
def browse(
    request: Request,
    sequence: Annotated[
        int | None,
        Query(ge=0, le=_MOST_SEQUENCE, description="Of the first record; absent: the last ones."),
    ] = None,
    count: Annotated[int, Query(ge=1, le=_MOST_RECORDS, description="Most records.")] = 25,
) -> Response:
    """Answer up to `count` records in the order of the log, and where the log begins and ends."""
    context = context_of(request)
    status = context.store.status()
    oldest, end = status.oldest_sequence, status.next_sequence
    place = max(oldest, end - count if sequence is None else sequence)
    records: list[dict[str, Any]] = []
    while place < end and len(records) < count:
        page = context.store.read(
            encode_cursor(bytes.fromhex(status.log_id), place), max_bytes=_LIST_BYTES
        )
        for batch in page.batches:
            records += summaries(batch.slice(0, count - len(records)), place)
            place += batch.num_rows
        if not page.batches:
            break
    return _json(
        {
            "oldest": oldest, "next": end, "records": records, "has_texts": bool(_texts(context)),
        }
    )  # fmt: skip


@router.get(
    "/v1/browse/{sequence}", tags=["page"], summary="One record, a window of its tokens",
    dependencies=_GUARDS, responses=_PROBLEMS,
)  # fmt: skip
def browse_record(
    request: Request,
    sequence: Annotated[int, Path(ge=0, le=_MOST_SEQUENCE, description="Of the record.")],
    start: Annotated[
        int | None,
        Query(ge=0, le=1 << 31, description="First token; absent: where scored ones begin."),
    ] = None,
    count: Annotated[int, Query(ge=1, le=_MOST_TOKENS, description="Tokens of the window.")] = 256,
) -> Response:
    """Answer the record with this sequence: its values, and those of some of its tokens."""
    context = context_of(request)
    batch = _record(context, sequence)
    found = record_json(batch, sequence, start=start, count=count, texts=_texts(context))
    return _json(found)


def _record(context: Context, sequence: int) -> pa.RecordBatch:
    status = context.store.status()
    if status.oldest_sequence <= sequence < status.next_sequence:
        cursor = encode_cursor(bytes.fromhex(status.log_id), sequence)
        for batch in context.store.read(cursor, max_bytes=1).batches:
            return batch.slice(0, 1)
    raise NotFoundError(
        "there is no record with this sequence", got=sequence,
        expected=f"{status.oldest_sequence} <= sequence < {status.next_sequence}",
    )  # fmt: skip


@router.get(
    "/v1/shards", tags=["page"], summary="Sealed shards of the dataset, newest first",
    dependencies=_GUARDS, responses=_PROBLEMS,
)  # fmt: skip
def shards(
    request: Request,
    count: Annotated[int, Query(ge=1, le=1000, description="Most shards.")] = 50,
) -> Response:
    """Answer the last shards that the manifest lists, and how many there are."""
    manifest = current_manifest(context_of(request).settings.directory)
    if manifest is None:
        return _json({"total": 0, "generation": None, "shards": []})
    facts = manifest.lineage.get(LINEAGE_KEY, {}).get("shards", {})
    return _json(
        {
            "total": len(manifest.shards),
            "generation": manifest.generation,
            "shards": [
                _shard(shard, facts.get(shard.name)) for shard in manifest.shards[: -count - 1 : -1]
            ],
        }
    )


def _shard(shard: Shard, facts: list[Any] | None) -> dict[str, Any]:
    known = None if facts is None else ShardFacts(*facts)
    return {
        **shard.to_json(),
        "first_sequence": None if known is None else known.first_sequence,
        "policy_version": None if known is None else known.policy_version,
        "age_s": None if known is None else max(0.0, time.time() - known.last_s),
    }
