"""Which shards a log no longer keeps."""

from __future__ import annotations

from collections.abc import Sequence

from ragged_server.store.records import StoreSettings
from ragged_server.store.shards import SealedShard

__all__ = ["expired"]


def expired(
    shards: Sequence[SealedShard], total_bytes: int, settings: StoreSettings, now: float
) -> list[SealedShard]:
    """Return the shards to remove: whole ones, from the oldest on.

    Parameters
    ----------
    shards : sequence of SealedShard
        In order.
    total_bytes : int
        Of all shards and segments.
    settings : StoreSettings
        ``retain_bytes``, ``retain_s`` and ``retain_policy_version`` count.
    now : float
        Seconds since 1970.
    """
    out: list[SealedShard] = []
    for shard in shards:
        facts = shard.facts
        version = facts.policy_version
        if not (
            (settings.retain_bytes is not None and total_bytes > settings.retain_bytes)
            or (settings.retain_s is not None and facts.last_s < now - settings.retain_s)
            or (
                settings.retain_policy_version is not None
                and version is not None
                and version < settings.retain_policy_version
            )
        ):
            break
        out.append(shard)
        total_bytes -= shard.nbytes
    return out
