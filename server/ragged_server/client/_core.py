"""What both clients do, written once over :class:`ragged_server.client._io.Io`."""

from __future__ import annotations

import json
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow as pa

from ragged_format.errors import LimitExceededError, UnsupportedFeatureError
from ragged_format.streams import StreamReader
from ragged_server.client._batches import Parcel, encode, opened_batches, parcels
from ragged_server.client._io import Answer, Call, Io
from ragged_server.client._retry import Retries, request
from ragged_server.client.errors import RefusedError

__all__ = ["Core", "Page", "Pushed", "Share", "base_url", "http_options"]

STREAM = "application/vnd.apache.arrow.stream"
NO_SCHEMA = 204
CURSOR_HEADER = "ragged-cursor"
CURSOR_KEY = b"ragged_server:cursor"
# Between the cursors of several replicas; not a character of a cursor.
_JOINT = "~"
_SAMPLES = "/v1/samples"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push has done.

    Attributes
    ----------
    records : int
        Acknowledged: durable at the server. The sum of the next two.
    stored, duplicates : int
        New to the server, and there already.
    requests, bytes : int
        Acknowledged, and sent with them.
    retries : int
        Requests that were sent again.
    cursor : str, optional
        Behind the records of the request acknowledged last; for several replicas, of each.
    """

    records: int = 0
    stored: int = 0
    duplicates: int = 0
    requests: int = 0
    bytes: int = 0
    retries: int = 0
    cursor: str | None = None

    def plus(self, other: Pushed) -> Pushed:
        """Return the totals of two pushes, `other` being the later one."""
        return Pushed(
            self.records + other.records, self.stored + other.stored,
            self.duplicates + other.duplicates, self.requests + other.requests,
            self.bytes + other.bytes, self.retries + other.retries, other.cursor or self.cursor,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """What one read gave.

    Attributes
    ----------
    batches : tuple of RecordBatch
        Samples in the order of the log; none where there was nothing new.
    cursors : tuple of str
        Position after each batch.
    cursor : str
        From where to read on.
    schema : pyarrow.Schema, optional
        Of the batches; ``None`` where the log has none before its first samples.
    lag : int, optional
        Records in the log behind `cursor`, of all shares; of the server asked last.
    """

    batches: tuple[pa.RecordBatch, ...]
    cursors: tuple[str, ...]
    cursor: str
    schema: pa.Schema | None
    lag: int | None = None

    @property
    def records(self) -> int:
        """Records in the batches."""
        return sum(batch.num_rows for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Share:
    """Which records a reader wants.

    Attributes
    ----------
    rank, world_size : int
        Records whose hash of group_id (of sample_id where that is null) modulo `world_size` is
        `rank`.
    min_policy_version : int, optional
        Records of older versions are left out.
    """

    rank: int = 0
    world_size: int = 1
    min_policy_version: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LimitExceededError(
                "a rank lies outside the world", expected=f"0 <= rank < {self.world_size}",
                got=self.rank,
            )  # fmt: skip

    def params(self) -> dict[str, str]:
        """Return the parameters of a request."""
        out = {}
        if self.world_size > 1:
            out = {"rank": str(self.rank), "world_size": str(self.world_size)}
        if self.min_policy_version is not None:
            out["min_policy_version"] = str(self.min_policy_version)
        return out


def base_url(url: str) -> str:
    """Return a server's URL without a trailing slash or the path of samples.

    Examples
    --------
    >>> base_url("http://host:8000/v1/samples")
    'http://host:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UnsupportedFeatureError(
            "this is not the URL of a server", expected="http://host:port or https://host:port",
            got=url,
        )  # fmt: skip
    path = parts.path.rstrip("/").removesuffix(_SAMPLES)
    return f"{parts.scheme}://{parts.netloc}{path}"


def base_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """Return the :func:`base_url` of each of the URLs, of which there must be one."""
    out = tuple(map(base_url, [urls] if isinstance(urls, str) else urls))
    if not out:
        raise LimitExceededError("a client needs a server", expected=">= 1 URL", got=0)
    return out


