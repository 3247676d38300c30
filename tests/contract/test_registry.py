"""The registry over HTTP: tenants, namespaces, streams, caches, and its feed of changes."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.contract.conftest import StartBroker
from tests.contract.wire import Wire


def assert_typed_error(reply: httpx.Response, status: int, code: str, **more: Any) -> str:
    """The error body of these routes; the message, for a look at it."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    body: dict[str, Any] = reply.json()
    message: str = body.pop("message")
    assert body == {"type": "error", "error": code} | more
    assert message.strip()
    assert reply.headers["content-type"].startswith("application/json")
    return message


class Place:
    """A namespace of a test's own."""

    def __init__(self, client: httpx.Client, tenant: str, namespace: str) -> None:
        self.client = client
        self.tenant = tenant
        self.namespace = namespace
        self.url = f"/v1/tenants/{tenant}/namespaces/{namespace}"

    def create(self, what: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/{what}", json=body)

    def get(self, what: str) -> dict[str, Any]:
        reply = self.client.get(f"{self.url}/{what}")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


def make_place(client: httpx.Client, tenant: str = "", namespace: str = "prod") -> Place:
    tenant = tenant or new_name("tenant")
    created = client.post("/v1/tenants", json={"tenant_id": tenant})
    assert created.status_code == 201, created.text
    url = f"/v1/tenants/{tenant}/namespaces"
    assert client.post(url, json={"namespace": namespace}).status_code == 201
    return Place(client, tenant, namespace)


@pytest.fixture
def place(broker: BrokerProcess) -> Place:
    return make_place(broker.client)


# -- creating ------------------------------------------------------------------------------------


def test_a_fresh_broker_has_a_default_of_everything(start_broker: StartBroker) -> None:
    client = start_broker(memory=True).client
    names = [each["tenant_id"] for each in client.get("/v1/tenants").json()["tenants"]]
    assert names == ["default"]
    listed = client.get("/v1/tenants/default/namespaces").json()["namespaces"]
    assert [each["namespace"] for each in listed] == ["default"]
    default = Place(client, "default", "default")
    assert [each["name"] for each in default.get("streams")["streams"]] == ["default"]
    assert [each["name"] for each in default.get("caches")["caches"]] == ["default"]


@pytest.mark.parametrize(
    ("what", "body", "other"),
    [
        ("streams", {"name": "s", "event_queue_depth": 7}, {"name": "s"}),
        ("caches", {"name": "c", "max_entries": 7}, {"name": "c", "max_entries": 8}),
    ],
)
def test_created_is_201_the_same_again_200_and_otherwise_409(
    place: Place, what: str, body: dict[str, Any], other: dict[str, Any]
) -> None:
    first = place.create(what, **body)
    assert first.status_code == 201
    again = place.create(what, **body)
    assert again.status_code == 200
    assert again.json() == first.json()
    assert_typed_error(place.create(what, **other), 409, "ALREADY_EXISTS")
    assert place.get(what)[what] == [first.json()]


def test_a_tenant_and_a_namespace_that_exist_are_200(place: Place) -> None:
    again = place.client.post("/v1/tenants", json={"tenant_id": f" {place.tenant} "})
    assert (again.status_code, again.json()["tenant_id"]) == (200, place.tenant)
    url = f"/v1/tenants/{place.tenant}/namespaces"
    again = place.client.post(url, json={"namespace": place.namespace})
    assert (again.status_code, again.json()["namespace"]) == (200, place.namespace)


@pytest.mark.parametrize(
    ("path", "unknown"),
    [
        ("nobody/namespaces", "unknown tenant 'nobody'"),
        ("nobody/namespaces/n/streams", "unknown tenant 'nobody'"),
        ("nobody/namespaces/n/caches", "unknown tenant 'nobody'"),
        ("default/namespaces/n/streams", "unknown namespace 'n' of tenant 'default'"),
        ("default/namespaces/n/caches", "unknown namespace 'n' of tenant 'default'"),
    ],
)
def test_creating_without_a_parent_names_what_is_unknown(
    broker: BrokerProcess, path: str, unknown: str
) -> None:
    """felix-87, 88."""
    name = "namespace" if path.endswith("namespaces") else "name"
    reply = broker.client.post(f"/v1/tenants/{path}", json={name: "x"})
    assert assert_typed_error(reply, 404, "NOT_FOUND") == unknown


@pytest.mark.parametrize(
    "body",
    [
        {"delivery": "at_least_once", "durable": False},
        {"delivery": "exactly_once", "durable": False},
        {"retention": "7d"},
        {"retention": 1},
        {"retention_bytes": "1GB"},
    ],
)
def test_a_guarantee_without_its_storage_is_refused(place: Place, body: dict[str, Any]) -> None:
    """felix-120: never silently downgraded. A stream that keeps nothing has no retention either."""
    reply = place.create("streams", name="s", **body)
    assert "durable stream" in assert_typed_error(reply, 400, "INVALID_ARGUMENT")
    assert place.get("streams") == {"streams": []}
    assert place.create("streams", name="s", **body | {"durable": True}).status_code == 201


@pytest.mark.parametrize(
    ("what", "body", "complaint"),
    [
        ("streams", {}, "name is required"),
        ("streams", {"name": " "}, "name is required"),
        ("streams", {"name": "s", "colour": "red"}, "colour"),
        ("streams", {"name": "s", "delivery": "perhaps"}, "delivery"),
        ("streams", {"name": "s", "event_queue_depth": 0}, "event_queue_depth"),
        ("streams", {"name": "s", "event_queue_depth": 65_537}, "65536"),
        ("streams", {"name": "s", "event_queue_depth": "7"}, "event_queue_depth"),
        ("streams", {"name": "s", "event_queue_depth": True}, "event_queue_depth"),
        ("streams", {"name": "s", "pub_queue_depth": 0}, "pub_queue_depth"),
        ("streams", {"name": "s", "publish_queue_wait_timeout_ms": 600_001}, "600000"),
        ("streams", {"name": "s", "retention": "7 weeks"}, "7d"),
        ("streams", {"name": "s", "retention_ms": 5}, "'retention_ms': use retention"),
        ("streams", {"name": "s", "event_queue_bytes": "1 furlong"}, "64MiB"),
        ("caches", {"name": "c", "max_entries": 0}, "max_entries"),
        ("caches", {"name": "c", "max_bytes": 0}, "max_bytes"),
        ("caches", {"name": "c", "eviction_policy": "fifo"}, "eviction_policy"),
        ("caches", {"name": "c", "retention": "7d"}, "retention"),
    ],
)
def test_a_wrong_setting_is_400_and_is_named(
    place: Place, what: str, body: dict[str, Any], complaint: str
) -> None:
    reply = place.create(what, **body)
    assert complaint in assert_typed_error(reply, 400, "INVALID_ARGUMENT")
    assert place.get(what) == {what: []}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"7", b'{"tenant_id": 7}', b"\xff"])
