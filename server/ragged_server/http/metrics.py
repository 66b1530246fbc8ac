"""Prometheus metrics of one application, in a registry of their own.

Where a server has several workers, their figures lie in mapped files of one directory, which an
environment variable names to the library; whichever worker is asked adds them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ragged_server.store.records import StoreStatus

__all__ = ["CONTENT_TYPE", "METRICS_DIRECTORY", "Metrics"]

# Variable of the environment that names the directory of the workers' figures.
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BYTES = tuple(float(4**power) for power in range(5, 15))

# Of StoreStatus: metric, help; counters end in _total.
_STORE = {
    "records": ("ragged_log_records", "Records retained."),
    "bytes": ("ragged_log_bytes", "Bytes of the files of the log and its shards."),
    "segments": ("ragged_log_segments", "Log segments that are not sealed."),
    "shards": ("ragged_log_shards", "Sealed shards."),
    "next_sequence": ("ragged_log_next_sequence", "Sequence of the next record."),
    "oldest_sequence": ("ragged_log_oldest_sequence", "Sequence of the oldest record retained."),
    "queue_requests": ("ragged_queue_requests", "Requests that wait for the disk."),
    "queue_bytes": ("ragged_queue_bytes", "Bytes that wait for the disk."),
    "index_ids": ("ragged_index_ids", "Sample ids in the index."),
    "index_bytes": ("ragged_index_bytes", "Bytes of the index."),
    "policy_version": ("ragged_policy_version", "Newest policy version seen."),
    "stored": ("ragged_stored_records_total", "Records stored since the server started."),
    "duplicates": ("ragged_duplicate_records_total", "Records that were there already."),
    "conflicts": ("ragged_conflicts_total", "Requests refused for an id with other content."),
    "tokens": ("ragged_stored_tokens_total", "Tokens stored since the server started."),
    "scored_tokens": ("ragged_stored_scored_tokens_total", "Scored tokens stored."),
    "poisoned_segments": (
        "ragged_poisoned_segments_total",
        "Segments given up after a sync failed.",
    ),
    "commits": ("ragged_commits_total", "Group commits since the log began."),
}


class Metrics:
    """Counters and histograms of the HTTP side, and what the store states about itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "ragged_http_requests", "Answered requests.", ("route", "method", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "ragged_http_request_seconds", "Time from the header to the end of the answer.",
            ("route", "method"), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            "ragged_http_refused", "Refused requests by the code of the problem.", ("code",),
            registry=self.registry,
        )  # fmt: skip
        self.received = Counter(
            "ragged_received_bytes", "Bytes of bodies as sent.", registry=self.registry
        )
        self.sent = Counter(
            "ragged_read_bytes", "Bytes of answers to reads, as sent.", registry=self.registry
        )
        self.sent_records = Counter(
            "ragged_read_records", "Records of answers to reads.", registry=self.registry
        )
        self.sizes = Histogram(
            "ragged_request_bytes", "Size of bodies as sent.", buckets=_BYTES,
            registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "ragged_in_flight_bytes", "Bytes reserved for bodies.", registry=self.registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.ready = Gauge(
            "ragged_ready", "1 if the server takes samples.", registry=self.registry,
            multiprocess_mode="livemostrecent",
        )  # fmt: skip
        if folder := os.environ.get(METRICS_DIRECTORY):
            self.registry = CollectorRegistry(auto_describe=False)
            MultiProcessCollector(self.registry, folder)  # type: ignore[no-untyped-call]

    def observe(self, status: Callable[[], StoreStatus]) -> None:
        """Take figures of the store into the registry, asked for at each scrape."""
        self.registry.register(_OfStore(status))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _OfStore(Collector):
    def __init__(self, status: Callable[[], StoreStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, (metric, text) in _STORE.items():
            value = getattr(status, name)
            if value is None:
                continue
            family = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
            yield family(metric.removesuffix("_total"), text, value=float(value))
        yield GaugeMetricFamily(
            "ragged_storage_failed", "1 if the disk takes no writes.",
            value=float(status.failure is not None),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "ragged_upkeep_failed", "1 if sealing or removing fails; it is tried again.",
            value=float(status.upkeep_failure is not None),
        )  # fmt: skip
        if status.last_commit_s is not None:
            yield GaugeMetricFamily(
                "ragged_last_commit_timestamp_seconds", "Time of the last commit.",
                value=status.last_commit_s,
            )  # fmt: skip
