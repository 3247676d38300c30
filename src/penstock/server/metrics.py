"""Renders the metrics of the engine and the server as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.api.cluster import CopyFigures
from penstock.api.metrics import (
    CacheMetrics,
    EngineMetrics,
    HistogramCounts,
    NamedSubscriptionMetrics,
    StreamMetrics,
)
from penstock.api.quotas import QuotaReport
from penstock.api.topics import TopicReport
from penstock.model.scopes import DEFAULT_SCOPE, split_name
from penstock.server.forwarding.forwarder import Forwarder
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.dispatch import RequestDispatch


def render_metrics(dispatch: RequestDispatch) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Metrics(dispatch))
    return generate_latest(registry)


class _Metrics:
    def __init__(self, dispatch: RequestDispatch) -> None:
        self._dispatch = dispatch

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering does not collect all metrics to learn their
        names."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield _counter("penstock_requests", "Requests under /v1", self._dispatch.requests)
        yield _gauge("penstock_websockets", "Open WebSockets", self._dispatch.sockets)
        yield _counter(
            "penstock_websocket_messages",
            "Messages over WebSockets",
            self._dispatch.socket_messages,
        )
        yield from _answers(self._dispatch.answers)
        if self._dispatch.forwarder is not None:
            yield from _forwarding(self._dispatch.forwarder)
        if self._dispatch.copy_figures is not None:
            yield from _copy(self._dispatch.copy_figures())
        if not self._dispatch.is_serving:
            return
        metrics = self._dispatch.engine.metrics()
        yield from _topics(metrics.topics)
        yield from _counters(metrics)
        yield from _log(metrics)
        yield from _timings(metrics)
        yield from _streams(metrics.streams)
        yield from _named_subscriptions(metrics.named_subscriptions)
        yield from _caches(metrics.caches)
        yield _gauge("penstock_cache_watches", "Open watches", metrics.cache_watches)
        yield from _quotas(metrics.quotas)
        yield from _writes(metrics)


def _answers(budget: AnswerBudget) -> Iterator[Metric]:
    yield _gauge("penstock_answer_bytes", "Memory that answers in progress take", budget.used_bytes)
    yield _gauge(
        "penstock_answer_limit_bytes",
        "Memory that answers in progress may take together",
        budget.limit_bytes,
    )
    yield _gauge("penstock_answers_waiting", "Answers that wait for memory", budget.waiting)
    yield _counter(
        "penstock_stalled_connections",
        "Connections closed because they accepted nothing of an answer",
        budget.stalled_connections,
    )


def _forwarding(forwarder: Forwarder) -> Iterator[Metric]:
    yield _counter("penstock_forwarded", "Requests forwarded to an owner", forwarder.forwarded)
    yield _counter(
        "penstock_forwarded_unknown",
        "Forwarded requests whose outcome is not known: their connection broke",
        forwarder.unknown_outcomes,
    )
    yield _gauge("penstock_forwarding", "Requests that are being forwarded", forwarder.under_way)
    yield _gauge(
        "penstock_forwarding_waiting", "Requests that wait for an owner", forwarder.waiting
    )
    yield _gauge("penstock_forwarding_connections", "Connections to owners", forwarder.connections)


def _copy(figures: CopyFigures) -> Iterator[Metric]:
    yield _gauge(
        "penstock_copy_position", "Last message of the stream in this copy", figures.position
    )
    yield _gauge(
        "penstock_copy_sealed_position",
        "Last message of the stream in sealed and synced files here",
        figures.sealed,
    )
    yield _gauge(
        "penstock_stream_first_position",
        "First message that the stream still holds",
        figures.stream_first,
    )
    yield _counter(
        "penstock_stream_audits",
        "Comparisons of the newest message here with the stream that found it there",
        figures.audits,
    )
    yield _counter(
        "penstock_stream_faults",
        "Comparisons that found the stream too short, replaced, or with another message",
        figures.faults,
    )
    yield _counter(
        "penstock_stream_repaired_messages",
        "Messages appended again to a stream that had lost its end",
        figures.repaired,
    )
    yield _gauge(
        "penstock_copying_bytes",
        "Bytes of the copy that is being made from another broker",
        figures.copying_bytes,
    )
    yield _gauge("penstock_copied_bytes", "Bytes of that copy that are here", figures.copied_bytes)


def _topics(topics: dict[str, TopicReport]) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily("penstock_in_flight", "Deliveries under a lease", labels=[])
    behind = GaugeMetricFamily("penstock_lag", "Messages a group has not finished", labels=[])
    buffered = GaugeMetricFamily(
        "penstock_buffered_messages", "Messages the slowest group has not finished", labels=[]
    )
    for name, topic in topics.items():
        for partition in topic.partitions:
            labels = _labels(name, partition=str(partition.partition))
            buffered.add_sample(buffered.name, labels, partition.buffered_msgs)
        for group in topic.groups:
            for progress in group.partitions:
                labels = _labels(name, group=group.name, partition=str(progress.partition))
                in_flight.add_sample(in_flight.name, labels, progress.in_flight)
                behind.add_sample(behind.name, labels, progress.lag)
    yield from (in_flight, behind, buffered)


def _labels(topic: str, **more: str) -> dict[str, str]:
    """Returns the labels of a metric of a topic, given its full name. Only topics outside of the
    default namespace have a tenant and a namespace: existing dashboards keep their series."""
    scope, name = split_name(topic)
    labels = {"topic": name, **more}
    if scope != DEFAULT_SCOPE:
        labels |= {"tenant_id": scope[0], "namespace": scope[1]}
    return labels


def _counters(metrics: EngineMetrics) -> Iterator[Metric]:
    dead = CounterMetricFamily("penstock_dead_letters", "Messages moved to a DLQ", labels=[])
    for (topic, group, partition), count in metrics.dead_letters.items():
        labels = _labels(topic, group=group, partition=str(partition))
        dead.add_sample(f"{dead.name}_total", labels, count)
    rejected = CounterMetricFamily(
        "penstock_rejected",
        "Produces refused, by the topic and partition they would have gone to",
        labels=[],
    )
    for (topic, where, reason), count in metrics.rejected.items():
        labels = _labels(topic, partition=where, reason=reason)
        rejected.add_sample(f"{rejected.name}_total", labels, count)
    yield from (dead, rejected)
    yield _counter("penstock_deliveries", "Deliveries decided", metrics.deliveries)
    yield _counter(
        "penstock_redeliveries", "Deliveries that were not the first attempt", metrics.redeliveries
    )
    yield _counter("penstock_lease_lapses", "Leases that ran out", metrics.lease_lapses)
    yield _counter("penstock_router_failures", "Messages stored unrouted", metrics.router_failures)


def _quotas(reports: list[QuotaReport]) -> Iterator[Metric]:
    labels = ["tenant", "namespace", "quota"]
    limit = GaugeMetricFamily("penstock_quota_limit", "Limits of quotas", labels=labels)
    used = GaugeMetricFamily("penstock_quota_used", "Use of what a quota limits", labels=labels)
    refused = CounterMetricFamily(
        "penstock_quota_refusals", "Requests refused because of a quota", labels=labels
    )
    for report in reports:
        for name, value in msgspec.structs.asdict(report.quota).items():
            if value:
                limit.add_metric([*report.scope, name], value)
                refused.add_metric([*report.scope, name], report.refused.get(name, 0))
                if name in report.used:
                    used.add_metric([*report.scope, name], report.used[name])
    yield from (limit, used, refused)


def _log(metrics: EngineMetrics) -> Iterator[Metric]:
    yield _counter("penstock_log_commits", "Writes of the log", metrics.log_commits)
    yield _gauge("penstock_log_bytes", "Bytes the log's segments take on disk", metrics.log_bytes)
    yield _gauge("penstock_log_failed", "1 when the log cannot be written", metrics.has_log_failed)
    yield _gauge(
        "penstock_sealing_failures",
        "Sealing runs that failed since the last that succeeded",
        metrics.sealing_failures,
    )
    yield _gauge(
        "penstock_sealing_last_failure_seconds",
        "When a sealing run failed last, in seconds since 1970; 0: never",
        metrics.last_sealing_failure_ms / 1000,
    )
    yield _gauge(
        "penstock_memory_bytes",
        "Bytes of messages in memory, with pages read back",
        metrics.memory_bytes,
    )
    yield _counter("penstock_page_reads", "Pages read back from disk", metrics.page_reads)
    yield _gauge(
        "penstock_clock_ahead_seconds",
        "How far broker time is ahead of the machine's clock; below 0: behind it",
        metrics.clock_ahead_ms / 1000,
    )
    yield _gauge("penstock_idempotency_keys", "Produce keys remembered", metrics.idempotency_keys)


def _timings(metrics: EngineMetrics) -> Iterator[Metric]:
    yield _histogram(
        "penstock_commit_seconds", "Duration of a write of the log", metrics.commit_seconds
    )
    yield _histogram(
        "penstock_produce_seconds",
        "From the first decision of a commit to its answers",
        metrics.answer_seconds,
    )
    yield _histogram(
        "penstock_delivery_seconds",
        "From a message's produce to its first delivery",
        metrics.delivery_seconds,
    )


_STREAM_COUNTERS = {
    "penstock_stream_published": ("published", "Events accepted"),
    "penstock_stream_delivered": ("delivered", "Events handed to subscribers"),
    "penstock_stream_dropped": ("dropped", "Events lost for a subscriber with a full buffer"),
    "penstock_stream_refused": ("refused_publishes", "Publishes refused by a full queue"),
    "penstock_stream_lag_alerts": ("lag_alerts", "Times a subscription began to lag"),
    "penstock_stream_slow_disconnects": ("slow_disconnects", "Subscriptions ended as too slow"),
}
_STREAM_GAUGES = {
    "penstock_stream_subscribers": ("subscribers", "Open subscriptions"),
    "penstock_stream_lagging": ("lagging", "Subscriptions that lag"),
}
_CACHE_COUNTERS = {
    "penstock_cache_hits": ("hits", "Lookups that found their key"),
    "penstock_cache_misses": ("misses", "Lookups that did not find their key"),
    "penstock_cache_evictions": ("evictions", "Entries removed to make room"),
    "penstock_cache_expirations": ("expirations", "Entries removed because their time was over"),
}

_Families = list[tuple[CounterMetricFamily | GaugeMetricFamily, str]]
"""Families of metrics, each with the attribute that it shows."""


def _streams(streams: list[StreamMetrics]) -> Iterator[Metric]:
    labels = ["tenant_id", "namespace", "stream"]
    families = _families(CounterMetricFamily, _STREAM_COUNTERS, labels)
    families += _families(GaugeMetricFamily, _STREAM_GAUGES, labels)
    queued = GaugeMetricFamily("penstock_stream_queued", "Events not fanned out yet", labels=labels)
    waiting = GaugeMetricFamily(
        "penstock_stream_waiting", "Publishes that wait for the queue", labels=labels
    )
    for stream in streams:
        for family, attribute in families:
            family.add_metric(stream.path, getattr(stream.counts, attribute))
        queued.add_metric(stream.path, stream.queued)
        waiting.add_metric(stream.path, stream.waiting)
    yield from (*(family for family, _ in families), queued, waiting)


def _named_subscriptions(named: list[NamedSubscriptionMetrics]) -> Iterator[Metric]:
    labels = ["tenant_id", "namespace", "stream", "subscription"]
    behind = GaugeMetricFamily(
        "penstock_subscription_lag", "Events a named subscription has not finished", labels=labels
    )
    unacked = GaugeMetricFamily(
        "penstock_subscription_unacked", "Events delivered to it and not acked", labels=labels
    )
    for each in named:
        behind.add_metric([*each.path, each.name], each.lag)
        unacked.add_metric([*each.path, each.name], each.unacked)
    yield from (behind, unacked)


def _caches(caches: list[CacheMetrics]) -> Iterator[Metric]:
    labels = ["tenant_id", "namespace", "cache"]
    families = _families(CounterMetricFamily, _CACHE_COUNTERS, labels)
    entries = GaugeMetricFamily("penstock_cache_entries", "Entries held", labels=labels)
    nbytes = GaugeMetricFamily("penstock_cache_bytes", "Bytes that the entries take", labels=labels)
    for cache in caches:
        for family, attribute in families:
            family.add_metric(cache.path, getattr(cache, attribute))
        entries.add_metric(cache.path, cache.entries)
        nbytes.add_metric(cache.path, cache.bytes)
    yield from (*(family for family, _ in families), entries, nbytes)


def _writes(metrics: EngineMetrics) -> Iterator[Metric]:
    yield _gauge("penstock_staged_bytes", "Bytes of staged pieces", metrics.staged_bytes)
    yield _gauge("penstock_staged_pieces", "Staged pieces", metrics.staged_pieces)
    yield _gauge(
        "penstock_storing_batches", "Batches that are being stored", metrics.storing_batches
    )
    yield _counter(
        "penstock_written_rows", "Rows of batches that were stored", metrics.written_rows
    )
    yield _counter(
        "penstock_skipped_rows",
        "Rows skipped because their topic, stream or cache no longer exists",
        metrics.skipped_rows,
    )


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    described: dict[str, tuple[str, str]],
    labels: list[str],
) -> _Families:
    return [
        (kind(name, text, labels=labels), attribute)
        for name, (attribute, text) in described.items()
    ]


def _histogram(name: str, text: str, histogram: HistogramCounts) -> Metric:
    total, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, histogram.total)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