def test_a_body_that_is_no_object_of_the_route_is_400(broker: BrokerProcess, body: bytes) -> None:
    reply = broker.client.post("/v1/tenants", content=body)
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_a_body_that_is_far_too_large_is_413(broker: BrokerProcess) -> None:
    reply = broker.client.post("/v1/tenants", json={"tenant_id": "x" * 70_000})
    assert_typed_error(reply, 413, "INVALID_ARGUMENT")


@pytest.mark.parametrize("request_id", ["mine", 7])
def test_a_request_id_of_the_body_comes_back(place: Place, request_id: str | int) -> None:
    """felix-40"""
    created = place.create("streams", name="s", request_id=request_id)
    assert created.json()["request_id"] == request_id
    refused = place.create("streams", name="s", colour="red", request_id=request_id)
    assert_typed_error(refused, 400, "INVALID_ARGUMENT", request_id=request_id)
    unknown = place.client.patch(
        f"{place.url}/streams/none", json={"retention": "1d", "request_id": request_id}
    )
    assert_typed_error(unknown, 404, "NOT_FOUND", request_id=request_id)


# -- looking -------------------------------------------------------------------------------------


def test_lists_are_sorted(place: Place) -> None:
    for name in ("b", "c", "a"):
        place.create("streams", name=name)
        place.create("caches", name=name)
        url = f"/v1/tenants/{place.tenant}/namespaces"
        place.client.post(url, json={"namespace": name})
    assert [each["name"] for each in place.get("streams")["streams"]] == ["a", "b", "c"]
    assert [each["name"] for each in place.get("caches")["caches"]] == ["a", "b", "c"]
    found = place.client.get(f"/v1/tenants/{place.tenant}/namespaces").json()["namespaces"]
    assert [each["namespace"] for each in found] == ["a", "b", "c", "prod"]
    tenants = [each["tenant_id"] for each in place.client.get("/v1/tenants").json()["tenants"]]
    assert tenants == sorted(tenants)


