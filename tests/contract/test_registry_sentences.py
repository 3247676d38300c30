"""Tenants and namespaces, sentence by sentence, for every message and every route; and what can be
read of how everything is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.contract.namespaces import Feed, Namespace, assert_typed_error, b64
from tests.contract.stream_clients import Session, make_namespace

DATA: dict[str, dict[str, Any]] = {
    "publish": {"stream": "s", "payload": b64(b"x")},
    "publish_batch": {"stream": "s", "payloads": [b64(b"x")]},
    "subscribe": {"stream": "s"},
    "cache_put": {"cache": "c", "key": "k", "value": b64(b"x")},
    "cache_get": {"cache": "c", "key": "k"},
    "cache_get_many": {"cache": "c", "keys": ["k"]},
    "cache_delete": {"cache": "c", "key": "k"},
    "cache_incr": {"cache": "c", "key": "k"},
    "cache_txn": {"cache": "c", "ops": [{"op": "put", "key": "k", "value": ""}]},
    "cache_watch": {"cache": "c", "key": "k"},
}
"""Every message of the data plane, with all that it needs but its tenant and namespace."""

ONLY_ON_A_SOCKET = {"subscribe", "cache_watch"}

ROUTES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "streams/{}/publish", {"payload": ""}),
    ("POST", "streams/{}/publish?raw=true", {}),
    ("POST", "streams/{}/publish_batch", {"payloads": [""]}),
    ("GET", "streams/{}/subscribe", None),
    ("GET", "streams/{}/subscribe?format=sse", None),
    ("GET", "streams/{}/subscriptions", None),
    ("GET", "caches/{}/entries/k", None),
    ("GET", "caches/{}/entries/k?raw=true", None),
    ("PUT", "caches/{}/entries/k", {"value": ""}),
    ("PUT", "caches/{}/entries/k?raw=true", {}),
    ("DELETE", "caches/{}/entries/k", None),
    ("POST", "caches/{}/entries/k/incr", {}),
    ("POST", "caches/{}/get_many", {"keys": ["k"]}),
    ("POST", "caches/{}/txn", {"ops": [{"op": "put", "key": "k", "value": ""}]}),
    ("GET", "caches/{}/watch?key=k", None),
    ("GET", "caches/{}/watch?prefix=&format=sse", None),
]
"""Every route of the data plane, below a namespace; {} is the stream or cache."""

SETTINGS_ROUTES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "streams/{}", None),
    ("PATCH", "streams/{}", {"event_queue_depth": 5}),
    ("DELETE", "streams/{}", None),
    ("GET", "caches/{}", None),
    ("PATCH", "caches/{}", {"max_entries": 5}),
    ("DELETE", "caches/{}", None),
]


class Witness:
    """Sees all that happens in a namespace with one stream and one cache."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.ns = make_namespace(broker, new_name("known"), "here")
        self.ns.post(f"{self.ns.path}/streams", name="s")
        self.ns.post(f"{self.ns.path}/caches", name="c")
        self.ns.put("c", "k", b"1")
        self._events = self.ns.subscribe("s")
        self._changes = self.ns.watch("c", "prefix=")

    def assert_nothing_happened(self) -> None:
        self.ns.publish("s", b"the next one")
        assert self._events.payloads(1) == [b"the next one"]
        assert self.ns.value("c", "k") == b"1"
        version = self.ns.put("c", "k", b"2").json()["version"]
        assert self._changes.next().members["version"] == version
        assert version == self._changes.first["version"] + 1
        assert len(self.ns.subscriptions("s")) == 1

    def close(self) -> None:
        self._events.close()
        self._changes.close()


@pytest.fixture
def witness(broker: BrokerProcess) -> Iterator[Witness]:
    watching = Witness(broker)
    yield watching
    watching.close()


def wrong_scopes(witness: Witness) -> list[tuple[dict[str, Any], str, str]]:
    """A scope, the code of its refusal, and what that says."""
    scope = witness.ns.scope
    tenant = scope["tenant_id"]
    missing = "INVALID_ARGUMENT"
    return [
        ({"namespace": "here"}, missing, "tenant_id is required"),
        ({"tenant_id": tenant}, missing, "namespace is required"),
        ({**scope, "tenant_id": None}, missing, "tenant_id is required"),
        ({**scope, "tenant_id": "  "}, missing, "tenant_id is required"),
        ({**scope, "namespace": ""}, missing, "namespace is required"),
        ({**scope, "tenant_id": "nobody"}, "NOT_FOUND", "unknown tenant 'nobody'"),
        ({**scope, "tenant_id": "default"}, "NOT_FOUND", "unknown namespace 'here' of tenant"),
        ({**scope, "namespace": "there"}, "NOT_FOUND", "unknown namespace 'there' of tenant"),
    ]


@pytest.mark.parametrize("kind", DATA)
def test_every_message_needs_a_tenant_and_a_namespace_that_are_known(
    witness: Witness, kind: str
) -> None:
    """felix-85, 86, 87, 88, 89: on the socket and posted; nothing happens otherwise."""
    ns = witness.ns
    with Session(ns) as ws:
        for scope, code, says in wrong_scopes(witness):
            message = {"type": kind, **scope, **DATA[kind], "request_id": "r"}
            answer = ws.ask(message)
            assert answer["type"] == "error"
            assert (answer["error"], answer["request_id"]) == (code, "r")
            assert says in answer["message"]
            if kind not in ONLY_ON_A_SOCKET:
                status = 404 if code == "NOT_FOUND" else 400
                reply = ns.broker.client.post("/v1/felix", json=message)
                assert says in assert_typed_error(reply, status, code, "r")["message"]
                assert reply.json() == answer, "one shape, whichever way it came"
        witness.assert_nothing_happened()
        assert "error" not in ws.call(kind, **DATA[kind])


