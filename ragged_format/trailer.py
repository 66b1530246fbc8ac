"""What every stream and file carries besides Arrow's own framing: batch digests and the trailer.

Each record batch message has custom metadata with ``ragged_format:digest``, the batch digest
(:mod:`ragged_format.digest`) as 32 hexadecimal digits. Its writer may add other keys, for instance
a cursor; keys in this format's namespace are reserved.

The last batch of every stream and file is the **trailer**: a batch without rows whose custom
metadata has exactly two keys:

* ``ragged_format:trailer``: canonical JSON (:func:`ragged_format.digest.canonical_json`) of an
  object with ``version`` (of the format, "MAJOR.MINOR"), ``schema_digest`` (hexadecimal),
  ``batches`` (number of batches before the trailer), ``rows_per_batch`` (list of their records),
  ``rows`` (the sum) and ``digest``, the running digest;
* ``ragged_format:trailer_checksum``: xxh3-128 of that JSON text, as 32 hexadecimal digits.

The **running digest** is xxh3-128 over, for every batch in order: its digest (16 bytes); u32
little-endian number of its other metadata keys; then, sorted by key bytes, each key and each value
as u32 little-endian length and bytes.

A plain Arrow reader sees the trailer as one more batch, without rows. This format's readers never
return it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ragged_format.arguments import check_mapping
from ragged_format.digest import text_digest
from ragged_format.errors import (
    ChecksumError,
    CorruptError,
    SchemaMismatchError,
    UnsupportedVersionError,
)
from ragged_format.parse import check_major, is_version
from ragged_format.schema import FORMAT_VERSION, NAMESPACE

__all__ = ["DIGEST_KEY", "TRAILER_KEY", "Tally", "Trailer", "batch_metadata", "user_metadata"]

Metadata = Mapping[bytes, bytes]

DIGEST_KEY = f"{NAMESPACE}digest".encode()
TRAILER_KEY = f"{NAMESPACE}trailer".encode()
CHECKSUM_KEY = f"{NAMESPACE}trailer_checksum".encode()
_VERSION = ".".join(map(str, FORMAT_VERSION))
_u32 = struct.Struct("<I").pack
_NO_METADATA = bytes(4)
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the end of a stream or file states about the whole.

    Attributes
    ----------
    schema_digest : str
        Digest of the schema, 32 hexadecimal digits.
    rows_per_batch : tuple of int
        Records of every batch, in order.
    digest : str
        Running digest, 32 hexadecimal digits.
    """

    schema_digest: str
    rows_per_batch: tuple[int, ...]
    digest: str

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self.rows_per_batch)

    @property
    def rows(self) -> int:
        """Number of records."""
        return sum(self.rows_per_batch)

    def to_metadata(self) -> dict[bytes, bytes]:
        """Return the custom metadata of the trailer batch."""
        rows = ",".join(map(str, self.rows_per_batch))
        # Canonical JSON: of integers and hexadecimal digits it is easily made.
        text = (
            f'{{"batches":{self.batches},"digest":"{self.digest}","rows":{self.rows},'
            f'"rows_per_batch":[{rows}],"schema_digest":"{self.schema_digest}",'
            f'"version":"{_VERSION}"}}'
        ).encode()
        return {TRAILER_KEY: text, CHECKSUM_KEY: text_digest(text).hex().encode()}

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Trailer:
        """Return the trailer that a batch's custom metadata, with `TRAILER_KEY`, holds.

        Raises
        ------
        ChecksumError
            The text does not match its checksum.
        CorruptError
            The text is not a trailer, although its checksum is right, or there are further keys.
        UnsupportedVersionError
            Its writer followed another major version (``RF-V001``).
        """
        text = metadata[TRAILER_KEY]
        if set(metadata) != {TRAILER_KEY, CHECKSUM_KEY}:
            raise CorruptError(
                "the trailer has other metadata than its own",
                expected=[TRAILER_KEY.decode(), CHECKSUM_KEY.decode()],
                got=sorted(key.decode(errors="replace") for key in metadata),
            )  # fmt: skip
        expected = metadata.get(CHECKSUM_KEY, b"")
        got = text_digest(text).hex().encode()
        if expected != got:
            raise ChecksumError(
                "the trailer does not match its checksum",
                expected=expected.decode(errors="replace"), got=got.decode(),
            )  # fmt: skip
        try:
            data = json.loads(text)
            if not is_version(data["version"]):
                raise ValueError("version is not MAJOR.MINOR")
            check_major(data["version"])
            rows, digests = data["rows_per_batch"], [data["schema_digest"], data["digest"]]
            if any(type(count) is not int or count < 0 for count in rows):
                raise ValueError("rows_per_batch is not a list of numbers")
            if not all(map(_is_digest, digests)):
                raise ValueError("a digest is not 32 hexadecimal digits")
            trailer = cls(digests[0], tuple(rows), digests[1])
            if (data["batches"], data["rows"]) != (trailer.batches, trailer.rows):
                raise ValueError("batches and rows do not agree with rows_per_batch")
        except UnsupportedVersionError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise CorruptError("the trailer is malformed", expected="a trailer", got=err) from err
        return trailer


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


class Tally:
    """The running digest and row counts of the batches written or read so far."""

    def __init__(self) -> None:
        self.rows_per_batch: list[int] = []
        self._running = xxhash.xxh3_128()

    def add(self, digest: bytes, rows: int, metadata: Metadata) -> None:
        """Count one batch: its digest, its records and its custom metadata besides the digest."""
        self.rows_per_batch.append(rows)
        if not metadata:
            self._running.update(digest + _NO_METADATA)
            return
        self._running.update(digest)
        parts = [_u32(len(metadata))]
        for key in sorted(metadata):
            for text in (key, metadata[key]):
                parts.append(_u32(len(text)))
                parts.append(text)
        self._running.update(b"".join(parts))

    def hexdigest(self) -> str:
        """Return the running digest, 32 hexadecimal digits."""
        return str(self._running.hexdigest())

    def trailer(self, schema_digest: str) -> Trailer:
        """Return the trailer for the batches so far."""
        return Trailer(schema_digest, tuple(self.rows_per_batch), self.hexdigest())


def user_metadata(metadata: Mapping[Any, Any] | None) -> dict[bytes, bytes]:
    """Return custom metadata that a caller gives for one batch as bytes, checked.

    Raises
    ------
    SchemaMismatchError
        A key lies in this format's namespace, or something is neither text nor bytes (``RF-S009``).
    """
    out = {}
    if metadata:
        check_mapping("metadata", metadata)
    for key, value in (metadata or {}).items():
        pair = [text.encode() if isinstance(text, str) else text for text in (key, value)]
        if not all(isinstance(text, bytes) for text in pair) or pair[0].startswith(
            NAMESPACE.encode()
        ):
            raise SchemaMismatchError(
                "batch metadata is text or bytes, under keys outside this format's namespace",
                code="RF-S009", expected=f"keys that do not begin with {NAMESPACE!r}",
                got=f"{key!r}: {value!r}", remedy="store other values as JSON text",
            )  # fmt: skip
        out[pair[0]] = pair[1]
    return out


def batch_metadata(digest: bytes, metadata: Metadata) -> dict[bytes, bytes]:
    """Return the custom metadata of a batch message: the digest, then the caller's keys."""
    return {DIGEST_KEY: digest.hex().encode(), **metadata}