def test_a_stream_shows_every_setting_in_force(place: Place) -> None:
    """felix-23, 125, 130, 131."""
    place.create("streams", name="s", event_queue_depth=4096)
    shown = place.get("streams/s")
    assert shown.pop("created_ms") > 0
    assert shown.pop("revision") > 0
    assert shown == {
        "name": "s",
        "tenant_id": place.tenant,
        "namespace": place.namespace,
        "delivery": "at_most_once",
        "durable": False,
        "ordering": "per_stream",
        "retention": None,
        "retention_ms": 0,
        "retention_bytes": 0,
        "event_queue_depth": 4096,
        "event_queue_bytes": 64 * 2**20,
        "pub_queue_depth": 1024,
        "publish_queue_wait_timeout_ms": 2000,
        "lag_alert_events": 1000,
        "disconnect_slow_ms": 0,
        "pub_workers_per_conn": 4,
        "origins": {
            "event_queue_depth": "stream",
            "event_queue_bytes": "broker",
            "pub_queue_depth": "broker",
            "publish_queue_wait_timeout_ms": "broker",
            "lag_alert_events": "broker",
            "disconnect_slow_ms": "broker",
            "pub_workers_per_conn": "broker",
        },
        "subscribers": 0,
    }


def test_a_streams_subscribers_are_counted(place: Place) -> None:
    """felix-41"""
    place.create("streams", name="s")
    with place.client.stream("GET", f"{place.url}/streams/s/subscribe") as feed:
        lines = feed.iter_lines()
        next(lines)
        assert place.get("streams/s")["subscribers"] == 1


def test_a_cache_shows_every_setting_in_force_and_what_it_holds(place: Place) -> None:
    """felix-57, 64, 72, 73, 131."""
    place.create("caches", name="c", max_entries=9, max_bytes="1GB", eviction_policy="lru")
    place.client.put(f"{place.url}/caches/c/entries/k", json={"value": "dmFsdWU="})
    shown = place.get("caches/c")
    assert shown["entries"] == 1
    assert shown["bytes"] >= 6
    assert (shown["max_entries"], shown["max_bytes"]) == (9, 2**30)
    assert (shown["eviction_policy"], shown["durable"]) == ("lru", False)
    assert (shown["consistency"], shown["ttl_precision"]) == ("linearizable", "exact")


def test_the_brokers_settings_are_what_a_stream_shows(start_broker: StartBroker) -> None:
    """felix-34"""
    env = {"PENSTOCK_PUB_QUEUE_DEPTH": "2048", "PENSTOCK_EVENT_QUEUE_DEPTH": "4096"}
    default = Place(start_broker(memory=True, env=env).client, "default", "default")
    shown = default.get("streams/default")
    assert (shown["pub_queue_depth"], shown["event_queue_depth"]) == (2048, 4096)


@pytest.mark.parametrize(
    ("path", "unknown"),
    [
        ("nobody", "unknown tenant 'nobody'"),
        ("nobody/namespaces", "unknown tenant 'nobody'"),
        ("default/namespaces/n", "unknown namespace 'n' of tenant 'default'"),
        ("default/namespaces/n/streams", "unknown namespace 'n' of tenant 'default'"),
        ("default/namespaces/default/streams/s", "stream not found: 'default/default/s'"),
        ("default/namespaces/default/caches/c", "cache scope not found: 'default/default/c'"),
    ],
)
def test_what_is_unknown_is_404_and_named(broker: BrokerProcess, path: str, unknown: str) -> None:
    """felix-87, 88, 92."""
    methods = ("GET",) if path.endswith(("namespaces", "streams")) else ("GET", "DELETE")
    for method in methods:
        reply = broker.client.request(method, f"/v1/tenants/{path}")
        assert assert_typed_error(reply, 404, "NOT_FOUND") == unknown


@pytest.mark.parametrize(
    "path",
    ["", "x/", "x/streams", "x/namespaces/", "x/namespaces//streams", "x/namespaces/n/topics",
     "x/namespaces/n/streams/", "x/namespaces/n/streams/s/more"],
)  # fmt: skip
def test_a_path_that_is_none_is_404(broker: BrokerProcess, path: str) -> None:
    assert_typed_error(broker.client.get(f"/v1/tenants/{path}"), 404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/tenants", "GET, POST"),
        ("POST", "/v1/tenants/default", "DELETE, GET"),
        ("PATCH", "/v1/tenants/default/namespaces/default", "DELETE, GET"),
        ("PUT", "/v1/tenants/default/namespaces/default/streams/default", "DELETE, GET, PATCH"),
        ("POST", "/v1/registry/snapshot", "GET"),
    ],
)
def test_a_wrong_method_is_405(broker: BrokerProcess, method: str, path: str, allow: str) -> None:
    reply = broker.client.request(method, path)
    assert_typed_error(reply, 405, "METHOD_NOT_ALLOWED")
    assert reply.headers["allow"] == allow


