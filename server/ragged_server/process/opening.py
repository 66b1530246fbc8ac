"""From settings to an open store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ragged_format.sources import open_source
from ragged_server.http.auth import load_keys
from ragged_server.store.records import Quota, StoreSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_server.settings import ServerSettings
    from ragged_server.store.store import Store

__all__ = ["opener", "store_settings"]


def opener(settings: ServerSettings) -> Callable[[], Store]:
    """Return the function that opens the store of a server, blocking while it recovers."""

    def open_store() -> Store:
        from ragged_server.store.store import Store

        store = Store(settings.directory, store_settings(settings))
        store.open()
        return store

    return open_store


def store_settings(settings: ServerSettings) -> StoreSettings:
    """Return the store's part of the settings.

    Raises
    ------
    RaggedError
        ``schema_file`` cannot be read.
    SettingsError
        The keys cannot be read (``RF-H016``).
    """
    quotas = {key.name: key.quota for key in load_keys(settings).keys if key.quota is not None}
    if settings.quota_records is not None or settings.quota_bytes is not None:
        quota = Quota(settings.quota_records, settings.quota_bytes, settings.quota_window_s)
        quotas["*"] = quota
    return StoreSettings(
        schema=_schema(settings),
        segment_bytes=settings.segment_bytes,
        segment_age_s=settings.segment_age_s,
        queue_bytes=settings.queue_bytes,
        dedupe_window_s=settings.dedupe_window_s,
        idempotency_window_s=settings.idempotency_window_s,
        retain_bytes=settings.retain_bytes,
        retain_s=settings.retain_age_s,
        retain_policy_version=settings.retain_policy_version,
        grace_s=settings.grace_s,
        quotas=quotas,
    )


def _schema(settings: ServerSettings) -> pa.Schema | None:
    if settings.schema_file is None:
        return None
    return open_source(str(settings.schema_file)).schema
