"""The manifest of a dataset: which shards it has, and nothing else counts.

A dataset is a directory with ``manifest.json`` and immutable shards, each a hot file
(:mod:`ragged_format.files`) with a unique random name. A file that the manifest does not list is
nobody's. The manifest is UTF-8 JSON, one object:

``format_version``
    "MAJOR.MINOR" of this format.
``generation``
    Positive integer, one more with each commit.
``profile``, ``vocab_size``
    As in the schema, for people and tools that do not read Arrow.
``schema``
    Base64 of the Arrow schema message that all shards share in identity.
``identity``
    xxh3-128 of the schema's identity text (:attr:`RaggedSchema.identity`), hexadecimal.
``shards``
    List, in order, of objects with ``name``, ``rows``, ``bytes`` (file size), ``digest`` (running
    digest of its trailer) and ``encoding`` ("hot").
``fingerprint``
    xxh3-128, hexadecimal, of the identity (16 bytes) and, for each shard in order, its digest (16
    bytes) and its rows (u64 little-endian): equal for equal content in equal shards.
``lineage``
    JSON object that the writers gave: where the data comes from.
``checksum``
    xxh3-128, hexadecimal, of the canonical JSON of the object without this key.

Readers ignore unknown keys, which the checksum covers like all others.

**Commit.** A writer makes its shards durable under their final names, takes an exclusive ``flock``
on ``manifest.lock``, reads the manifest again, adds its shards (or replaces the list), and replaces
``manifest.json`` atomically: temporary file, fsync, rename, fsync of the directory. So appenders in
several processes lose nothing, and half a job is never visible. A reader takes the manifest that it
finds at open as its snapshot. Shards that leave the list stay for a grace period
(:func:`ragged_format.writer.sweep`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragged_format.digest import canonical_json, text_digest
from ragged_format.errors import (
    DatasetNotFoundError,
    ManifestError,
    RaggedError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.known_schemas import KnownSchema, read_schema_message
from ragged_format.local_files import create
from ragged_format.parse import check_major, is_version
from ragged_format.schema import FORMAT_VERSION

__all__ = ["MANIFEST_NAME", "Manifest", "Shard", "locked", "read_manifest", "write_manifest"]

MANIFEST_NAME = "manifest.json"
LOCK_NAME = "manifest.lock"
SHARD_SUFFIX = ".arrow"
ENCODINGS = ("hot", "compact")
# No file and no dataset reaches this many bytes or records; sums stay within int64.
MAX_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as the manifest lists it.

    Attributes
    ----------
    name : str
        File name in the dataset's directory.
    rows : int
        Number of records.
    bytes : int
        Size of the file.
    digest : str
        Running digest, 32 hexadecimal digits.
    encoding : {"hot", "compact"}
        Whether the file holds plain batches or encoded ones.
    """

    name: str
    rows: int
    bytes: int
    digest: str
    encoding: str = "hot"

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {
            "bytes": self.bytes, "digest": self.digest, "encoding": self.encoding,
            "name": self.name, "rows": self.rows,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Shard:
        """Parse the manifest's entry; raises ValueError, KeyError or TypeError for another."""
        shard = cls(data["name"], data["rows"], data["bytes"], data["digest"], data["encoding"])
        if shard.encoding not in ENCODINGS:
            raise UnsupportedFeatureError(
                "a shard has an encoding that this library does not read",
                expected=" or ".join(ENCODINGS), got=shard.encoding,
                remedy="use a newer library release",
            )  # fmt: skip
        # Names come from outside: one must not lead out of the directory.
        alone = Path(shard.name).name == shard.name and "\0" not in shard.name
        if not alone or not shard.name.endswith(SHARD_SUFFIX) or len(shard.name.encode()) > 255:
            raise ValueError(f"{shard.name!r} is not a file name ending in {SHARD_SUFFIX}")
        numbers = (shard.rows, shard.bytes)
        whole = all(type(n) is int and 0 <= n < MAX_SIZE for n in numbers)
        if not whole or not re.fullmatch("[0-9a-f]{32}", shard.digest):
            raise ValueError(f"impossible entry for {shard.name!r}")
        return shard


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a dataset.

    Attributes
    ----------
    known : KnownSchema
        The schema.
    shards : tuple of Shard
        In order.
    generation : int
        Counts commits, from 1.
    lineage : dict
        JSON values.
    """

    known: KnownSchema
    shards: tuple[Shard, ...] = ()
    generation: int = 0
    lineage: dict[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return sum(shard.rows for shard in self.shards)

    @property
    def identity(self) -> str:
        """Digest of the schema's identity, 32 hexadecimal digits."""
        return text_digest(self.known.ragged.identity.encode()).hex()

    @property
    def fingerprint(self) -> str:
        """Digest of identity, shards and their order, 32 hexadecimal digits."""
        shards = (
            bytes.fromhex(shard.digest) + struct.pack("<Q", shard.rows) for shard in self.shards
        )
        return text_digest(b"".join((bytes.fromhex(self.identity), *shards))).hex()

    def to_json(self) -> bytes:
        """Return the text of ``manifest.json``."""
        data = {
            "fingerprint": self.fingerprint,
            "format_version": ".".join(map(str, FORMAT_VERSION)),
            "generation": self.generation,
            "identity": self.identity,
            "lineage": self.lineage,
            "profile": self.known.ragged.profile,
            "schema": base64.b64encode(self.known.message).decode(),
            "shards": [shard.to_json() for shard in self.shards],
            "vocab_size": self.known.ragged.vocab_size,
        }
        data["checksum"] = _checksum(data)
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse and check the text of ``manifest.json``.

        Raises
        ------
        ManifestError
            It is malformed or does not match its checksum (``RF-C007``).
        UnsupportedVersionError, UnsupportedFeatureError
            It is of another major version (``RF-V001``), or lists shards of an unknown encoding.
        """
        try:
            data = json.loads(text)
            if not is_version(data["format_version"]):
                raise ValueError("format_version is not MAJOR.MINOR")
            # First of all: another version may have another checksum.
            check_major(data["format_version"])
            checksum = data.pop("checksum")
            if (expected := _checksum(data)) != checksum:
                raise ManifestError(
                    "the manifest does not match its checksum", expected=expected, got=checksum,
                    remedy="restore manifest.json from a copy",
                )  # fmt: skip
            manifest = cls(
                read_schema_message(base64.b64decode(data["schema"], validate=True)),
                tuple(Shard.from_json(entry) for entry in data["shards"]),
                data["generation"],
                data["lineage"],
            )
            if type(manifest.generation) is not int or not isinstance(manifest.lineage, dict):
                raise ValueError("generation is an integer and lineage an object")
            if manifest.generation < 1 or manifest.num_rows >= MAX_SIZE:
                raise ValueError("impossible generation or number of records")
            ragged = manifest.known.ragged
            facts = [
                ("identity", data["identity"], manifest.identity),
                ("fingerprint", data["fingerprint"], manifest.fingerprint),
                ("profile", data["profile"], ragged.profile),
                ("vocab_size", data["vocab_size"], ragged.vocab_size),
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            if isinstance(err, RaggedError):
                raise
            raise ManifestError(
                "the manifest is malformed", expected="the object that the specification gives",
                got=f"{type(err).__name__}: {err}", remedy="restore manifest.json from a copy",
            ) from err  # fmt: skip
        for key, stated, computed in facts:
            if stated != computed:
                raise ManifestError(
                    f"the manifest's {key} does not follow from its content",
                    expected=computed, got=stated,
                )  # fmt: skip
        return manifest


def _checksum(data: dict[str, Any]) -> str:
    return text_digest(canonical_json(data)).hex()


def read_manifest(directory: Path) -> Manifest:
    """Return the current manifest of a dataset.

    Raises
    ------
    DatasetNotFoundError
        There is none (``RF-C008``).
    ManifestError, UnsupportedVersionError, UnsupportedFeatureError
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as err:
        got = "no manifest" if directory.is_dir() else "no directory"
        remedy = "write one with rf.Writer; open single files with rf.open_source"
        if (directory / "log" / "server.json").is_file():
            got = "the log of a server, of which nothing is in shards yet"
            remedy = (
                "read it from its server (ragged serve, ragged tail), or stop that: it seals then"
            )
        raise DatasetNotFoundError(
            "there is no dataset here", where=Where(file=str(path)),
            expected=f"a directory with {MANIFEST_NAME}", got=got, remedy=remedy,
        ) from err  # fmt: skip
    try:
        return Manifest.from_json(text)
    except RaggedError as err:
        raise err.at(Where(file=str(path))) from err.__cause__


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of a dataset, atomically and durably. The caller holds the lock."""
    with create(directory / MANIFEST_NAME) as file:
        file.write(manifest.to_json())


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the dataset's commit lock; it is free again when the process ends, however it ends."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Not by closing alone: a forked child may hold a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
