"""Places that are limited: many who ask at once are not all let in before one of them counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.model.caching import Watch
from penstock.model.errors import ResourceExhausted
from penstock.model.scopes import full_name, stream_log_name
from penstock.model.streams import Start, Subscribe, SubscribeNamed
from tests.engine.cache_harness import Watcher
from tests.engine.durable_stream_harness import EventReader
from tests.engine.harness import Reader
from tests.engine.quota_harness import PROD, Tenants, quota_of
from tests.engine.stream_harness import Listener
from tests.storage.faulty_vfs import FaultyVfs

Open = Callable[[Tenants, int], list[Any]]
PATH = (*PROD, "d")


def consume(tenants: Tenants, number: int) -> list[Any]:
    topic, group = full_name(PROD, "t"), f"g{number}"
    reader = Reader(topic, group, "o")
    return tenants.submit(tenants.engine.open_consumer, topic, group, "o", 1000, 0, reader)


def named(tenants: Tenants, number: int) -> list[Any]:
    start, reader = Start("latest"), EventReader(stream_log_name(PATH), "same", f"o{number}")
    command = SubscribeNamed(path=PATH, name="same", owner=f"o{number}", start=start)
    return tenants.submit(tenants.engine.streams.consume, command, reader)


def named_anew(tenants: Tenants, number: int) -> list[Any]:
    name = f"n{number}"
    reader = EventReader(stream_log_name(PATH), name, "o")
    command = SubscribeNamed(path=PATH, name=name, owner="o", start=Start("offset", 1))
    return tenants.submit(tenants.engine.streams.consume, command, reader)


def replay(tenants: Tenants, number: int) -> list[Any]:
    command = Subscribe(path=PATH, start=Start("time", number))
    return tenants.submit(tenants.engine.streams.subscribe, command, Listener(stalled=True))


def subscribe(tenants: Tenants, number: int) -> list[Any]:
    return tenants.submit(tenants.engine.streams.subscribe, Subscribe(path=PATH), Listener())


def watch(tenants: Tenants, number: int) -> list[Any]:
    command = Watch(path=(*PROD, "c"), key=f"k{number}")
    return tenants.submit(tenants.engine.caches.watch, command, Watcher())


@pytest.fixture
def tenants() -> Tenants:
    found = Tenants(FaultyVfs())
    found.add_durable(PROD)
    for _ in range(3):
        found.publish_kept(PROD)
    found.limit(PROD, subscribe_connections=3)
    return found


def used(tenants: Tenants) -> int:
    return tenants.report(PROD).used["subscribe_connections"]


@pytest.mark.parametrize("ask", [consume, named, named_anew, replay, subscribe, watch])
def test_of_many_that_ask_at_once_only_as_many_open_as_may(tenants: Tenants, ask: Open) -> None:
    """felix-99: they are all asked for before the first one is durable."""
    tenants.hold_writes()
    asked = [ask(tenants, number) for number in range(40)]
    tenants.disk.release()
    tenants.settle()
    outcomes = [outcome for (outcome,) in asked]
    opened = [each for each in outcomes if not isinstance(each, ResourceExhausted)]
    assert len(opened) == 3
    assert {quota_of(each) for each in outcomes} == {"", "subscribe_connections"}
    assert used(tenants) == 3
    opened[0].close()
    assert used(tenants) == 2
    (again,) = _settled(tenants, ask(tenants, 99))
    assert quota_of(again) == ""
    for each in (*opened, again):
        each.close()
    assert used(tenants) == 0


def test_a_place_is_given_back_when_nothing_opens(tenants: Tenants) -> None:
    """felix-99."""
    log = tenants.log
    has_room, log.has_room = log.has_room, lambda *_, **__: False
    assert not hasattr(_settled(tenants, consume(tenants, 1))[0], "close")
    assert not hasattr(_settled(tenants, named_anew(tenants, 1))[0], "close")
    log.has_room = has_room
    command = Subscribe(path=PATH, start=Start("offset", 99))
    tenants.call(tenants.engine.streams.subscribe, command, Listener())
    assert used(tenants) == 0
    tenants.hold_writes()
    waiting = consume(tenants, 1)
    assert used_now(tenants) == 1
    tenants.submit(tenants.engine.delete_topic, full_name(PROD, "t"))
    tenants.disk.release()
    assert not hasattr(_settled(tenants, waiting)[0], "close")
    assert used(tenants) == 0


def used_now(tenants: Tenants) -> int:
    """The use, without waiting for the log."""
    (report,) = tenants.engine.quotas.metrics()
    return report.used["subscribe_connections"]


def _settled(tenants: Tenants, outcomes: list[Any]) -> list[Any]:
    tenants.settle()
    return outcomes
