"""Paths of streams and caches, and feeds on a connection with no socket under it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.model.errors import InvalidArgument
from penstock.model.streams import Lag
from penstock.server import commands
from penstock.server.routes import router
from penstock.server.routes.table import path_route, path_router
from tests.unit.memory_connection import MemoryConnection, on_a_connection

HERE = b"/v1/tenants/t/namespaces/n"
SUBSCRIBE = b"/v1/tenants/default/namespaces/default/streams/default/subscribe"
WATCH = b"/v1/tenants/default/namespaces/default/caches/default/watch?prefix="


def get(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (b"/streams/s/publish", {b"POST"}),
        (b"/streams/s/publish_batch", {b"POST"}),
        (b"/streams/s/subscribe", {b"GET"}),
        (b"/streams/s/subscriptions", {b"GET"}),
        (b"/streams/s/records", {b"GET"}),
        (b"/caches/c/entries", {b"GET"}),
        (b"/caches/c/entries/k", {b"GET", b"PUT", b"DELETE"}),
        (b"/caches/c/entries/k/incr", {b"POST"}),
        (b"/caches/c/get_many", {b"POST"}),
        (b"/caches/c/txn", {b"POST"}),
        (b"/caches/c/watch", {b"GET"}),
    ],
)
def test_a_path_means_the_same_whether_it_is_known_or_not(path: bytes, methods: set[bytes]) -> None:
    path_router._known.clear()
    for _ in range(2):
        found = path_route(HERE + path)
        assert found is not None
        assert set(found) == methods


@pytest.mark.parametrize(
    "path",
    [b"/caches/c/entry", b"/caches/c/entries/k/v", b"/caches/c/zap", b"/streams/s/entries/k",
     b"/streams/s/publish/", b"/topics/t/publish", b"/caches/c/entries/k/incr/x"],
)  # fmt: skip
def test_a_path_that_is_none_stays_none_when_its_neighbours_are_known(path: bytes) -> None:
    for _ in range(2):
        assert path_route(HERE + path) is None
        path_route(HERE + b"/caches/c/entries/k")
        path_route(HERE + b"/streams/s/publish")


def test_names_in_a_path_are_checked() -> None:
    for path in (b"/v1/tenants/%20/namespaces/n/caches/c/txn", HERE + b"/caches/%ff/txn"):
        with pytest.raises(InvalidArgument):
            path_route(path)


def test_the_number_of_remembered_paths_is_bounded() -> None:
    """Whoever asks for many different ones takes no memory with it."""
    for n in range(2 * router.MAX_KNOWN):
        path_route(HERE + b"/caches/c%d/entries/k" % n)
        assert len(path_router._known) <= router.MAX_KNOWN
        assert len(commands._paths) <= commands.MAX_KNOWN_PATHS
    before = len(path_router._known)
    path_route(HERE + b"/caches/%b/entries/k" % (b"%20" * 2000 + b"c"))
    assert len(path_router._known) == before


# -- feeds -----------------------------------------------------------------------------------------


class Handle:
    """A subscription or a watch that says whether it was closed."""

    def __init__(self) -> None:
        self.id = "w1"
        self.version = 1
        self.is_closed = False

    def take(self, max_events: int) -> list[Any]:
        return []

    def close(self) -> None:
        self.is_closed = True


def lines(connection: MemoryConnection) -> list[Any]:
    """What was written after the head, in chunks."""
    _, _, body = connection.transport.written.partition(b"\r\n\r\n")
    return [json.loads(line) for line in body.split(b"\r\n") if line[:1] == b"{"]


@pytest.mark.parametrize("kind", ["subscribe", "watch"])
def test_what_opens_after_its_reader_has_gone_is_closed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """felix-41"""

    async def test(connection: MemoryConnection) -> None:
        held: list[Any] = []
        part = connection.engine.streams if kind == "subscribe" else connection.engine.caches
        monkeypatch.setattr(part, kind, lambda command, sink, done: held.append(done))
        connection.protocol.data_received(get(SUBSCRIBE if kind == "subscribe" else WATCH))
        connection.protocol.connection_lost(None)
        handle = Handle()
        held[0](handle)
        assert handle.is_closed
        assert connection.transport.written == b""

    on_a_connection(test)


def test_what_opens_for_half_a_connection_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """felix-41: nothing else would ever tell that this client is gone."""

    async def test(connection: MemoryConnection) -> None:
        held: list[Any] = []
        monkeypatch.setattr(
            connection.engine.caches, "watch", lambda command, sink, done: held.append(done)
        )
        connection.protocol.data_received(get(WATCH))
        assert connection.protocol.eof_received()
        handle = Handle()
        held[0](handle)
        assert handle.is_closed
        assert connection.transport.closed

    on_a_connection(test)


def test_a_full_connection_takes_nothing_until_there_is_room() -> None:
    """felix-20, felix-116: what waits is told in order then, and of lag only the latest."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(get(SUBSCRIBE + b"?lag=true"))
        feed, subscription = protocol.stream, protocol.stream._source._subscription
        taken: list[int] = []
        batch = SimpleNamespace(payloads=[b"x"], encoded={}, offset=-1)
        waiting = [SimpleNamespace(batch=batch, start=0, end=1, offset=-1)]

        def take(max_events: int) -> list[Any]:
            taken.append(max_events)
            runs, waiting[:] = waiting[:], []
            return runs

        protocol.stream._source._subscription = SimpleNamespace(
            id="s1", take=take, close=subscription.close
        )
        protocol.pause_writing()
        feed.wake()
        feed.lagging(_lag(alert=True))
        feed.lagging(_lag(alert=False))
        assert (taken, len(lines(connection))) == ([], 1)
        protocol.resume_writing()
        assert [line["type"] for line in lines(connection)] == ["subscribed", "lag", "event"]
        assert lines(connection)[1]["alert"] is False

    on_a_connection(test)


