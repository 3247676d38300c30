"""Quotas on the number of groups, named subscriptions, streams and caches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.model.progress import Reached
from penstock.model.scopes import Scope, full_name, stream_log_name
from penstock.model.streams import Start, SubscribeNamed
from penstock.model.tenancy import CacheConfig, Entry, StreamConfig
from tests.engine.durable_stream_harness import LATEST, EventReader
from tests.engine.harness import Reader
from tests.engine.quota_harness import OTHER, PROD, Tenants, quota_of
from tests.storage.faulty_vfs import FaultyVfs


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


def consume(tenants: Tenants, scope: Scope, group: str) -> str:
    """Joins a group, which is created if it is new."""
    topic = full_name(scope, "t")
    reader = Reader(topic, group, "o")
    return quota_of(tenants.call(tenants.engine.open_consumer, topic, group, "o", 0, 0, reader))


def join(tenants: Tenants, scope: Scope, name: str, start: Start = LATEST) -> str:
    """Joins a named subscription, which is created if it is new."""
    path = (*scope, "d")
    reader = EventReader(stream_log_name(path), name, "o")
    command = SubscribeNamed(path=path, name=name, owner="o", start=start)
    return quota_of(tenants.call(tenants.engine.streams.consume, command, reader))


def test_groups_and_named_subscriptions_share_a_limit() -> None:
    """felix-102: however they are created; what exists may be joined, and a deleted one frees its
    place. Another tenant notices nothing."""
    tenants = Tenants(FaultyVfs())
    for scope in (PROD, OTHER):
        tenants.add_durable(scope)
        for _ in range(3):
            tenants.publish_kept(scope)
    topic, path = full_name(PROD, "t"), (*PROD, "d")
    tenants.limit(("acme", ""), groups=3)
    assert consume(tenants, PROD, "g") == ""
    assert join(tenants, PROD, "n") == ""
    assert join(tenants, PROD, "m", Start("offset", 1)) == ""
    engine, at = tenants.engine, [Reached(0, 0)]
    for _ in range(2):
        assert consume(tenants, ("acme", "test"), "other") == "groups"
        assert join(tenants, PROD, "other") == "groups"
        assert join(tenants, PROD, "other", Start("offset", 2)) == "groups"
        assert quota_of(tenants.call(engine.set_progress, topic, "other", at)) == "groups"
        assert quota_of(tenants.call(engine.streams.advance, path, "other", 1)) == "groups"
        assert join(tenants, OTHER, "n") == ""
        assert consume(tenants, PROD, "g") == join(tenants, PROD, "n") == ""
        report = tenants.report(("acme", ""))
        assert (report.used["groups"], report.refused) == (3, {"groups": 5})
        tenants.restart()
        engine = tenants.engine
    tenants.must(engine.delete_group, stream_log_name(path), "m")
    assert consume(tenants, PROD, "h") == ""
    assert consume(tenants, PROD, "i") == "groups"
    tenants.must(engine.delete_topic, topic)
    assert join(tenants, PROD, "i") == ""


def test_the_place_of_a_consumer_is_free_again_when_its_group_was_refused(tenants: Tenants) -> None:
    tenants.limit(PROD, groups=1, subscribe_connections=2)
    assert consume(tenants, PROD, "g") == ""
    assert [consume(tenants, PROD, "h") for _ in range(5)] == ["groups"] * 5
    assert tenants.report(PROD).used["subscribe_connections"] == 1


@pytest.mark.parametrize("what", ["stream", "cache"])
def test_streams_and_caches_are_limited(tenants: Tenants, what: Any) -> None:
    """felix-102: those that exist count, and a deleted one frees its place."""
    quota = f"{what}s"

    def create(scope: Scope, name: str) -> str:
        config: Any = {"stream": StreamConfig()} if what == "stream" else {"cache": CacheConfig()}
        place: Any = {"tenant_id": scope[0], "namespace": scope[1]}
        entry = Entry(kind=what, **place, name=name, **config)
        return quota_of(tenants.call(tenants.engine.registry.create, entry))

    first = what[0]
    tenants.limit(("acme", ""), **{quota: 3})
    assert create(PROD, "one") == ""
    assert create(PROD, "two") == create(("acme", "test"), "two") == quota
    assert create(PROD, "one") == create(PROD, first) == "", "they exist with these settings"
    assert create(OTHER, "two") == ""
    assert tenants.report(("acme", "")).used[quota] == 3
    tenants.must(tenants.engine.registry.delete, what, (*PROD, first), False)
    assert create(PROD, "two") == ""
    tenants.must(tenants.engine.registry.delete, "namespace", (*PROD, ""), True)
    assert tenants.report(("acme", "")).used[quota] == 1


def test_a_control_plane_is_followed_beyond_a_limit(tenants: Tenants) -> None:
    """What exists is decided there; a follower must not differ from it."""
    tenants.limit(PROD, streams=1)
    snapshot: Any = tenants.must(tenants.engine.registry.snapshot)
    more = Entry(kind="stream", tenant_id="acme", namespace="prod", name="x", created_ms=1)
    wanted = [*snapshot.entries, msgspec.structs.replace(more, stream=StreamConfig())]
    tenants.must(tenants.engine.registry.reconcile, wanted)
    assert tenants.report(PROD).used["streams"] == 2