def test_a_name_with_a_slash_and_a_space_is_reached(broker: BrokerProcess) -> None:
    name = new_name("a b/c?")
    broker.client.post("/v1/tenants", json={"tenant_id": name})
    path = f"/v1/tenants/{httpx.QueryParams(x=name)}".replace("x=", "").replace("+", "%20")
    assert broker.client.get(path).json()["tenant_id"] == name
    assert broker.client.delete(path).status_code == 204


# -- changing ------------------------------------------------------------------------------------


def test_a_patch_changes_what_it_names_and_null_is_the_default(place: Place) -> None:
    place.create("streams", name="s", event_queue_depth=5, disconnect_slow_ms="1m")
    url = f"{place.url}/streams/s"
    members = {"pub_queue_depth": 9, "disconnect_slow_ms": None, "retention": None}
    changed = place.client.patch(url, json=members)
    assert changed.status_code == 200
    shown = place.get("streams/s")
    assert (shown["event_queue_depth"], shown["pub_queue_depth"]) == (5, 9)
    assert (shown["disconnect_slow_ms"], shown["retention"]) == (0, None)
    refused = place.client.patch(url, json={"retention": "1d"})
    assert "retention" in assert_typed_error(refused, 400, "INVALID_ARGUMENT")
    refused = place.client.patch(url, json={"retention_ms": 5})
    assert "use retention" in assert_typed_error(refused, 400, "INVALID_ARGUMENT")
    place.client.patch(url, json={"event_queue_depth": None})
    assert place.get("streams/s")["origins"]["event_queue_depth"] == "broker"


def test_a_patch_of_nothing_changes_nothing(place: Place) -> None:
    created = place.create("caches", name="c", max_entries=5).json()
    same = place.client.patch(f"{place.url}/caches/c", json={"max_entries": 5})
    assert (same.status_code, same.json()) == (200, created)


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("streams/x", {"delivery": "at_least_once"}),
        ("streams/x", {"durable": True}),
        ("caches/x", {"durable": True}),
    ],
)
def test_what_it_is_cannot_change(place: Place, what: str, body: dict[str, Any]) -> None:
    place.create("streams", name="x")
    place.create("caches", name="x")
    before = place.get(what)
    reply = place.client.patch(f"{place.url}/{what}", json=body)
    assert "cannot change" in assert_typed_error(reply, 409, "FAILED_PRECONDITION")
    assert place.get(what) == before


def test_a_wrong_patch_is_400_and_changes_nothing(place: Place) -> None:
    place.create("caches", name="c", max_entries=5)
    for body in ({"max_entries": 0}, {"name": "d"}, {"max_bytes": "much"}):
        reply = place.client.patch(f"{place.url}/caches/c", json=body)
        assert_typed_error(reply, 400, "INVALID_ARGUMENT")
    assert place.get("caches/c")["max_entries"] == 5


def test_of_patches_at_once_none_is_lost(broker: BrokerProcess, place: Place) -> None:
    """Each changes a setting of its own, all pipelined on connections of their own."""
    place.create("streams", name="s")
    settings = ["event_queue_depth", "pub_queue_depth", "lag_alert_events", "disconnect_slow_ms"]

    def patch(name: str, value: int) -> int:
        with broker.new_client() as client:
            url = f"{place.url}/streams/s"
            return client.patch(url, json={name: value}).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for value in range(1, 31):
            replies = pool.map(patch, settings, [value] * 4)
            assert set(replies) == {200}
            shown = place.get("streams/s")
            assert {name: shown[name] for name in settings} == dict.fromkeys(settings, value)


# -- deleting ------------------------------------------------------------------------------------


def test_what_is_not_empty_is_deleted_only_with_cascade(place: Place) -> None:
    place.create("streams", name="s")
    tenant = f"/v1/tenants/{place.tenant}"
    for path in (place.url, tenant):
        reply = place.client.delete(path)
        assert "cascade" in assert_typed_error(reply, 409, "FAILED_PRECONDITION")
    assert place.get("streams/s")
    assert place.client.delete(f"{tenant}?cascade=true").status_code == 204
    assert_typed_error(place.client.get(tenant), 404, "NOT_FOUND")
    assert_typed_error(place.client.get(f"{place.url}/streams/s"), 404, "NOT_FOUND")


def test_an_empty_namespace_and_tenant_are_deleted(place: Place) -> None:
    assert place.client.delete(place.url).status_code == 204
    assert place.client.delete(f"/v1/tenants/{place.tenant}").status_code == 204
    assert_typed_error(place.client.delete(place.url), 404, "NOT_FOUND")


