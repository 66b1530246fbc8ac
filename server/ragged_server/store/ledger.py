"""What the writer remembers besides the records: answered keys, quotas, ids past their time.

All of it follows from the commits, except for those of segments that are sealed and gone. Before a
segment goes, the ledger is written to ``log/state.json``: canonical JSON with a checksum, replaced
atomically. Opening a log reads that and applies the commits that are newer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragged_format.digest import canonical_json, text_digest
from ragged_format.local_files import create
from ragged_server.store.commits import Commit, Remembered
from ragged_server.store.errors import IdempotencyMismatchError, QuotaExceededError
from ragged_server.store.records import Quota, StoreSettings

__all__ = ["Ledger"]

STATE_NAME = "state.json"


class Ledger:
    """State of the writer that outlives segments.

    Parameters
    ----------
    settings : StoreSettings

    Attributes
    ----------
    commit : int
        Number of the last commit applied.
    floor : int
        Ids of records below this sequence are past their time.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.commit = 0
        self.floor = 0
        self._settings = settings
        self._answers: OrderedDict[tuple[str, str], tuple[Remembered, float]] = OrderedDict()
        self._used: dict[str, tuple[int, int, int]] = {}
        self._removed: list[tuple[int, float]] = []

    def answer(self, account: str, key: str, fingerprint: str, now: float) -> Remembered | None:
        """Return the answer that a key had, None if it is new or past its time.

        Raises
        ------
        IdempotencyMismatchError
            The payload was another.
        """
        entry = self._answers.get((account, key))
        if entry is None or entry[1] < now - self._settings.idempotency_window_s:
            return None
        require_fingerprint(entry[0], fingerprint)
        return entry[0]

    def check_quota(
        self, account: str | None, pending: tuple[int, int], records: int, size: int, now: float
    ) -> None:
        """Raise unless an account may store so much more, `pending` of it being under way.

        Raises
        ------
        QuotaExceededError
        """
        quota = self._quota(account)
        if quota is None or account is None:
            return
        window = int(now // quota.window_s)
        start, *used = self._used.get(account, (window, 0, 0))
        if start != window:
            used = [0, 0]
        facts = (
            ("records", quota.records, used[0] + pending[0], records),
            ("bytes", quota.bytes, used[1] + pending[1], size),
        )
        for what, limit, before, more in facts:
            if limit is not None and before + more > limit:
                raise QuotaExceededError(
                    f"the key {account!r} has stored what its quota of {what} allows",
                    expected=f"<= {limit} {what} in {quota.window_s:g} s",
                    got=f"{before} and {more} more",
                    retry_after_s=(window + 1) * quota.window_s - now,
                    remedy="wait for the next window, or ask for a larger quota",
                )  # fmt: skip

    def apply(self, commit: Commit) -> None:
        """Take in a commit that is durable; one that was taken in before changes nothing."""
        if commit.number <= self.commit:
            return
        self.commit = commit.number
        for entry in commit.keys:
            self._answers.pop((entry.account, entry.key), None)
            self._answers[entry.account, entry.key] = (entry, commit.time_s)
        while len(self._answers) > self._settings.idempotency_entries:
            self._answers.popitem(last=False)
        oldest = commit.time_s - self._settings.idempotency_window_s
        while self._answers and next(iter(self._answers.values()))[1] < oldest:
            self._answers.popitem(last=False)
        for account, (records, size) in commit.accounts.items():
            quota = self._quota(account) or Quota()
            window = int(commit.time_s // quota.window_s)
            start, *used = self._used.get(account, (window, 0, 0))
            if start != window:
                used = [0, 0]
            self._used[account] = (window, used[0] + records, used[1] + size)

    def removed(self, sequence: int, now: float) -> None:
        """Note that the records below `sequence` were removed from the log, if that is new."""
        known = self._removed[-1][0] if self._removed else self.floor
        if sequence > known:
            self._removed.append((sequence, now))

    def raise_floor(self, now: float) -> int:
        """Return the floor, raised to what was removed longer ago than the dedupe window."""
        oldest = now - self._settings.dedupe_window_s
        while self._removed and self._removed[0][1] <= oldest:
            self.floor = max(self.floor, self._removed.pop(0)[0])
        return self.floor

    def to_json(self, log_id: str) -> bytes:
        """Return the text of ``state.json``."""
        data: dict[str, Any] = {
            "answers": [[*entry.to_json(), time] for entry, time in self._answers.values()],
            "commit": self.commit,
            "floor": self.floor,
            "log": log_id,
            "removed": [list(entry) for entry in self._removed],
            "used": {account: list(used) for account, used in self._used.items()},
            "version": 1,
        }
        data["checksum"] = _checksum(data)
        return canonical_json(data)

    @classmethod
    def load(cls, folder: Path, log_id: str, settings: StoreSettings) -> Ledger | None:
        """Return the ledger that was saved; None if there is none, or it is damaged."""
        ledger = cls(settings)
        try:
            data = json.loads((folder / STATE_NAME).read_bytes())
            if data.pop("checksum") != _checksum(data) or data["log"] != log_id:
                return None
            if data["version"] != 1:
                return None
            ledger.commit, ledger.floor = data["commit"], data["floor"]
            for *entry, time in data["answers"]:
                remembered = Remembered(*entry)
                ledger._answers[remembered.account, remembered.key] = (remembered, time)
            ledger._removed = [(sequence, time) for sequence, time in data["removed"]]
            ledger._used = {name: (a, b, c) for name, (a, b, c) in data["used"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return ledger

    def _quota(self, account: str | None) -> Quota | None:
        quotas = self._settings.quotas
        if account is None or not quotas:
            return None
        return quotas.get(account, quotas.get("*"))


def require_fingerprint(entry: Remembered, fingerprint: str) -> None:
    """Raise unless the payload is the one that the key had before."""
    if entry.fingerprint != fingerprint:
        raise IdempotencyMismatchError(
            f"the Idempotency-Key {entry.key!r} was used for another payload",
            expected=f"the payload {entry.fingerprint}", got=fingerprint,
            remedy="use a new key for each new request",
        )  # fmt: skip


def save(folder: Path, text: bytes) -> None:
    """Replace ``state.json``, atomically and durably."""
    with create(folder / STATE_NAME) as file:
        file.write(text)


def _checksum(data: Mapping[str, Any]) -> str:
    return text_digest(canonical_json(dict(data))).hex()
