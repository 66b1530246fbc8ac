"""The server's log as a source of records: for ``rf.open_source`` and for on-line loaders."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from ragged_format.decoding import Projection
from ragged_format.errors import DatasetNotFoundError, LimitExceededError, RaggedError, Where
from ragged_format.parse import parse_schema
from ragged_server.client import Client, Retries, Share
from ragged_server.client._core import base_url

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import RaggedSchema
    from ragged_format.torch.tail import Page

__all__ = ["ServerSource", "ServerTail", "open_url"]

_NUMBERS = ("rank", "world_size", "min_policy_version", "max_bytes")


class ServerTail:
    """A server's log for :class:`ragged_format.torch.OnlineLoader`; it has no end.

    Guarantees: a read that fails is repeated, as long as `retries` allow, so that the server may
    restart. The cursor belongs to the log: on another one, reading it is an error.

    Parameters
    ----------
    url : str or sequence of str
        Of the server, or of replicas.
    rank, world_size : int
        Share of the records; the records of one group are in one share.
    min_policy_version : int, optional
        Older records are left out by the server.
    max_bytes : int, optional
        About the most bytes of one read.
    key, retries, zstd_level, verify
        As for :class:`ragged_server.client.Client`.
    identity : str, optional
        Name of the log in a loader's state; by default URL and share. Give one where the server's
        address may change.

    Examples
    --------
    >>> ServerTail("http://trainer-7:8080/", rank=1, world_size=4).identity
    'http://trainer-7:8080 1/4'
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        min_policy_version: int | None = None,
        max_bytes: int | None = None,
        identity: str | None = None,
        key: str | None = None,
        retries: Retries = Retries(),  # noqa: B008 - frozen
        zstd_level: int | None = None,
        verify: bool | str = True,
    ) -> None:
        self._share = Share(rank, world_size, min_policy_version)
        self._max_bytes = max_bytes
        self._options: dict[str, Any] = {
            "key": key, "retries": retries, "zstd_level": zstd_level, "verify": verify,
        }  # fmt: skip
        self._urls = [base_url(place) for place in ([url] if isinstance(url, str) else url)]
        self._client: Client | None = None
        share = f" {rank}/{world_size}" if world_size > 1 else ""
        self.identity = identity or ",".join(self._urls) + share

    def read(self, after: str | None, *, wait_s: float) -> Page:
        """Return what follows a cursor, waiting up to `wait_s` for it; ``None`` is the oldest."""
        # The loader that calls has PyTorch; whoever only makes a tail need not.
        from ragged_format.torch.tail import Page

        page = self.client.read(after, wait_s=wait_s, max_bytes=self._max_bytes, share=self._share)
        return Page(page.batches, page.cursor)

    @property
    def client(self) -> Client:
        """The client that reads; made when it is first used, in the process that uses it."""
        if self._client is None:
            self._client = Client(self._urls, **self._options)
            # Not __del__: at exit, what closes connections may be gone before the tail is.
            weakref.finalize(self, self._client.close)
        return self._client

    def close(self) -> None:
        """Close the connections; reading opens them again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __getstate__(self) -> dict[str, Any]:
        # Connections stay in their process.
        return {**self.__dict__, "_client": None}


class ServerSource:
    """The records that a server has now, as a source that ends; :meth:`tail` follows it.

    Guarantees: every iteration reads anew, from the cursor of the URL or the oldest record to
    where the log ends when it gets there.

    Parameters
    ----------
    url : str
        Of the server or of its samples, with the parameters ``after``, ``rank``, ``world_size``,
        ``min_policy_version`` and ``max_bytes`` if need be.
    """

    num_rows: int | None = None
    is_random_access = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._share, self._after, self._max_bytes = _wanted(url)
        self._client = Client(base_url(url))
        weakref.finalize(self, self._client.close)
        self._schema: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """Schema of the log."""
        if self._schema is None:
            self._schema = self._client.read(self._after, max_bytes=1, share=self._share).schema
        if self._schema is None:
            raise DatasetNotFoundError(
                "the server has no samples yet, and so no schema", where=Where(file=self._url),
                expected="a log with samples", got="an empty one",
                remedy="push samples, or start the server with --schema",
            )  # fmt: skip
        return self._schema

    @property
    def ragged_schema(self) -> RaggedSchema:
        """Declarations of the batches."""
        return parse_schema(self.schema)

    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return an iterator over the records up to the end that the log has then."""
        projection = Projection(self.ragged_schema, self.schema, columns)
        return self._records(projection)

    def _records(self, projection: Projection) -> Iterator[pa.RecordBatch]:
        # Holds the source, which would else close its connections under the iterator.
        for page in self._client.tail(
            self._after, follow=False, max_bytes=self._max_bytes, share=self._share
        ):
            yield from map(projection.apply, page.batches)

    def tail(self) -> ServerTail:
        """Return the log as one that is followed for ever."""
        if self._after is not None:
            raise LimitExceededError(
                "a loader has the cursor in its state", where=Where(file=self._url),
                expected="no parameter 'after'", got=self._after,
                remedy="resume the loader from its state",
            )  # fmt: skip
        return ServerTail(
            self._url, rank=self._share.rank, world_size=self._share.world_size,
            min_policy_version=self._share.min_policy_version, max_bytes=self._max_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def open_url(url: str) -> ServerSource:
    """Open a server's log for ``rf.open_source("http://host:8080/v1/samples")``.

    Raises
    ------
    UnsupportedFeatureError
        The URL is none of a server (``RF-V002``).
    LimitExceededError
        A parameter of the URL is unknown or out of its range (``RF-L001``).
    """
    return ServerSource(url)


def _wanted(url: str) -> tuple[Share, str | None, int | None]:
    """Return the share, cursor and page size that the parameters of a URL name."""
    params = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    after = params.pop("after", None)
    numbers: dict[str, int] = {}
    for name, text in params.items():
        if name not in _NUMBERS or not text.lstrip("-").isdecimal():
            raise _unknown(url, name, text)
        numbers[name] = int(text)
    max_bytes = numbers.pop("max_bytes", None)
    try:
        return Share(**numbers), after, max_bytes
    except RaggedError as err:
        raise err.at(Where(file=url)) from None


def _unknown(url: str, name: str, text: str) -> LimitExceededError:
    return LimitExceededError(
        "a parameter of the URL cannot be read", where=Where(file=url),
        expected=f"after=CURSOR, or a number for {', '.join(_NUMBERS)}", got=f"{name}={text}",
    )  # fmt: skip
