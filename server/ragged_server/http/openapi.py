"""The OpenAPI document: FastAPI's of its routes, and the routes of samples with binary bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from ragged_server.http.ingest import ARROW, sources
from ragged_server.http.problems import MEDIA_TYPE, STATUSES
from ragged_server.settings import ServerSettings

__all__ = ["describe"]

_POLICIES = ["error", "flag", "full_vocab", "drop_target", "drop_sample"]
# Of every route: the gate, the header and the server itself.
_ANY = (400, 408, 421, 431, 500, 503)
_INTEGER = {"type": "integer", "format": "int64"}


def describe(app: FastAPI, settings: ServerSettings) -> None:
    """Make the application answer the whole document at ``/openapi.json``."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            document["paths"]["/v1/samples"] = _samples(settings)
            _finish(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _samples(settings: ServerSettings) -> dict[str, Any]:
    return {"post": _post(settings), "get": _get(settings)}


def _post(settings: ServerSettings) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    engine = {"schema": {"$ref": "#/components/schemas/EngineRecord"}}
    lines = {"schema": {"type": "string"}}
    return {
        "tags": ["samples"],
        "operationId": "append",
        "summary": "Store samples, all of a request or none",
        "description": "Answered when the records are on disk. A sample_id with the same content "
        "is a duplicate and stored once; with other content it refuses the request.",
        "parameters": [
            _query("source", {"type": "string", "enum": sources()}, "Whose JSON the body is."),
            _query("vocab_size", {**_INTEGER, "minimum": 1, "maximum": 1 << 31}, "Of the model; needed for JSON while the log has no schema."),  # noqa: E501
            _query("logprobs_mode", {"type": "string", "enum": ["processed", "raw"]}, "What the engine's log-probs are."),  # noqa: E501
            _query("on_missing_support", {"type": "string", "enum": _POLICIES}, "Where a candidate set was asked for and is lost."),  # noqa: E501
            _query("on_invalid_support", {"type": "string", "enum": _POLICIES}, "Where a candidate set contradicts itself."),  # noqa: E501
            _header("Content-Encoding", {"type": "string", "enum": ["identity", "zstd"]}, "Coding of the body."),  # noqa: E501
            _header("Idempotency-Key", {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}, "Names the request; a repeated one gets the first answer."),  # noqa: E501
        ],
        "requestBody": {
            "required": True,
            "description": f"At most {int(settings.max_request_bytes)} bytes as sent.",
            "content": {ARROW: binary, "application/json": engine, "application/x-ndjson": lines},
        },
        "responses": {
            "201": _stored("Records were stored; they are on disk."),
            "200": _stored("Nothing new: all were duplicates, or the request was answered before."),
            **_problems(401, 403, 409, 413, 415, 422, 429, 501, 507),
        },
    }  # fmt: skip


def _get(settings: ServerSettings) -> dict[str, Any]:
    headers = {
        "Ragged-Cursor": {"description": "Where to read on.", "schema": {"type": "string"}},
        "Ragged-Records": {"description": "Records of the answer.", "schema": _INTEGER},
        "Ragged-Lag": {"description": "Records after the cursor.", "schema": _INTEGER},
    }
    return {
        "tags": ["samples"],
        "operationId": "read",
        "summary": "Read samples after a cursor, as an Arrow stream",
        "description": "An answer is whole if the stream's trailer is there.",
        "parameters": [
            _query("after", {"type": "string", "maxLength": 512}, "Cursor; absent: the oldest."),
            _query("wait", {"type": "number", "minimum": 0, "maximum": 1e9}, f"Seconds to wait for records, at most {settings.max_wait_s:g}."),  # noqa: E501
            _query("max_bytes", {**_INTEGER, "minimum": 1}, f"Size of the answer, at most {int(settings.max_page_bytes)}."),  # noqa: E501
            _query("rank", {**_INTEGER, "minimum": 0}, "Share of the records."),
            _query("world_size", {**_INTEGER, "minimum": 1, "maximum": 1 << 20}, "Number of shares."),  # noqa: E501
            _query("min_policy_version", _INTEGER, "Older records are left out."),
        ],
        "responses": {
            "200": {
                "description": "Records, none if nothing is new.",
                "headers": headers,
                "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
            },
            "204": {"description": "The log has no schema yet.", "headers": headers},
            **_problems(401, 403, 406, 410),
        },
    }  # fmt: skip


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}


def _stored(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "headers": {"Ragged-Cursor": {"schema": {"type": "string"}}},
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Stored"}}},
    }


def _problems(*statuses: int) -> dict[str, Any]:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {str(status): {"description": STATUSES[status], "content": content}
            for status in statuses}  # fmt: skip


_SCHEMAS: dict[str, Any] = {
    "Stored": {
        "type": "object",
        "required": ["first_sequence", "stored", "duplicates", "cursor", "replayed"],
        "properties": {
            "first_sequence": {**_INTEGER, "description": "Of the first stored record."},
            "stored": {**_INTEGER, "description": "New records."},
            "duplicates": {**_INTEGER, "description": "Records that were there already."},
            "cursor": {"type": "string", "description": "Position after the request's records."},
            "replayed": {"type": "boolean", "description": "Answered from the Idempotency-Key."},
            "conversion": {"type": "object", "description": "What became of engine JSON."},
        },
    },
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "detail", "code", "errors", "request_id"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "instance": {"type": "string"},
            "code": {"type": "string", "pattern": "^RF-[A-Z][0-9]{3}$"},
            "errors": {"type": "array", "items": {"type": "object"}},
            "request_id": {"type": "string"},
            "limits": {"type": "object", "additionalProperties": {"type": "number"}},
            "retry_after_s": {"type": "number"},
            "oldest": {"type": "string"},
        },
    },
    "EngineRecord": {
        "description": "A record with request and response, a response alone, or a list of them.",
        "oneOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
    },
}  # fmt: skip


def _finish(document: dict[str, Any]) -> None:
    """Give every operation the answers that all may have, and the document its parts."""
    document.setdefault("components", {}).setdefault("schemas", {}).update(_SCHEMAS)
    document["components"]["schemas"].pop("HTTPValidationError", None)
    document["components"]["schemas"].pop("ValidationError", None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            if path != "/v1/samples":
                responses.pop("422", None)  # FastAPI's own form of a refusal, which is not used
            if path.startswith("/v1/") or path == "/metrics":
                operation["security"] = [{"key": []}, {}]
                responses |= _problems(401, 403)
            if "{" in path:
                responses |= _problems(404)
            responses |= _problems(*_ANY)
