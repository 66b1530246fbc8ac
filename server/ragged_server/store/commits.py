"""Commits: the zero-row batches that say which records of a segment count.

A commit's message has three keys of custom metadata: the digest of the batch without rows, as every
batch has one, so that readers of streams accept it; ``ragged_format:commit``, canonical JSON; and
``ragged_format:commit_checksum``, xxh3-128 of that text as 32 hexadecimal digits. The JSON object:

``log``
    Key of the log, 32 hexadecimal digits: random, and known to nobody who only sends and reads
    records, so that no record can hold a commit.
``commit``
    Number of the commit since the log began, from 1.
``sequence``, ``rows``, ``batches``
    Sequence of the commit's first record, how many records and batches it has.
``bytes``
    Of its messages: they lie directly before the commit.
``digest``
    xxh3-128 over the xxh3-128 of each message's bytes, in order.
``time_us``
    Microseconds since 1970.
``policy_version``
    Newest version in the log so far; left out while there is none.
``keys``
    List of ``[account, key, fingerprint, first_sequence, stored, duplicates]``: the requests with
    an Idempotency-Key that this commit made durable. Left out if there are none.
``accounts``
    Object of account to ``[records, bytes]`` that it stored. Left out if there are none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from ragged_format.digest import canonical_json, digest, text_digest
from ragged_format.errors import ChecksumError, CorruptError
from ragged_format.flatbuffer import with_metadata
from ragged_format.known_schemas import KnownSchema, read_schema_message
from ragged_format.schema import NAMESPACE
from ragged_format.trailer import DIGEST_KEY

__all__ = ["CHECKSUM_KEY", "COMMIT_KEY", "Commit", "Remembered"]

COMMIT_KEY = f"{NAMESPACE}commit".encode()
CHECKSUM_KEY = f"{NAMESPACE}commit_checksum".encode()


@dataclass(frozen=True, slots=True)
class Remembered:
    """A request with an Idempotency-Key and its answer.

    Attributes
    ----------
    account, key : str
        The account is empty where there are no accounts.
    fingerprint : str
        Of the payload, 32 hexadecimal digits.
    first_sequence, stored, duplicates : int
        The answer.
    """

    account: str
    key: str
    fingerprint: str
    first_sequence: int
    stored: int
    duplicates: int

    def to_json(self) -> list[Any]:
        """Return the entry of a commit."""
        return [
            self.account, self.key, self.fingerprint, self.first_sequence, self.stored,
            self.duplicates,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit states; see the module for the fields."""

    log_key: str
    number: int
    sequence: int
    rows: int
    batches: int
    nbytes: int
    digest: str
    time_us: int
    policy_version: int | None = None
    keys: tuple[Remembered, ...] = ()
    accounts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def time_s(self) -> float:
        """Seconds since 1970."""
        return self.time_us / 1e6

    @property
    def end(self) -> int:
        """Sequence after the last record."""
        return self.sequence + self.rows

    def to_message(self, known: KnownSchema) -> bytes:
        """Return the commit as the message of a batch without rows."""
        data: dict[str, Any] = {
            "batches": self.batches, "bytes": self.nbytes, "commit": self.number,
            "digest": self.digest, "log": self.log_key, "rows": self.rows,
            "sequence": self.sequence, "time_us": self.time_us,
        }  # fmt: skip
        if self.policy_version is not None:
            data["policy_version"] = self.policy_version
        if self.keys:
            data["keys"] = [entry.to_json() for entry in self.keys]
        if self.accounts:
            data["accounts"] = {name: list(used) for name, used in self.accounts.items()}
        text = canonical_json(data)
        metadata = {
            DIGEST_KEY: _empty_digest(known.message), COMMIT_KEY: text,
            CHECKSUM_KEY: text_digest(text).hex().encode(),
        }  # fmt: skip
        return with_metadata(known.empty.flatbuffer, known.empty.header, metadata) + (
            known.empty.body
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Commit:
        """Return the commit that a message's custom metadata, with `COMMIT_KEY`, holds.

        Raises
        ------
        ChecksumError, CorruptError
            The text does not match its checksum, or is not a commit.
        """
        text = metadata[COMMIT_KEY]
        got = text_digest(text).hex().encode()
        if metadata.get(CHECKSUM_KEY) != got:
            raise ChecksumError(
                "a commit does not match its checksum",
                expected=metadata.get(CHECKSUM_KEY, b"").decode(errors="replace"),
                got=got.decode(),
            )  # fmt: skip
        try:
            data = json.loads(text)
            return cls(
                data["log"], data["commit"], data["sequence"], data["rows"], data["batches"],
                data["bytes"], data["digest"], data["time_us"], data.get("policy_version"),
                tuple(Remembered(*entry) for entry in data.get("keys", ())),
                {name: (used[0], used[1]) for name, used in data.get("accounts", {}).items()},
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as err:
            raise CorruptError("a commit is malformed", expected="a commit", got=err) from err


@lru_cache(maxsize=4)
def _empty_digest(schema_message: bytes) -> bytes:
    known = read_schema_message(schema_message)
    return digest(pa.RecordBatch.from_pylist([], schema=known.schema)).hex().encode()