def test_cascade_is_true_or_false(place: Place) -> None:
    reply = place.client.delete(f"{place.url}?cascade=perhaps")
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_what_is_deleted_is_refused_and_what_is_made_anew_is_empty(place: Place) -> None:
    """felix-67, 92."""
    place.create("caches", name="c")
    entry = f"{place.url}/caches/c/entries/k"
    assert place.client.put(entry, json={"value": "dg=="}).status_code == 200
    assert place.client.delete(f"{place.url}/caches/c").status_code == 204
    assert_typed_error(place.client.get(entry), 404, "NOT_FOUND")
    place.create("caches", name="c")
    assert place.client.get(entry).json()["value"] is None


# -- the whole -----------------------------------------------------------------------------------


def test_the_registry_says_whose_it_is_and_where_it_stands(broker: BrokerProcess) -> None:
    shown = broker.client.get("/v1/registry").json()
    assert shown["role"] == "own"
    assert set(shown) == {"role", "instance", "epoch", "revision"}
    broker.client.post("/v1/tenants", json={"tenant_id": new_name("tenant")})
    after = broker.client.get("/v1/registry").json()
    assert after["revision"] == shown["revision"] + 1


def test_a_snapshot_and_the_changes_after_it_are_the_registry(place: Place) -> None:
    """felix-107"""
    client = place.client
    taken = client.get("/v1/registry/snapshot").json()
    place.create("streams", name="s")
    client.delete(f"{place.url}/streams/s")
    since = {"since": taken["revision"], "epoch": taken["epoch"]}
    news = client.get("/v1/registry/changes", params=since).json()
    assert [(each["revision"], each["deleted"]) for each in news["changes"]] == [
        (taken["revision"] + 1, False),
        (taken["revision"] + 2, True),
    ]
    assert {each["entry"]["name"] for each in news["changes"]} == {"s"}
    assert news["revision"] == taken["revision"] + 2
    assert client.get("/v1/registry/snapshot").json()["entries"] == taken["entries"]


def test_a_cursor_of_another_epoch_is_410_and_one_of_the_future_416(place: Place) -> None:
    at = place.client.get("/v1/registry").json()

    def changes(since: int, epoch: int) -> httpx.Response:
        params = {"since": since, "epoch": epoch}
        return place.client.get("/v1/registry/changes", params=params)

    assert_typed_error(changes(at["revision"], at["epoch"] + 1), 410, "OUT_OF_RANGE")
    assert_typed_error(changes(at["revision"] + 1, at["epoch"]), 416, "OUT_OF_RANGE")
    assert changes(at["revision"], at["epoch"]).json()["changes"] == []


@pytest.mark.parametrize("query", ["", "since=", "since=-1", "since=x", "since=1&epoch=x"])
def test_a_cursor_that_is_none_is_400(broker: BrokerProcess, query: str) -> None:
    reply = broker.client.get(f"/v1/registry/changes?{query}")
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


@pytest.mark.parametrize("kill", [False, True])
def test_the_registry_outlives_the_broker(start_broker: StartBroker, kill: bool) -> None:
    """felix-105"""
    broker = start_broker()
    place = make_place(broker.client)
    place.create("streams", name="s", event_queue_depth=5)
    place.create("caches", name="c", durable=True)
    broker.client.delete("/v1/tenants/default/namespaces/default/streams/default")
    before = broker.client.get("/v1/registry/snapshot").json()
    broker.restart(kill=kill)
    after = broker.client.get("/v1/registry/snapshot").json()
    assert after["entries"] == before["entries"]
    assert (after["epoch"], after["revision"]) == (before["epoch"], before["revision"])
    assert after["instance"] != before["instance"]


def test_requests_are_answered_in_order_also_when_pipelined(broker: BrokerProcess) -> None:
    tenant = new_name("tenant")
    with Wire(broker.port) as wire:
        body = f'{{"tenant_id": "{tenant}"}}'.encode()
        for method, target, content in (
            ("POST", "/v1/tenants", body),
            ("GET", f"/v1/tenants/{tenant}", None),
            ("DELETE", f"/v1/tenants/{tenant}", None),
            ("GET", f"/v1/tenants/{tenant}", None),
        ):
            wire.send(_encoded(broker.port, method, target, content))
        assert [wire.read().status for _ in range(4)] == [201, 200, 204, 404]


def _encoded(port: int, method: str, target: str, body: bytes | None) -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    length = f"Content-Length: {len(body or b'')}\r\n\r\n"
    return (head + length).encode() + (body or b"")