@pytest.mark.parametrize(
    ("size", "least", "most"), [(1, 500, 1024), (10_000, 3, 6), (100_000, 1, 1)]
)
def test_a_write_holds_as_much_as_the_events_before_it_say(
    size: int, least: int, most: int
) -> None:
    """felix-26: what is handed to a connection is bounded, as what waits for it is."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(get(SUBSCRIBE))
        taken: list[int] = []
        batch = SimpleNamespace(payloads=[b"x" * size], encoded={}, offset=-1)
        waiting = [SimpleNamespace(batch=batch, start=0, end=1, offset=-1)] * 3

        def take(max_events: int) -> list[Any]:
            taken.append(max_events)
            return [waiting.pop()] if waiting else []

        close = protocol.stream._source._subscription.close
        protocol.stream._source._subscription = SimpleNamespace(id="s1", take=take, close=close)
        protocol.stream.wake()
        assert taken[0] == 1
        assert all(least <= count <= most for count in taken[1:]), taken

    on_a_connection(test)


def test_a_full_connection_gets_no_heartbeats() -> None:
    """They would pile up for a reader that does not read."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(get(SUBSCRIBE + b"?heartbeat_ms=100"))
        written = connection.transport.written
        protocol.pause_writing()
        protocol.stream.beat()
        assert connection.transport.written == written
        protocol.resume_writing()
        protocol.stream.beat()
        assert connection.transport.written != written

    on_a_connection(test)


def _lag(*, alert: bool) -> Lag:
    return Lag(
        subscription_id="s1",
        messages_behind=1,
        dropped=0,
        delivered=0,
        event_queue_depth=2,
        alert=alert,
        since_ms=0,
    )


def test_no_feed_begins_on_a_broker_that_stops() -> None:
    async def test(connection: MemoryConnection) -> None:
        connection.dispatch.is_draining = True
        connection.protocol.data_received(get(SUBSCRIBE))
        assert connection.transport.written.startswith(b"HTTP/1.1 503")

    on_a_connection(test)
