"""Clients of the server: push samples until they are durable, read and tail them again.

:class:`Client` blocks, :class:`AsyncClient` is for asyncio; both are one implementation.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self

from ragged_server.client._core import Core, Page, Pushed, Share, http_options
from ragged_server.client._io import BlockingIo, TaskIo, run_now
from ragged_server.client._retry import Retries
from ragged_server.client.errors import RefusedError, UnreachableError

__all__ = [
    "AsyncClient",
    "Client",
    "Page",
    "Pushed",
    "RefusedError",
    "Retries",
    "Share",
    "UnreachableError",
]

_SHARE = Share()
MAX_RECORDS = 256
MAX_BYTES = 16 << 20
IN_FLIGHT = 4
WAIT_S = 20.0
RETRY_FOR_S = Retries().for_s


class Client:
    """A blocking client of one server, or of several that share the samples.

    Guarantees: what :meth:`push` returns for is on the servers' disks. A record that is sent twice,
    by a retry or by a producer that starts again, is stored once, as servers know sample ids; of
    several servers it always goes to the same one. Thread-safe; of no use in a forked child.

    Parameters
    ----------
    url : str or sequence of str
        Such as ``http://host:8000``. Several are replicas, each with a log of its own; keep their
        order.
    key : str, optional
        API key; by default the environment variable ``RAGGED_API_KEY``, if set.
    retries : Retries
        When a request is sent again.
    zstd_level : int, optional
        Bodies go under zstd, both ways. Pays where the network is slower than about 300 MB/s.
    verify : bool or path
        Whether certificates are checked, or a file of trusted ones.

    Raises
    ------
    UnsupportedFeatureError
        The URL is none of a server.

    Examples
    --------
    >>> client = Client("http://127.0.0.1:9", retries=Retries(for_s=0))
    >>> client.status()
    Traceback (most recent call last):
    ...
    ragged_server.client.errors.UnreachableError: [RF-H201] the server cannot be reached
    ...
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        key: str | None = None,
        retries: Retries = Retries(),  # noqa: B008 - frozen
        zstd_level: int | None = None,
        verify: bool | str | os.PathLike[str] = True,
    ) -> None:
        self._io = BlockingIo(**http_options(url, key=key, verify=verify))
        self._core = Core(self._io, url, retries=retries, zstd_level=zstd_level)

    def push(
        self,
        source: Any,
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        in_flight: int = IN_FLIGHT,
        progress: Callable[[Pushed], None] | None = None,
    ) -> Pushed:
        """Send samples and return when all of them are durable.

        Parameters
        ----------
        source : RecordBatch, Table, iterable of these, path, URL or binary file object
            What ``rf.open_source`` opens is read as that does. Batches of an iterator or a stream
            go out as they come; those of a dataset, file, table or list may share a request.
        max_records, max_bytes : int
            Most records and about the most bytes of a request; each is stored as a whole or not at
            all.
        in_flight : int
            Requests under way at a time. With 1 the log keeps the order of the source.
        progress : callable, optional
            Called after each acknowledged request with the totals so far.

        Raises
        ------
        ConflictError
            A sample_id is stored with other content (``RF-H101``).
        UnreachableError
            Requests failed for longer than `retries` allow (``RF-H201``).
        RaggedError
            Another refusal; the class belongs to the problem's code. Requests before it are
            stored, and pushing the whole again stores none of them twice.
        """
        return run_now(
            self._core.push(
                source, max_records=max_records, max_bytes=max_bytes, in_flight=in_flight,
                progress=progress,
            )
        )  # fmt: skip

    def read(
        self,
        after: str | None = None,
        *,
        wait_s: float = 0.0,
        max_bytes: int | None = None,
        share: Share = _SHARE,
    ) -> Page:
        """Return what follows a cursor.

        Parameters
        ----------
        after : str, optional
            A cursor that a read or push returned; without one, from the oldest record on.
        wait_s : float
            How long to wait for something new; the server may wait less.
        max_bytes : int, optional
            About the most bytes of the page, at least one record; the server may give less.
        share : Share
            Which records.

        Raises
        ------
        CursorExpiredError
            Records behind the cursor were removed (``RF-H106``); its ``oldest`` is what is left.
        CursorError
            The cursor is of another log (``RF-H105``).
        UnreachableError
        """
        return run_now(self._core.read(after, wait_s=wait_s, max_bytes=max_bytes, share=share))

    def tail(
        self,
        after: str | None = None,
        *,
        follow: bool = True,
        wait_s: float = WAIT_S,
        max_bytes: int | None = None,
        share: Share = _SHARE,
    ) -> Iterator[Page]:
        """Yield page after page from a cursor on, none of them empty.

        Store ``page.cursor`` when a page is dealt with, and go on from there after a restart.

        Parameters
        ----------
        follow : bool
            Wait for what is yet to come, for ever; otherwise end where the log ends now.
        wait_s : float
            Longest silent wait of one request.
        after, max_bytes, share
            As for :meth:`read`, which also says what is raised.
        """
        pages = self._core.tail(
            after, follow=follow, wait_s=wait_s, max_bytes=max_bytes, share=share
        )
        try:
            while True:
                try:
                    yield run_now(pages.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            run_now(pages.aclose())  # type: ignore[attr-defined]

    def status(self, replica: int = 0) -> dict[str, Any]:
        """Return what a server says of itself."""
        status: dict[str, Any] = run_now(self._core.get("/v1/status", replica=replica))
        return status

    def close(self) -> None:
        """Close the connections."""
        self._io.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The client for asyncio: methods, parameters and guarantees of :class:`Client`.

    Reading files and encoding run in threads. Cancelling :meth:`push` leaves requests that the
    server has already got.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        key: str | None = None,
        retries: Retries = Retries(),  # noqa: B008 - frozen
        zstd_level: int | None = None,
        verify: bool | str | os.PathLike[str] = True,
    ) -> None:
        self._io = TaskIo(**http_options(url, key=key, verify=verify))
        self._core = Core(self._io, url, retries=retries, zstd_level=zstd_level)

    async def push(
        self,
        source: Any,
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        in_flight: int = IN_FLIGHT,
        progress: Callable[[Pushed], None] | None = None,
    ) -> Pushed:
        """As :meth:`Client.push`."""
        return await self._core.push(
            source, max_records=max_records, max_bytes=max_bytes, in_flight=in_flight,
            progress=progress,
        )  # fmt: skip

    async def read(
        self,
        after: str | None = None,
        *,
        wait_s: float = 0.0,
        max_bytes: int | None = None,
        share: Share = _SHARE,
    ) -> Page:
        """As :meth:`Client.read`."""
        return await self._core.read(after, wait_s=wait_s, max_bytes=max_bytes, share=share)

    def tail(
        self,
        after: str | None = None,
        *,
        follow: bool = True,
        wait_s: float = WAIT_S,
        max_bytes: int | None = None,
        share: Share = _SHARE,
    ) -> AsyncIterator[Page]:
        """As :meth:`Client.tail`."""
        return self._core.tail(
            after, follow=follow, wait_s=wait_s, max_bytes=max_bytes, share=share
        )

    async def status(self, replica: int = 0) -> dict[str, Any]:
        """As :meth:`Client.status`."""
        status: dict[str, Any] = await self._core.get("/v1/status", replica=replica)
        return status

    async def close(self) -> None:
        """Close the connections."""
        await self._io.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
