"""Changes of the rules reach open streams, subscriptions, watches and sockets at once."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from penstock.model.principals import Principal
from penstock.server.http.connection import HttpConnection
from tests.access.server import AccessServer
from tests.unit.memory_connection import Transport

HERE = "/v1/tenants/default/namespaces/default"
SCOPE = {"tenant_id": "default", "namespace": "default"}
PAYLOAD = {"payload": base64.b64encode(b"x").decode()}


class Lines:
    """A streamed response, line by line; of server-sent events the data."""

    def __init__(self, reply: httpx.Response) -> None:
        assert reply.status_code == 200, reply.read()
        self._lines = reply.iter_lines()
        if reply.headers["content-type"].startswith("text/event-stream"):
            self._lines = (
                line.removeprefix("data: ")
                for line in reply.iter_lines()
                if line.startswith("data: ")
            )

    def next(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(next(self._lines))
        return line

    def rest(self) -> list[dict[str, Any]]:
        """Reads to the end, which must come."""
        return [json.loads(line) for line in self._lines if line]


@contextmanager
def open_stream(server: AccessServer, who: str, path: str) -> Iterator[Lines]:
    with (
        httpx.Client(base_url=str(server.http.base_url), timeout=20) as client,
        client.stream("GET", path, headers={"Authorization": f"Bearer {who}"}) as reply,
    ):
        yield Lines(reply)


def test_a_revoked_consumer_gets_nothing_more(server: AccessServer) -> None:
    """felix-97, for queues: its deliveries go to others, and its acks are refused."""
    server.must("root", "POST", "/v1/topics", {"name": "jobs"})

    def produce(*values: str) -> None:
        for value in values:
            server.must("root", "POST", "/v1/produce", {"topic": "jobs", "value": value})

    who = server.know(Principal("worker"))
    rule = server.grant(who, "consume", resource="topic:jobs")
    with open_stream(server, who, "/v1/consume?topic=jobs&group=g&owner=w") as stream:
        produce("first")
        assert stream.next()["value"] == "first"
        server.revoke(rule)
        produce("second", "third")
        assert stream.rest() == []
        assert len(server.dispatch.open_streams) == 0
        delivery = {"topic": "jobs", "group": "g", "owner": "w", "partition": 0, "offset": 0}
        assert server.ask(who, "POST", "/v1/ack", delivery).status_code == 403
    with open_stream(server, "root", "/v1/consume?topic=jobs&group=g&owner=root") as stream:
        produce("fourth")
        assert [stream.next()["value"] for _ in range(3)] == ["second", "third", "fourth"]


def test_a_revoked_subscription_over_http_ends_with_the_reason(server: AccessServer) -> None:
    """felix-97"""
    who = server.know(Principal("reader"))
    rule = server.grant(who, "subscribe", resource="stream:default")
    with open_stream(server, who, f"{HERE}/streams/default/subscribe") as stream:
        assert stream.next()["type"] == "subscribed"
        server.must("root", "POST", f"{HERE}/streams/default/publish", PAYLOAD)
        assert stream.next()["payload"] == PAYLOAD["payload"]
        server.revoke(rule)
        server.must("root", "POST", f"{HERE}/streams/default/publish", PAYLOAD)
        (last,) = stream.rest()
        assert (last["type"], last["error"]) == ("error", "PERMISSION_DENIED")
        assert "subscribe" in last["message"]


Deny = Callable[[AccessServer, int], None]


def _revoke(server: AccessServer, rule: int) -> None:
    server.revoke(rule)


def _empty_role(server: AccessServer, rule: int) -> None:
    server.must("root", "PUT", "/v1/access/roles/event-reader", {"permissions": ["read"]})


@pytest.fixture(params=[_revoke, _empty_role])
def deny(request: pytest.FixtureRequest) -> Deny:
    """Takes the permission away: the rule is deleted, or its role loses it."""
    found: Deny = request.param
    return found


def allowed(server: AccessServer, name: str) -> tuple[str, int]:
    """A principal who may subscribe to durable streams by a rule with a role, and the rule."""
    server.must("root", "PUT", "/v1/access/roles/event-reader", {"permissions": ["subscribe"]})
    who = server.know(Principal(name))
    return who, server.grant(who, "event-reader", resource="stream:events*")


def durable_stream(server: AccessServer) -> str:
    """The name of a new durable stream with two events."""
    name = f"events-{uuid.uuid4().hex}"
    settings = {"name": name, "delivery": "at_least_once"}
    server.must("root", "POST", f"{HERE}/streams", settings)
    for _ in range(2):
        server.must("root", "POST", f"{HERE}/streams/{name}/publish", PAYLOAD)
    return name


@pytest.mark.parametrize("form", ["ndjson", "sse"])
@pytest.mark.parametrize(
    "query", ["", "&name=billing&owner=w&start=earliest", "&start=earliest", "&start=1"]
)
def test_a_denied_feed_of_a_durable_stream_ends_with_the_reason(
    server: AccessServer, deny: Deny, query: str, form: str
) -> None:
    """felix-97: plain, named and from a start; what was not sent goes to others."""
    who, rule = allowed(server, "durable-reader")
    stream = durable_stream(server)
    path = f"{HERE}/streams/{stream}"
    with open_stream(server, who, f"{path}/subscribe?format={form}{query}") as feed:
        assert feed.next()["type"] == "subscribed"
        if query:
            assert feed.next()["payload" if "name" in query else "type"]
        deny(server, rule)
        server.must("root", "POST", f"{path}/publish", PAYLOAD)
        *others, last = feed.rest()
        assert last["error"] == "PERMISSION_DENIED"
        assert "subscribe" in last["message"]
        assert [each for each in others if each.get("offset") == 2] == []
    refused = server.ask(who, "GET", f"{path}/subscribe?format={form}{query}")
    assert refused.status_code == 403
    if "name" in query:
        ack = {"name": "billing", "owner": "w", "offset": 0}
        assert server.ask(who, "POST", f"{path}/ack", ack).status_code == 403
        with open_stream(server, "root", f"{path}/subscribe?name=billing&owner=root") as feed:
            assert feed.next()["type"] == "subscribed"
            assert feed.next()["offset"] == 2


def test_denied_channels_of_durable_streams_end_and_their_acks_are_refused(
    server: AccessServer, deny: Deny
) -> None:
    """felix-97: over the WebSocket, named and from a start."""
    who, rule = allowed(server, "durable-socket")
    names = SCOPE | {"stream": durable_stream(server)}
    with server.socket(who) as socket:
        named = socket.ask({"type": "subscribe", "name": "billing", "start": "earliest", **names})
        events = socket.receive_all(2)
        replay = socket.ask({"type": "subscribe", "start": 2, **names})
        assert {named["type"], replay["type"]} == {"subscribed"}
        deny(server, rule)
        ended = socket.receive_all(2)
        assert {each["error"] for each in ended} == {"PERMISSION_DENIED"}
        ids = {each["subscription_id"] for each in (named, replay)}
        assert {each["subscription_id"] for each in ended} == ids
        path = f"{HERE}/streams/{names['stream']}"
        server.must("root", "POST", f"{path}/publish", PAYLOAD)
        delivery = {name: events[0][name] for name in ("subscription_id", "offset", "delivery_id")}
        for kind in ("event_ack", "event_nack"):
            assert socket.ask({"type": kind, **delivery})["type"] == "error"
        for start in ({"name": "billing"}, {"start": "earliest"}):
            again = socket.ask({"type": "subscribe", **names, **start})
            assert again["error"] == "PERMISSION_DENIED"


def test_a_revoked_watch_over_http_ends_with_the_reason(server: AccessServer) -> None:
    """felix-97"""
    who = server.know(Principal("watcher"))
    rule = server.grant(who, "cache_read", resource="cache:default")
    with open_stream(server, who, f"{HERE}/caches/default/watch?prefix=") as stream:
        assert stream.next()["type"] == "ok"
        server.revoke(rule)
        value = {"value": PAYLOAD["payload"]}
        server.must("root", "PUT", f"{HERE}/caches/default/entries/k", value)
        (last,) = stream.rest()
        assert last["error"] == "PERMISSION_DENIED"


def test_revoked_channels_of_a_socket_end_and_the_others_go_on(server: AccessServer) -> None:
    """felix-97"""
    who = server.know(Principal("socket"))
    rule = server.grant(who, "subscribe", "cache_read")
    kept = server.grant(who, "subscribe", resource="stream:kept")
    server.must("root", "POST", f"{HERE}/streams", {"name": "kept"})
    with server.socket(who) as socket:
        lost = socket.ask({"type": "subscribe", "stream": "default", **SCOPE})
        watch = socket.ask({"type": "cache_watch", "cache": "default", "prefix": "", **SCOPE})
        stays = socket.ask({"type": "subscribe", "stream": "kept", **SCOPE})
        server.revoke(rule)
        ended = socket.receive_all(2)
        assert {each["error"] for each in ended} == {"PERMISSION_DENIED"}
        assert {each.get("subscription_id") or each.get("watch_id") for each in ended} == {
            lost["subscription_id"],
            watch["watch_id"],
        }
        for stream in ("default", "kept"):
            server.must("root", "POST", f"{HERE}/streams/{stream}/publish", PAYLOAD)
        assert socket.receive()["subscription_id"] == stays["subscription_id"]
        again = socket.ask({"type": "subscribe", "stream": "default", **SCOPE})
        assert again["error"] == "PERMISSION_DENIED"
        server.revoke(kept)
        assert socket.receive()["subscription_id"] == stays["subscription_id"]
    assert server.must("root", "GET", f"{HERE}/streams/kept")["subscribers"] == 0


def test_a_deleted_namespace_takes_its_rules_with_it(server: AccessServer) -> None:
    who = server.know(Principal("heir"))
    server.must("root", "POST", "/v1/tenants/other/namespaces", {"namespace": "brief"})
    server.grant(who, "read", tenant_id="other", namespace="brief")
    path = "/v1/tenants/other/namespaces/brief"
    assert server.ask(who, "GET", path).status_code == 200
    server.must("root", "DELETE", path)
    server.must("root", "POST", "/v1/tenants/other/namespaces", {"namespace": "brief"})
    assert server.ask(who, "GET", path).status_code == 403
    found = server.must("root", "GET", f"/v1/access/rules?principal={who}")
    assert found == {"rules": []}


def test_a_role_that_loses_a_permission_ends_streams(server: AccessServer) -> None:
    """felix-97"""
    who = server.know(Principal("by-role"))
    role = "/v1/access/roles/listener"
    server.must("root", "PUT", role, {"permissions": ["subscribe", "read"]})
    server.grant(who, "listener")
    with open_stream(server, who, f"{HERE}/streams/default/subscribe") as stream:
        stream.next()
        server.must("root", "PUT", role, {"permissions": ["read"]})
        assert stream.rest()[-1]["error"] == "PERMISSION_DENIED"


def test_a_range_that_is_being_read_breaks_off(server: AccessServer) -> None:
    server.must("root", "POST", "/v1/topics", {"name": "long"})
    batch = [{"topic": "long", "value": "v" * 100_000} for _ in range(200)]
    server.must("root", "POST", "/v1/produce/batch", batch)
    who = server.know(Principal("ranger"))
    rule = server.grant(who, "read", resource="topic:long")
    path = "/v1/topics/long/partitions/0/records?format=ndjson"
    assert_breaks_off(server, who, path, rule)


def assert_breaks_off(server: AccessServer, who: str, path: str, rule: int) -> None:
    with open_stream(server, who, path) as stream:
        stream.next()
        server.revoke(rule)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            stream.rest()


def test_a_range_of_a_stream_and_a_snapshot_break_off(server: AccessServer) -> None:
    """felix-97"""
    server.must("root", "POST", f"{HERE}/streams", {"name": "long", "delivery": "at_least_once"})
    payload = base64.b64encode(b"v" * 100_000).decode()
    for _ in range(4):
        body = {"payloads": [payload] * 50}
        server.must("root", "POST", f"{HERE}/streams/long/publish_batch", body)
    server.must("root", "POST", f"{HERE}/caches", {"name": "long"})
    for n in range(200):
        server.must("root", "PUT", f"{HERE}/caches/long/entries/{n}", {"value": payload})
    who = server.know(Principal("row-reader"))
    rule = server.grant(who, "subscribe", resource="stream:long")
    assert_breaks_off(server, who, f"{HERE}/streams/long/records?format=ndjson", rule)
    rule = server.grant(who, "cache_read", resource="cache:long")
    assert_breaks_off(server, who, f"{HERE}/caches/long/entries?format=ndjson", rule)


def test_a_rule_that_is_revoked_while_a_stream_opens_is_seen(server: AccessServer) -> None:
    """The first consume creates the group, and waits until that is durable."""
    server.must("root", "POST", "/v1/topics", {"name": "race"})
    who = server.know(Principal("racer"))
    rule = server.grant(who, "consume", resource="topic:race")
    transport = Transport()

    def race() -> None:
        connection = HttpConnection(server.dispatch, set())
        connection.connection_made(transport)
        connection.data_received(
            b"GET /v1/consume?topic=race&group=g&owner=o HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Authorization: Bearer racer\r\n\r\n"
        )
        assert transport.written == b""
        server.engine.access.revoke(rule, None, lambda _: None)

    server.on_loop(race)
    server.must("root", "GET", "/v1/topics/race")
    assert transport.written.startswith(b"HTTP/1.1 403 ")