@pytest.mark.parametrize("kind", DATA)
def test_every_message_needs_a_stream_or_cache_that_is_there(witness: Witness, kind: str) -> None:
    """felix-92: using one creates none."""
    what = "stream" if "stream" in DATA[kind] else "cache"
    says = "stream not found" if what == "stream" else "cache scope not found"
    with Session(witness.ns) as ws:
        for name in ("none", "S", "s " if what == "cache" else "c"):
            answer = ws.call(kind, **{**DATA[kind], what: name})
            assert answer["error"] == "NOT_FOUND", answer
            assert says in answer["message"]
        for nothing in ("", None):
            answer = ws.call(kind, **{**DATA[kind], what: nothing})
            assert (answer["error"], answer["message"]) == (
                "INVALID_ARGUMENT", f"{what} is required",
            )  # fmt: skip
    witness.assert_nothing_happened()
    listed = witness.ns.broker.client.get(f"{witness.ns.path}/{what}s").json()[f"{what}s"]
    assert len(listed) == 1


@pytest.mark.parametrize(("method", "route", "body"), ROUTES + SETTINGS_ROUTES)
def test_every_route_needs_what_is_named_in_its_path(
    witness: Witness, method: str, route: str, body: dict[str, Any] | None
) -> None:
    """felix-85, 87, 88, 89, 92"""
    ns = witness.ns
    tenant, name = ns.scope["tenant_id"], "s" if route.startswith("streams") else "c"
    for path, status, says in (
        (("nobody", "here", name), 404, "unknown tenant 'nobody'"),
        ((tenant, "there", name), 404, "unknown namespace 'there' of tenant"),
        ((tenant, "here", "none"), 404, "not found: "),
        (("%20", "here", name), 400, "tenant_id is required"),
        ((tenant, "%20", name), 400, "namespace is required"),
        (("%ff", "here", name), 400, "percent-encoded"),
        (("a%00b", "here", name), 400, "control character"),
        (("x" * 201, "here", name), 400, "200 bytes"),
    ):
        place = f"/v1/tenants/{path[0]}/namespaces/{path[1]}/{route.format(path[2])}"
        reply = send(ns, method, place, body)
        code = "NOT_FOUND" if status == 404 else "INVALID_ARGUMENT"
        found = assert_typed_error(reply, status, code)
        assert says in found["message"], (place, found)
    witness.assert_nothing_happened()


@pytest.mark.parametrize(("method", "route", "body"), ROUTES)
def test_every_route_works_where_everything_is_known(
    broker: BrokerProcess, method: str, route: str, body: dict[str, Any] | None
) -> None:
    """felix-88, 89: also of names that must be percent-encoded."""
    ns = make_namespace(broker, new_name("a/b %2F"), "né:me ..")
    name = "..//%00 ?"
    assert ns.post(f"{ns.path}/streams", name=name).status_code == 201
    assert ns.post(f"{ns.path}/caches", name=name).status_code == 201
    ns.put(name, "k", b"1")
    place = f"{ns.path}/{route.format(quote(name, safe='').replace('.', '%2E'))}"
    if "subscribe?" in place or place.endswith("/subscribe") or "/watch" in place:
        feed = Feed.__new__(Feed)
        super(Feed, feed).__init__(broker.port, place)
        assert feed.status == 200
        feed.close()
    else:
        assert send(ns, method, place, body).status_code == 200


def send(ns: Namespace, method: str, place: str, body: dict[str, Any] | None) -> httpx.Response:
    # As it is: a client would tidy the path.
    url = httpx.URL(ns.broker.url).copy_with(raw_path=place.encode())
    return ns.broker.client.request(method, url, json=body)


def test_what_is_deleted_is_refused_at_once_and_what_is_created_serves_at_once(
    broker: BrokerProcess,
) -> None:
    """felix-90, 91: this broker is its own control plane."""
    for _ in range(5):
        ns = make_namespace(broker, "came-and-went", "prod")
        assert ns.post(f"{ns.path}/streams", name="s").status_code == 201
        assert ns.publish("s", b"x").status_code == 200
        tenant = "/v1/tenants/came-and-went"
        assert broker.client.delete(f"{tenant}?cascade=true").status_code == 204
        refused = assert_typed_error(ns.publish("s", b"x"), 404, "NOT_FOUND")
        assert "unknown tenant" in refused["message"]


def test_the_defaults_are_those_of_the_document_and_can_be_read(ns: Namespace) -> None:
    """felix-130, 131: at most once, per stream, isolated, ephemeral, exact, in the open."""
    client = ns.broker.client
    stream = client.get(ns.stream_path("default")).json()
    expected = {"delivery": "at_most_once", "ordering": "per_stream", "durable": False,
                "event_queue_depth": 1024, "pub_queue_depth": 1024, "retention": None,
                "publish_queue_wait_timeout_ms": 2000, "disconnect_slow_ms": 0,
                "lag_alert_events": 1000, "pub_workers_per_conn": 4}  # fmt: skip
    assert {name: stream[name] for name in expected} == expected
    cache = client.get(ns.cache_path("default")).json()
    expected = {"durable": False, "consistency": "linearizable", "ttl_precision": "exact",
                "eviction_policy": "best_effort", "max_entries": 0, "max_bytes": 0}  # fmt: skip
    assert {name: cache[name] or expected[name] for name in expected} == expected
    # No access control and no quotas until they are set up: anybody may, as often as they like.
    for _ in range(200):
        assert ns.publish("default", b"").status_code == 200


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)
