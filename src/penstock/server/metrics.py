"""What the broker tells Prometheus; read from counters that the work keeps anyway."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.histogram import BOUNDS, Histogram
from penstock.engine.report import lag
from penstock.server.hub import Hub


class Metrics:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Asked for at registration; the names depend on nothing that is known then."""
        return []

    def collect(self) -> Iterator[Metric]:
        engine = self._hub.engine
        yield _counter("penstock_requests", "Requests under /v1", self._hub.requests)
        yield _gauge("penstock_websockets", "WebSockets that are open", self._hub.sockets)
        yield _counter(
            "penstock_websocket_messages", "Messages over WebSockets", self._hub.socket_messages
        )
        if isinstance(engine, EmbeddedEngine):
            yield from _topics(engine)
            yield from _counters(engine)
            yield from _log(engine)
            yield from _timings(engine)
            yield from _streams(engine)
            yield from _caches(engine)
            yield from _writes(engine)


def _topics(engine: EmbeddedEngine) -> Iterator[Metric]:
    by_group = ["topic", "group", "partition"]
    in_flight = GaugeMetricFamily("penstock_in_flight", "Deliveries under a lease", labels=by_group)
    behind = GaugeMetricFamily("penstock_lag", "Messages a group has not finished", labels=by_group)
    buffered = GaugeMetricFamily(
        "penstock_buffered_messages",
        "Messages the slowest group has not finished",
        labels=["topic", "partition"],
    )
    for topic in engine.parts.state.topics.values():
        for partition in topic.partitions:
            labels = [topic.name, str(partition.index)]
            buffered.add_metric(labels, partition.backlog.buffered_msgs())
        for group in topic.groups.values():
            for progress in group.progress:
                labels = [topic.name, group.name, str(progress.partition)]
                in_flight.add_metric(labels, progress.in_flight)
                behind.add_metric(labels, lag(group, progress))
    yield from (in_flight, behind, buffered)


def _counters(engine: EmbeddedEngine) -> Iterator[Metric]:
    dead = CounterMetricFamily(
        "penstock_dead_letters", "Messages moved to a DLQ", labels=["topic", "group", "partition"]
    )
    for (topic, group, partition), count in engine.parts.burials.counts.items():
        dead.add_metric([topic, group, str(partition)], count)
    rejected = CounterMetricFamily(
        "penstock_rejected", "Produces refused", labels=["topic", "partition", "reason"]
    )
    for labels, count in engine.rejected.items():
        rejected.add_metric(labels, count)
    yield from (dead, rejected)
    dispatcher = engine.parts.dispatcher
    yield _counter("penstock_deliveries", "Deliveries decided", dispatcher.deliveries)
    yield _counter("penstock_redeliveries", "Of those, not the first", dispatcher.redeliveries)
    yield _counter("penstock_lease_lapses", "Leases that ran out", engine.upkeep.lapses)
    failures = engine.routing.failures if engine.routing is not None else 0
    yield _counter("penstock_router_failures", "Messages stored unrouted", failures)


def _log(engine: EmbeddedEngine) -> Iterator[Metric]:
    log, state = engine.parts.log, engine.parts.state
    yield _counter("penstock_log_commits", "Writes of the log", log.commits)
    yield _gauge("penstock_log_bytes", "Bytes the log's segments take on disk", log.size_bytes)
    yield _gauge("penstock_log_failed", "1 when the log cannot be written", log.failed is not None)
    yield _gauge(
        "penstock_memory_bytes", "Bytes of messages in memory", engine.parts.window.used_bytes
    )
    yield _counter("penstock_page_reads", "Pages read back from disk", engine.parts.pages.reads)
    yield _gauge("penstock_idempotency_keys", "Produce keys remembered", len(state.produced))


def _timings(engine: EmbeddedEngine) -> Iterator[Metric]:
    ledger = engine.parts.ledger
    yield _histogram(
        "penstock_commit_seconds", "From a write of the log to its end", ledger.commit_seconds
    )
    yield _histogram(
        "penstock_produce_seconds",
        "From the first decision of a commit to its answers",
        ledger.answer_seconds,
    )
    yield _histogram(
        "penstock_delivery_seconds",
        "From a message's produce to its first delivery",
        engine.parts.dispatcher.delivery_seconds,
    )


