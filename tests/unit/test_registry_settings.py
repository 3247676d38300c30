"""How tenants, streams and caches are written and shown; what a follower knows of a registry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.limits import GIB, KIB, MIB, Limits
from penstock.model.tenancy import CacheConfig, Entry, StreamConfig
from penstock.server.registry.control_plane import checked_url
from penstock.server.registry.entries import check_lasting, entry_path
from penstock.server.registry.mirror import Mirror, RemoteChange, RemoteChanges, RemoteSnapshot
from penstock.server.routes.cache_settings import CacheSettingsBody, cache_answer, cache_config
from penstock.server.routes.stream_settings import (
    StreamSettingsBody,
    stream_answer,
    stream_config,
)

DAY_MS = 86_400_000


def stream_of(body: dict[str, Any], now: StreamConfig | None = None) -> StreamConfig:
    return stream_config(msgspec.convert(body, StreamSettingsBody), now)


def cache_of(body: dict[str, Any], now: CacheConfig | None = None) -> CacheConfig:
    return cache_config(msgspec.convert(body, CacheSettingsBody), now)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GB", GIB), ("64MB", 64 * MIB), ("512KB", 512 * KIB), ("1GiB", GIB), (7, 7), ("8", 8)],
)
def test_a_size_is_bytes_or_has_a_unit(text: str | int, nbytes: int):
    """felix-73"""
    assert cache_of({"max_bytes": text}).max_bytes == nbytes
    assert stream_of({"event_queue_bytes": text}).event_queue_bytes == nbytes


@pytest.mark.parametrize(
    ("member", "least", "most"),
    [
        ("event_queue_depth", 1, 65_536),
        ("pub_queue_depth", 1, 65_536),
        ("publish_queue_wait_timeout_ms", 1, 600_000),
        ("disconnect_slow_ms", 0, 600_000),
        ("lag_alert_events", 0, 2**53 - 1),
        ("event_queue_bytes", 1, 2**53 - 1),
        ("retention", 0, 2**53 - 1),
    ],
)
def test_a_streams_settings_are_bounded(member: str, least: int, most: int):
    stream_of({member: least})
    stream_of({member: most})
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidArgument, match=member):
            stream_of({member: value})


@pytest.mark.parametrize("member", ["max_entries", "max_bytes"])
def test_a_caches_settings_are_bounded(member: str):
    for value in (0, -1, 2**53):
        with pytest.raises(InvalidArgument, match=member):
            cache_of({member: value})
    assert getattr(cache_of({member: 1}), member) == 1


@pytest.mark.parametrize("text", ["soon", "", "1.5s", "-1s", "7 weeks", "1GB", "9" * 30 + "d"])
def test_what_is_no_duration_is_refused_by_its_name(text: str):
    with pytest.raises(InvalidArgument, match=r"retention.*7d"):
        stream_of({"retention": text})


@pytest.mark.parametrize("text", ["much", "", "1.5GB", "-1", "1d", "9" * 30])
def test_what_is_no_size_is_refused_by_its_name(text: str):
    with pytest.raises(InvalidArgument, match=r"max_bytes.*64MiB"):
        cache_of({"max_bytes": text})


def test_what_is_left_out_stays_and_null_is_the_default_again():
    now = StreamConfig(event_queue_depth=5, pub_queue_depth=6, retention_ms=7)
    assert stream_of({}, now) == now
    changed = stream_of({"event_queue_depth": None, "retention": None, "pub_queue_depth": 9}, now)
    assert changed == StreamConfig(pub_queue_depth=9)
    bounded = CacheConfig(max_entries=5, eviction_policy="lru", durable=True)
    changed_cache = cache_of({"max_entries": None, "eviction_policy": None}, bounded)
    assert changed_cache == CacheConfig(durable=True)


def test_what_a_stream_or_cache_is_cannot_change():
    stream = Entry(kind="stream", tenant_id="t", namespace="n", name="s", stream=StreamConfig())
    for config in (StreamConfig(delivery="at_least_once"), StreamConfig(durable=True)):
        with pytest.raises(FailedPrecondition, match="cannot change"):
            check_lasting(stream, config)
    check_lasting(stream, StreamConfig(event_queue_depth=5))
    cache = Entry(
        kind="cache", tenant_id="t", namespace="n", name="c", cache=CacheConfig(durable=True)
    )
    with pytest.raises(FailedPrecondition, match="durable"):
        check_lasting(cache, CacheConfig())


def test_names_are_trimmed_and_required():
    assert entry_path(" a ") == ("a", "", "")
    assert entry_path("a", "b", "c") == ("a", "b", "c")
    for names, complaint in (
        ((None,), "tenant_id is required"),
        (("a", " "), "namespace is required"),
        (("a", "b", ""), "name is required"),
        (("a\n b",), "tenant_id has control characters"),
        (("a", "b" * 201), "namespace is longer"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            entry_path(*names)


def test_every_setting_of_a_stream_is_shown_with_its_value_and_its_origin():
    """felix-131"""
    config = StreamConfig(event_queue_depth=5, retention_ms=7 * DAY_MS, lag_alert_events=0)
    entry = Entry(kind="stream", tenant_id="t", namespace="n", name="s", stream=config)
    limits = Limits(pub_queue_depth=77)
    shown = msgspec.to_builtins(stream_answer(entry, limits))
    for name in StreamConfig.__struct_fields__:
        assert name in shown
    assert (shown["event_queue_depth"], shown["origins"]["event_queue_depth"]) == (5, "stream")
    assert (shown["lag_alert_events"], shown["origins"]["lag_alert_events"]) == (0, "stream")
    assert (shown["pub_queue_depth"], shown["origins"]["pub_queue_depth"]) == (77, "broker")
    assert shown["publish_queue_wait_timeout_ms"] == limits.publish_queue_wait_timeout_ms
    assert shown["pub_workers_per_conn"] == limits.pub_workers_per_conn
    assert (shown["delivery"], shown["ordering"]) == ("at_most_once", "per_stream")
    assert (shown["retention"], shown["retention_ms"]) == ("7d", 7 * DAY_MS)


def test_every_setting_of_a_cache_is_shown():
    """felix-57, 64, 131."""
    entry = Entry(
        kind="cache", tenant_id="t", namespace="n", name="c", cache=CacheConfig(max_entries=3)
    )
    shown = msgspec.to_builtins(cache_answer(entry, Limits()))
    for name in CacheConfig.__struct_fields__:
        assert name in shown
    assert (shown["max_entries"], shown["max_bytes"]) == (3, None)
    assert (shown["consistency"], shown["ttl_precision"]) == ("linearizable", "exact")
    assert shown["cache_memory_bytes"] == Limits().cache_memory_bytes


# -- following -----------------------------------------------------------------------------------


def tenant(name: str, revision: int) -> Entry:
    return Entry(kind="tenant", tenant_id=name, revision=revision)


def news(*changes: RemoteChange) -> RemoteChanges:
    return RemoteChanges(
        instance="i", follows=[], epoch=1, revision=changes[-1].revision, changes=list(changes)
    )


def test_a_mirror_holds_the_snapshot_and_every_change_since():
    mirror = Mirror()
    first = RemoteSnapshot(
        instance="i", follows=[], epoch=1, revision=2, entries=[tenant("a", 1), tenant("b", 2)]
    )
    mirror.take_snapshot(first)
    assert mirror.is_new
    mirror.is_new = False
    mirror.take_changes(
        news(
            RemoteChange(3, tenant("a", 3), True),
            RemoteChange(4, tenant("c", 4), False),
            RemoteChange(5, tenant("b", 5), False),
        )
    )
    assert mirror.is_new
    assert mirror.revision == 5
    assert mirror.entries() == [tenant("b", 5), tenant("c", 4)]


def test_a_mirror_without_news_stays_as_new_as_it_was():
    mirror = Mirror()
    none = RemoteChanges(instance="i", follows=[], epoch=1, revision=2, changes=[])
    mirror.take_changes(none)
    assert not mirror.is_new
    mirror.is_new = True
    mirror.take_changes(none)
    assert mirror.is_new


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "http://[::1]:8080/", "https://h/p/"])
def test_a_control_planes_address_may_be_of_a_proxy(url: str):
    assert checked_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["h:1", "ftp://h", "http://", "http://h:99999", "http://h?x=1", "http://[h", "nonsense",
     "http://me:s3cret@h", "https://s3cret@h:1/p"],
)  # fmt: skip
def test_an_address_that_is_none_or_holds_a_password_is_refused_and_not_repeated(url: str):
    with pytest.raises(InvalidArgument, match="control_plane") as refused:
        checked_url(url)
    assert "s3cret" not in refused.value.message


def test_a_retention_has_a_unit():
    """felix-125"""
    assert stream_of({"retention": "7d"}).retention_ms == 7 * DAY_MS
