"""JSON Schemas of the manifest of a dataset and of the trailer of streams and files."""

from __future__ import annotations

from typing import Any

DRAFT = "https://json-schema.org/draft/2020-12/schema"
DIGEST = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
VERSION = {"type": "string", "pattern": "^[0-9]+\\.[0-9]+$"}
COUNT = {"type": "integer", "minimum": 0}


def _object(title: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "title": title, "type": "object", "required": sorted(properties), "properties": properties,
        **more,
    }  # fmt: skip


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``manifest.json``."""
    shard = _object(
        "Shard",
        {
            "name": {"type": "string", "pattern": "^[^/\\\\]+\\.arrow$",
                     "description": "file in the dataset's directory"},
            "rows": {**COUNT, "description": "records"},
            "bytes": {**COUNT, "description": "size of the file"},
            "digest": {**DIGEST, "description": "running digest of the shard's trailer"},
            "encoding": {"enum": ["hot", "compact"]},
        },
    )  # fmt: skip
    properties = {
        "format_version": VERSION,
        "generation": {"type": "integer", "minimum": 1,
                       "description": "one more with each commit"},
        "profile": {"enum": ["sample", "packed"]},
        "vocab_size": {"type": "integer", "minimum": 1, "maximum": 2**31},
        "schema": {"type": "string", "contentEncoding": "base64",
                   "description": "Arrow schema message, whole, as at the start of a stream"},
        "identity": {**DIGEST, "description": "identity digest of the schema"},
        "shards": {"type": "array", "items": shard},
        "fingerprint": {**DIGEST, "description": "digest of identity and shards"},
        "lineage": {"type": "object", "description": "where the data comes from"},
        "checksum": {**DIGEST, "description": "of the object without this key"},
    }  # fmt: skip
    return {"$schema": DRAFT, **_object("Manifest of a dataset", properties)}


def trailer_schema() -> dict[str, Any]:
    """Return the JSON Schema of the trailer's text."""
    properties = {
        "version": VERSION,
        "schema_digest": DIGEST,
        "batches": {**COUNT, "description": "batches before the trailer"},
        "rows": {**COUNT, "description": "their records"},
        "rows_per_batch": {"type": "array", "items": COUNT},
        "digest": {**DIGEST, "description": "running digest"},
    }
    return {"$schema": DRAFT, **_object("Trailer of a stream or file", properties)}
