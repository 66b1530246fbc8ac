"""What a URL and its options say: which store, which prefix, which cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore.store
from obstore.exceptions import BaseError

from ragged_format.arguments import check_size
from ragged_format.digest import text_digest
from ragged_format.errors import StorageError, UnsupportedFeatureError, Where
from ragged_format.shard_cache import CACHE_BYTES, ShardCache, default_cache_directory
from ragged_pipeline.stores.calls import said

__all__ = ["Location", "cache_of", "locate"]

# Options that are not the store's own configuration.
_SPECIAL = ("client_options", "retry_config", "credential_provider")
_CACHE = ("cache_dir", "cache_bytes")
# As object_store's own names; the first scheme of each line is the one that is shown.
_ALIASES = {"s3a": "s3", "gcs": "gs"}


@dataclass(frozen=True, slots=True)
class Location:
    """A prefix in a store.

    Attributes
    ----------
    store : obstore store
        Of the bucket or container.
    prefix : str
        Key below it, without slashes at the ends; may be empty.
    place : str
        The URL, without secrets.
    cache : ShardCache
    key : str
        16 hexadecimal digits that tell this place from others, in the cache.
    """

    store: Any
    prefix: str
    place: str
    cache: ShardCache
    key: str

    def scratch(self, purpose: str) -> Path:
        """Return a directory beside the cache, for files on their way up."""
        return self.cache.directory.parent / purpose


# `memory://` lives as long as the process, like fsspec's.
_memory = obstore.store.MemoryStore()


def locate(url: str, options: Mapping[str, Any]) -> Location:
    """Return what a URL names.

    Parameters
    ----------
    url : str
        ``scheme://bucket/prefix``.
    options : mapping
        Configuration of the store as obstore names it (``access_key_id``, ``endpoint``,
        ``region``, ...), which comes before the environment variables; ``client_options``,
        ``retry_config`` and ``credential_provider`` of obstore; ``cache_dir`` and ``cache_bytes``.

    Raises
    ------
    UnsupportedFeatureError
        An option, or the URL, is not one of this store (``RF-V002``).
    """
    parts = urlsplit(url)
    scheme = _ALIASES.get(parts.scheme.lower(), parts.scheme.lower())
    host = parts.netloc.rpartition("@")[2] if scheme in ("s3", "gs") else parts.netloc
    prefix = unquote(parts.path).strip("/")
    place = f"{scheme}://{host}/{prefix}".rstrip("/")
    if scheme == "memory":
        prefix = f"{host}/{prefix}".strip("/")
        place = f"memory://{prefix}"
    config = {name: value for name, value in options.items() if name not in _SPECIAL + _CACHE}
    if "//" in prefix or any(part in (".", "..") for part in prefix.split("/")):
        raise UnsupportedFeatureError(
            "the URL has an empty or relative part", where=Where(file=place),
            expected="names between single slashes", got=place, remedy="correct the URL",
        )  # fmt: skip
    if scheme == "memory":
        store: Any = _memory
    else:
        special = {name: options[name] for name in _SPECIAL if name in options}
        store = _store(scheme, host, place, config, special)
    endpoint = str(config.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", "")))
    key = text_digest(f"{endpoint}\n{place}".encode()).hex()[:16]
    return Location(store, prefix, place, cache_of(options), key)


def cache_of(options: Mapping[str, Any]) -> ShardCache:
    """Return the cache that options and environment ask for."""
    directory = Path(options.get("cache_dir") or default_cache_directory())
    size = options.get("cache_bytes")
    if size is None:
        text = os.environ.get("RAGGED_CACHE_BYTES", str(CACHE_BYTES))
        size = int(text) if text.isdecimal() else text
    check_size("cache_bytes", size)
    # In a directory of its own: what is removed from it is anything that looks like a shard.
    return ShardCache(directory.expanduser() / "shards", int(size))


def _store(
    scheme: str, host: str, place: str, config: dict[str, Any], special: dict[str, Any]
) -> Any:
    if not host:
        raise UnsupportedFeatureError(
            "the URL names no bucket", where=Where(file=place),
            expected=f"{scheme}://bucket/prefix", got=place, remedy="add the bucket",
        )  # fmt: skip
    client = dict(special.get("client_options") or {})
    if scheme == "s3":
        # Checked by the store when the object arrives.
        config.setdefault("checksum_algorithm", "sha256")
        endpoint = str(config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", ""))
        if endpoint.startswith("http://"):
            client.setdefault("allow_http", True)
    if client:
        special["client_options"] = client
    try:
        frozen = (tuple(sorted(config.items())), tuple(sorted(client.items())))
        if set(special) <= {"client_options"} and hash(frozen) is not None:
            return _shared(scheme, host, *frozen, _environment())
    except TypeError:
        pass  # values that cannot be keys: a store of its own
    return _opened(scheme, host, place, config, special)


@lru_cache(maxsize=32)
def _shared(
    scheme: str,
    host: str,
    config: tuple[tuple[str, Any], ...],
    client: tuple[tuple[str, Any], ...],
    environment: tuple[tuple[str, str], ...],  # noqa: ARG001 - a part of the key
) -> Any:
    """Return one store, with one pool of connections, for all places of a bucket."""
    special = {"client_options": dict(client)} if client else {}
    return _opened(scheme, host, f"{scheme}://{host}", dict(config), special)


def _environment() -> tuple[tuple[str, str], ...]:
    names = ("AWS_", "GOOGLE_", "AZURE_")
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(names)))


def _opened(
    scheme: str, host: str, place: str, config: dict[str, Any], special: dict[str, Any]
) -> Any:
    try:
        settings: Any = config or None
        return obstore.store.from_url(f"{scheme}://{host}", config=settings, **special)
    except (BaseError, ValueError, TypeError) as err:
        # Never the options' values: they hold secrets.
        raise UnsupportedFeatureError(
            "the store cannot be set up like this", where=Where(file=place),
            expected="a URL and options that obstore knows",
            got=f"{said(err)} (options: {', '.join(sorted(config)) or 'none'})",
            remedy="see docs/how-to/object-stores.md for URLs and options",
        ) from err  # fmt: skip
    except OSError as err:
        raise StorageError(
            "the store cannot be set up", where=Where(file=place), got=said(err),
            expected="credentials files that can be read", remedy="check the environment variables",
        ) from err  # fmt: skip