class Core:
    """The clients' common part; see :class:`ragged_server.client.Client`."""

    def __init__(
        self,
        io: Io,
        urls: str | Sequence[str],
        *,
        retries: Retries,
        zstd_level: int | None,
    ) -> None:
        self.urls = base_urls(urls)
        self._io = io
        self._retries = retries
        self._zstd_level = zstd_level
        self._retried = 0

    async def push(
        self,
        source: Any,
        *,
        max_records: int,
        max_bytes: int,
        in_flight: int,
        progress: Callable[[Pushed], None] | None,
    ) -> Pushed:
        for name, value in (
            ("max_records", max_records), ("max_bytes", max_bytes), ("in_flight", in_flight),
        ):  # fmt: skip
            if value < 1:
                raise LimitExceededError(f"{name} is too small", expected=">= 1", got=value)
        retried = self._retried
        total = Pushed()
        cursors = [""] * len(self.urls)
        work: Iterator[Parcel] = parcels(
            opened_batches(source), replicas=len(self.urls), max_records=max_records,
            max_bytes=max_bytes,
        )  # fmt: skip
        async with aclosing(self._io.each(self._send, work, in_flight)) as done:  # type: ignore[type-var]
            async for replica, size, answer in done:
                cursors[replica] = answer.get("cursor") or cursors[replica]
                stored, duplicates = int(answer["stored"]), int(answer["duplicates"])
                one = Pushed(
                    stored + duplicates, stored, duplicates, 1, size, cursor=_JOINT.join(cursors)
                )
                total = replace(total.plus(one), retries=self._retried - retried)
                if progress is not None:
                    progress(total)
        return total

    async def _send(self, parcel: Parcel) -> tuple[int, int, dict[str, Any]]:
        content = await self._io.call(lambda: encode(parcel.batch, self._zstd_level))
        headers = {"content-type": STREAM, "idempotency-key": secrets.token_hex(16)}
        if self._zstd_level is not None:
            headers["content-encoding"] = "zstd"
        call = Call("POST", self.urls[parcel.replica] + _SAMPLES, {}, headers, content)
        return parcel.replica, len(content), await self._request(call, _json)

    async def read(
        self, after: str | None, *, wait_s: float, max_bytes: int | None, share: Share
    ) -> Page:
        """Read once from the replicas in turn, until one has something."""
        positions = self._positions(after)
        last: Page | None = None
        for number in range(len(self.urls)):
            # The others have nothing at the moment: wait for the last one.
            waits_s = wait_s if number == len(self.urls) - 1 else 0.0
            page = await self._read_one(number, positions[number], waits_s, max_bytes, share)
            if len(self.urls) > 1:
                page = _joined(page, positions, number)
                positions = self._positions(page.cursor)
            if page.batches:
                return page
            last = page
        if last is None:  # a client has at least one server
            raise LimitExceededError("a client needs a server", expected=">= 1 URL", got=0)
        return last

    async def tail(
        self,
        after: str | None,
        *,
        follow: bool,
        wait_s: float,
        max_bytes: int | None,
        share: Share,
    ) -> AsyncIterator[Page]:
        # Several servers are asked in short turns: none may hold up what another one has.
        turn_s = wait_s if len(self.urls) == 1 else min(wait_s, 0.5)
        while True:
            page = await self.read(
                after, wait_s=turn_s if follow else 0.0, max_bytes=max_bytes, share=share
            )
            if page.batches:
                yield page
            elif page.cursor == after and not follow:
                return
            after = page.cursor

    async def get(self, path: str, *, replica: int = 0) -> Any:
        """Return the JSON of a path."""
        return await self._request(Call("GET", self.urls[replica] + path), _json)

    async def _read_one(
        self, replica: int, after: str | None, wait_s: float, max_bytes: int | None, share: Share
    ) -> Page:
        params = share.params()
        if after:
            params["after"] = after
        if wait_s:
            params["wait"] = f"{wait_s:g}"
        if max_bytes is not None:
            params["max_bytes"] = str(max_bytes)
        headers = {"accept": STREAM}
        if self._zstd_level is not None:
            headers["accept-encoding"] = "zstd"
        url = self.urls[replica] + _SAMPLES
        page: Page = await self._request(Call("GET", url, params, headers, wait_s=wait_s), _page)
        return page

    async def _request(self, call: Call, read: Callable[[Answer], Any]) -> Any:
        def count() -> None:
            self._retried += 1

        return await request(self._io, call, self._retries, read=read, on_retry=count)

    def _positions(self, after: str | None) -> list[str | None]:
        positions: list[str | None] = [part or None for part in (after or "").split(_JOINT)]
        if after is None:
            positions = [None] * len(self.urls)
        if len(positions) != len(self.urls):
            raise LimitExceededError(
                "the cursor is one of another number of servers",
                expected=f"{len(self.urls)} parts", got=len(positions),
                remedy="read with the URLs, in the order, that the cursor came from",
            )  # fmt: skip
        return positions


def _joined(page: Page, positions: list[str | None], number: int) -> Page:
    def join(cursor: str) -> str:
        parts = [*positions[:number], cursor, *positions[number + 1 :]]
        return _JOINT.join(part or "" for part in parts)

    cursors = tuple(map(join, page.cursors))
    return replace(page, cursors=cursors, cursor=join(page.cursor))


def _json(answer: Answer) -> Any:
    return json.loads(answer.body)


def _page(answer: Answer) -> Page:
    cursor = answer.headers.get(CURSOR_HEADER)
    if cursor is None:
        raise RefusedError(
            "what answered is not a server of samples", expected="a header Ragged-Cursor",
            got=answer.headers.get("content-type") or "none", remedy="check the URL",
        )  # fmt: skip
    if answer.status == NO_SCHEMA:
        return Page((), (), cursor, None, 0)
    reader = StreamReader(pa.py_buffer(answer.body))
    batches, cursors = [], []
    for batch in reader:
        batches.append(batch)
        cursors.append(reader.metadata.get(CURSOR_KEY, b"").decode())
    lag = answer.headers.get("ragged-lag")
    return Page(
        tuple(batches), tuple(cursors), cursor, reader.schema, None if lag is None else int(lag)
    )


def http_options(
    urls: str | Sequence[str], *, key: str | None, verify: bool | str | os.PathLike[str]
) -> dict[str, Any]:
    """Return what a client of HTTP is made with; ``RAGGED_API_KEY`` has the default key."""
    key = os.environ.get("RAGGED_API_KEY") if key is None else key
    if verify is True and not getproxies():
        # Without TLS, and redirects are not followed: loading the authorities takes 30 ms.
        verify = not all(url.startswith("http://") for url in base_urls(urls))
    return {
        "headers": {"authorization": f"Bearer {key}"} if key else {},
        "verify": verify
        if isinstance(verify, bool)
        else ssl.create_default_context(cafile=os.fspath(verify)),
        "follow_redirects": False,  # a key goes nowhere else
    }
