"""The metrics of an embedded engine, read from counters that its parts keep."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.api.metrics import CacheMetrics, EngineMetrics, NamedSubscriptionMetrics
from penstock.core.cache import Cache
from penstock.core.topics import Topic
from penstock.engine.maintenance import Maintenance
from penstock.engine.report import lag, report_topic
from penstock.engine.wiring import Parts
from penstock.model.scopes import is_stream_log, split_name


def measure(parts: Parts, maintenance: Maintenance, router_failures: int) -> EngineMetrics:
    dispatcher, ledger, log, window = parts.dispatcher, parts.ledger, parts.log, parts.window
    sealing, writes = parts.sealing, parts.writes
    return EngineMetrics(
        topics={
            name: report_topic(topic, dispatcher.consumer_count)
            for name, topic in parts.state.topics.items()
            if not is_stream_log(name)
        },
        dead_letters=dict(parts.dead_letters.counts),
        rejected=dict(parts.producing.rejected),
        deliveries=dispatcher.deliveries,
        redeliveries=dispatcher.redeliveries,
        lease_lapses=maintenance.lapses,
        router_failures=router_failures,
        log_commits=log.commits,
        log_bytes=log.size_bytes,
        has_log_failed=log.failed is not None,
        sealing_failures=sealing.failures if sealing is not None else 0,
        last_sealing_failure_ms=sealing.last_failure_ms if sealing is not None else 0,
        memory_bytes=window.used_bytes + window.page_bytes,
        page_reads=parts.pages.reads,
        clock_ahead_ms=parts.clock.ahead_ms(),
        idempotency_keys=len(parts.state.produced),
        commit_seconds=ledger.commit_seconds.snapshot(),
        answer_seconds=ledger.answer_seconds.snapshot(),
        delivery_seconds=dispatcher.delivery_seconds.snapshot(),
        streams=parts.streams.metrics(),
        named_subscriptions=[
            subscription
            for name, topic in parts.state.topics.items()
            if is_stream_log(name)
            for subscription in _named(topic)
        ],
        caches=[_cache(cache) for cache in parts.caches.all() if _is_used(cache)],
        cache_watches=parts.caches.watches.count,
        quotas=parts.quotas.metrics(),
        staged_bytes=writes.staging.bytes,
        staged_pieces=writes.staging.pieces,
        storing_batches=writes.storing,
        written_rows=writes.batches.rows,
        skipped_rows=writes.batches.skipped,
    )


def _named(log: Topic) -> Iterator[NamedSubscriptionMetrics]:
    scope, stream = split_name(log.name)
    for group in log.groups.values():
        (progress,) = group.progress
        yield NamedSubscriptionMetrics(
            (*scope, stream), group.name, lag(group, progress), len(progress.unfinished)
        )


def _is_used(cache: Cache) -> bool:
    return bool(cache.entries or cache.hits or cache.misses)


def _cache(cache: Cache) -> CacheMetrics:
    return CacheMetrics(
        cache.path,
        cache.hits,
        cache.misses,
        cache.evictions,
        cache.expirations,
        len(cache.entries),
        cache.bytes,
    )