_STREAM_COUNTERS = {
    "penstock_stream_published": ("published", "Events accepted"),
    "penstock_stream_delivered": ("delivered", "Events handed to subscribers"),
    "penstock_stream_dropped": ("dropped", "Events lost for a subscriber with a full buffer"),
    "penstock_stream_refused": ("refused_publishes", "Publishes refused by a full queue"),
    "penstock_stream_lag_alerts": ("lag_alerts", "Times that a subscription began to lag"),
    "penstock_stream_slow_disconnects": ("slow_disconnects", "Subscriptions ended as too slow"),
}
_STREAM_GAUGES = {
    "penstock_stream_subscribers": ("subscribers", "Open subscriptions"),
    "penstock_stream_lagging": ("lagging", "Subscriptions that lag"),
}
_CACHE_COUNTERS = {
    "penstock_cache_hits": ("hits", "Keys that were there"),
    "penstock_cache_misses": ("misses", "Keys that were not"),
    "penstock_cache_evictions": ("evictions", "Entries removed to make room"),
    "penstock_cache_expirations": ("expirations", "Entries found to be over"),
}

_Families = list[tuple[CounterMetricFamily | GaugeMetricFamily, str]]
"""Each with the attribute that it shows."""


def _streams(engine: EmbeddedEngine) -> Iterator[Metric]:
    """Of every stream that has been used."""
    labels = ["tenant_id", "namespace", "stream"]
    families = _families(CounterMetricFamily, _STREAM_COUNTERS, labels)
    families += _families(GaugeMetricFamily, _STREAM_GAUGES, labels)
    queued = GaugeMetricFamily("penstock_stream_queued", "Events not fanned out yet", labels=labels)
    waiting = GaugeMetricFamily(
        "penstock_stream_waiting", "Publishes that wait for the queue", labels=labels
    )
    for report in engine.streams.reports():
        for family, attribute in families:
            family.add_metric(report.path, getattr(report.counts, attribute))
        queued.add_metric(report.path, report.queued)
        waiting.add_metric(report.path, report.waiting)
    yield from (*(family for family, _ in families), queued, waiting)


def _caches(engine: EmbeddedEngine) -> Iterator[Metric]:
    """Of every cache that has been used."""
    labels = ["tenant_id", "namespace", "cache"]
    families = _families(CounterMetricFamily, _CACHE_COUNTERS, labels)
    entries = GaugeMetricFamily("penstock_cache_entries", "Entries held", labels=labels)
    nbytes = GaugeMetricFamily("penstock_cache_bytes", "Bytes that they take", labels=labels)
    for cache in engine.caches.all():
        if cache.entries or cache.hits or cache.misses:
            for family, attribute in families:
                family.add_metric(cache.path, getattr(cache, attribute))
            entries.add_metric(cache.path, len(cache.entries))
            nbytes.add_metric(cache.path, cache.bytes)
    yield from (*(family for family, _ in families), entries, nbytes)
    yield _gauge("penstock_cache_watches", "Open watches", engine.caches.watches.count)


def _writes(engine: EmbeddedEngine) -> Iterator[Metric]:
    staging, drain = engine.writes.staging, engine.writes.drain
    yield _gauge("penstock_staged_bytes", "Bytes of staged pieces", staging.bytes)
    yield _gauge("penstock_staged_pieces", "Pieces that are staged", staging.pieces)
    yield _gauge("penstock_storing_batches", "Batches that are stored", engine.writes.storing)
    yield _counter("penstock_written_rows", "Rows of batches that were stored", drain.rows)
    yield _counter("penstock_skipped_rows", "Rows whose topic or cache had gone", drain.skipped)


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    described: dict[str, tuple[str, str]],
    labels: list[str],
) -> _Families:
    return [
        (kind(name, text, labels=labels), attribute)
        for name, (attribute, text) in described.items()
    ]


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    total, buckets = 0, []
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, histogram.total)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
