"""Topics of tenants: the same names in several namespaces, and nobody sees, changes or holds up
what is somebody else's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from penstock.server.routes.table import ENDPOINTS
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import (
    assert_done,
    assert_invalid,
    assert_not_found,
    new_name,
)
from tests.contract.conftest import StartBroker
from tests.contract.http_router import HttpRouter
from tests.contract.scoped import (
    ACME,
    DEFAULT,
    GLOBEX,
    GROUP,
    KEY,
    OTHER,
    OWNER,
    PRODUCER,
    SCOPES,
    ScopedBroker,
    create_namespaces,
)

QUEUE_TAGS = frozenset({"Topics", "Messages", "Effects", "Ranges", "Journal", "Writes"})
ALL_TENANTS = frozenset(
    {
        "GET /v1/journal",
        "GET /v1/journal/offsets",
        "GET /v1/journal/splits",
        "POST /v1/journal/archived",
    }
)
"""Routes of the one journal of the broker; they have tests of their own."""

Call = Callable[[ScopedBroker, str], httpx.Response]


def settle(path: str, **more: Any) -> Call:
    def call(scoped: ScopedBroker, topic: str) -> httpx.Response:
        body = {"topic": topic, "group": GROUP, "partition": 0, "offset": 0, "owner": OWNER} | more
        return scoped.send("POST", path, json=[body] if path.endswith("batch") else body)

    return call


def effect(step: str, **more: Any) -> Call:
    def call(scoped: ScopedBroker, topic: str) -> httpx.Response:
        body = {"topic": topic, "group": GROUP, "key": KEY, "owner": OWNER} | more
        return scoped.send("POST", f"/v1/idempotency/{step}", json=body)

    return call


def get(path: str) -> Call:
    return lambda scoped, topic: scoped.send("GET", path.replace("{topic}", topic))


def consume(scoped: ScopedBroker, topic: str) -> httpx.Response:
    items = scoped.take(topic, 3, group="another")
    return httpx.Response(200, content=b"\n".join(item.raw for item in items))


CALLS: dict[str, Call] = {
    "GET /v1/topics": get("/v1/topics"),
    "POST /v1/topics": lambda s, t: s.send("POST", "/v1/topics", json={"name": t}),
    "GET /v1/topics/{topic}": get("/v1/topics/{topic}"),
    "PATCH /v1/topics/{topic}": lambda s, t: s.send(
        "PATCH", f"/v1/topics/{t}", json={"max_attempts": 3}
    ),
    "DELETE /v1/topics/{topic}": lambda s, t: s.send("DELETE", f"/v1/topics/{t}"),
    "DELETE /v1/topics/{topic}/groups/{group}": lambda s, t: s.send(
        "DELETE", f"/v1/topics/{t}/groups/{GROUP}"
    ),
    "POST /v1/topics/{topic}/groups/{group}/progress": lambda s, t: s.send(
        "POST",
        f"/v1/topics/{t}/groups/{GROUP}/progress",
        json={"partitions": [{"partition": 0, "next": 2}]},
    ),
    "POST /v1/produce": lambda s, t: s.produce(t, "a new value"),
    "POST /v1/produce/batch": lambda s, t: s.send(
        "POST",
        "/v1/produce/batch",
        json=[{"topic": t, "value": "v"}, {"topic": "nowhere", "value": "v"}],
    ),
    "GET /v1/consume": consume,
    "POST /v1/ack": settle("/v1/ack"),
    "POST /v1/ack/batch": settle("/v1/ack/batch"),
    "POST /v1/nack": settle("/v1/nack", dead=True, reason="hopeless"),
    "POST /v1/release": settle("/v1/release"),
    "POST /v1/release/batch": settle("/v1/release/batch"),
    "POST /v1/extend": settle("/v1/extend", lease_ms=70_000),
    "GET /v1/idempotency": lambda s, t: s.send(
        "GET", f"/v1/idempotency?{urlencode({'topic': t, 'group': GROUP, 'key': KEY})}"
    ),
    "POST /v1/idempotency/begin": effect("begin", lease_ms=60_000),
    "POST /v1/idempotency/renew": effect("renew", lease_ms=60_000),
    "POST /v1/idempotency/commit": effect("commit", result="done"),
    "POST /v1/idempotency/fail": effect("fail", reason="declined"),
    "GET /v1/topics/{topic}/partitions/{partition}/records": get(
        "/v1/topics/{topic}/partitions/0/records?format=ndjson"
    ),
    "GET /v1/topics/{topic}/partitions/{partition}/splits": get(
        "/v1/topics/{topic}/partitions/0/splits"
    ),
    "GET /v1/topics/{topic}/offsets": get("/v1/topics/{topic}/offsets"),
    "GET /v1/offsets": get("/v1/offsets"),
    "PUT /v1/writes/{producer}/{batch}/{part}/{piece}": lambda s, t: s.send(
        "PUT",
        f"/v1/writes/{PRODUCER}-{t}/3/0/0",
        content=json.dumps({"topic": t, "value": "row"}).encode(),
    ),
    "POST /v1/writes/{producer}/{batch}/commit": lambda s, t: s.commit(t, 2),
    "DELETE /v1/writes/{producer}/{batch}": lambda s, t: s.send(
        "DELETE", f"/v1/writes/{PRODUCER}-{t}/2"
    ),
    "GET /v1/writes/{producer}": lambda s, t: s.send("GET", f"/v1/writes/{PRODUCER}-{t}"),
}


@pytest.fixture(scope="module")
def scopes(broker: BrokerProcess) -> dict[tuple[str, str], ScopedBroker]:
    create_namespaces(broker)
    return {scope: ScopedBroker(broker, scope) for scope in SCOPES}


def test_every_route_of_queues_is_tried_here() -> None:
    routes = {each.route for each in ENDPOINTS if each.tag in QUEUE_TAGS}
    assert routes == CALLS.keys() | ALL_TENANTS


INVISIBLE = frozenset(
    {
        "POST /v1/extend",
        "POST /v1/idempotency/begin",
        "POST /v1/idempotency/renew",
        "POST /v1/topics",
        "PUT /v1/writes/{producer}/{batch}/{part}/{piece}",
        "DELETE /v1/writes/{producer}/{batch}",
    }
)
"""Changes that no answer shows, beside the reads."""


@pytest.mark.parametrize("route", CALLS)
def test_a_request_in_one_namespace_touches_no_other(
    scopes: dict[tuple[str, str], ScopedBroker], route: str
) -> None:
    """The same topic, group, keys and producer everywhere. A plain
    request and one with headers differ in nothing but the ids that count up."""
    topic = new_name("orders")
    several = [scopes[scope] for scope in (DEFAULT, ACME, GLOBEX)]
    for scoped in several:
        scoped.fill(topic)
    answers = []
    for scoped in several[:2]:
        before = [each.picture(topic) for each in several]
        reply = CALLS[route](scoped, topic)
        assert reply.is_success, (reply.status_code, reply.text)
        after = [each.picture(topic) for each in several]
        is_changed = [each != other for each, other in zip(before, after, strict=True)]
        is_read = route.startswith("GET") and route != "GET /v1/consume"
        assert is_changed == [
            each is scoped and not is_read and route not in INVISIBLE for each in several
        ]
        # The answer is that of a broker that has no other tenant, with plain names.
        assert "\\u001f" not in reply.text
        assert "\x1f" not in reply.text
        assert not [each for each in several if each is not scoped and each.word in reply.text]
        # Errors name the namespace, for those who have named the wrong one.
        text = reply.text.replace(scoped.word, "somebody").replace(" of acme/prod;", ";")
        answers.append((reply.status_code, _without_numbers(route, text, topic)))
    assert answers[0] == answers[1]


NUMBERS = frozenset(
    {"topic_id", "delivery_id", "timestamp", "committed_at_ms", "lease_ms", "bytes"}
)


def _without_numbers(route: str, text: str, topic: str) -> Any:
    if route in ("GET /v1/topics", "GET /v1/offsets"):
        return topic in text
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        for name in (
            "topic_id",
            "delivery_id",
            "timestamp",
            "committed_at_ms",
            "lease_ms",
            "bytes",
        ):
            if name in line:
                line[name] = "any"
    return lines


def test_equal_idempotency_keys_of_two_tenants_are_stored_each(
    scopes: dict[tuple[str, str], ScopedBroker],
) -> None:
    topic = new_name("keyed")
    for scope in (DEFAULT, ACME, GLOBEX):
        scopes[scope].must("POST", "/v1/topics", json={"name": topic})
        for _ in range(2):
            scopes[scope].produce(topic, envelope={"idempotency_key": "same"})
        assert scopes[scope].values(topic) == [f"value of {scopes[scope].word}"]


def test_a_listing_has_the_topics_of_its_namespace_only(
    scopes: dict[tuple[str, str], ScopedBroker],
) -> None:
    names = {scope: new_name("mine") for scope in SCOPES}
    for scope, name in names.items():
        scopes[scope].must("POST", "/v1/topics", json={"name": name})
    for scope, scoped in scopes.items():
        listed = scoped.must("GET", "/v1/topics").json()["topics"]
        offsets = scoped.must("GET", "/v1/offsets").json()["topics"]
        assert [each["topic"] for each in offsets] == listed == sorted(listed)
        assert set(names.values()) & set(listed) == {names[scope]}
        page = scoped.must("GET", f"/v1/offsets?{urlencode({'after': listed[0]})}").json()
        assert [each["topic"] for each in page["topics"]] == listed[1:]


# -- the headers ---------------------------------------------------------------------------------


def test_a_tenant_alone_means_its_default_namespace(broker: BrokerProcess) -> None:
    tenant, topic = new_name("tenant"), new_name()
    broker.client.post("/v1/tenants", json={"tenant_id": tenant})
    alone = {"X-Penstock-Tenant": tenant}
    missing = broker.client.post("/v1/topics", json={"name": topic}, headers=alone)
    assert_not_found(missing)
    assert f"unknown namespace 'default' of tenant '{tenant}'" in missing.json()["message"]
    broker.client.post(f"/v1/tenants/{tenant}/namespaces", json={"namespace": "default"})
    assert broker.client.post("/v1/topics", json={"name": topic}, headers=alone).is_success
    both = alone | {"X-Penstock-Namespace": "default"}
    assert broker.client.get("/v1/topics", headers=both).json() == {"topics": [topic]}


def test_a_namespace_alone_is_one_of_the_default_tenant(broker: BrokerProcess) -> None:
    namespace, topic = new_name("namespace"), new_name()
    broker.client.post("/v1/tenants/default/namespaces", json={"namespace": namespace})
    alone = {"X-Penstock-Namespace": namespace}
    assert broker.client.post("/v1/topics", json={"name": topic}, headers=alone).is_success
    both = alone | {"X-Penstock-Tenant": "default"}
    assert broker.client.get("/v1/topics", headers=both).json() == {"topics": [topic]}
    assert topic not in broker.client.get("/v1/topics").json()["topics"]


def test_the_default_scope_may_be_named(broker: BrokerProcess, topic: str) -> None:
    named = {"X-Penstock-Tenant": "default", "X-Penstock-Namespace": "default"}
    assert broker.client.get(f"/v1/topics/{topic}", headers=named).is_success


def test_a_name_may_be_any_text(broker: BrokerProcess) -> None:
    tenant = "Kunde 5 ✓"
    broker.client.post("/v1/tenants", json={"tenant_id": tenant})
    path = str(httpx.URL("/v1/tenants/Kunde 5 ✓/namespaces"))
    assert broker.client.post(path, json={"namespace": "default"}).is_success
    headers = {b"X-Penstock-Tenant": tenant.encode()}
    made = broker.client.post("/v1/topics", json={"name": "t"}, headers=headers)
    assert made.status_code == 201, made.text


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Penstock-Tenant", b"")],
        [("X-Penstock-Tenant", b"a"), ("X-Penstock-Tenant", b"a")],
        [("X-Penstock-Namespace", b"a"), ("x-penstock-namespace", b"b")],
        [("X-Penstock-Tenant", b"n" * 201)],
        [("X-Penstock-Tenant", b"\xff")],
        [("X-Penstock-Namespace", "a\x9fb".encode())],
    ],
)
def test_a_header_that_is_no_name_is_400(
    broker: BrokerProcess, headers: list[tuple[str, bytes]]
) -> None:
    encoded = [(name.encode(), value) for name, value in headers]
    reply = broker.client.get("/v1/topics", headers=encoded)
    assert_invalid(reply)
    assert "X-Penstock-" in reply.json()["message"]


# -- where messages go ---------------------------------------------------------------------------


def test_dead_letters_stay_in_their_namespace(
    scopes: dict[tuple[str, str], ScopedBroker],
) -> None:
    topic = new_name("failing")
    for scope in (DEFAULT, ACME):
        scopes[scope].must("POST", "/v1/topics", json={"name": topic})
    acme = scopes[ACME]
    acme.produce(topic)
    acme.take(topic, 1)
    assert_done(settle("/v1/nack", dead=True, reason="hopeless")(acme, topic))
    [letter] = eventually(lambda: acme.take(f"dlq.{topic}", 1))
    assert letter.envelope is not None
    assert letter.envelope["dlq"]["original_topic"] == topic
    assert_not_found(scopes[DEFAULT].send("GET", f"/v1/topics/dlq.{topic}"))
    assert_not_found(scopes[OTHER].send("GET", f"/v1/topics/dlq.{topic}"))


def test_a_target_topic_is_one_of_the_same_namespace(
    scopes: dict[tuple[str, str], ScopedBroker],
) -> None:
    topic, target = new_name("from"), new_name("to")
    for scope in (DEFAULT, ACME):
        scopes[scope].must("POST", "/v1/topics", json={"name": topic})
    acme = scopes[ACME]
    acme.must("POST", "/v1/topics", json={"name": target})
    acme.produce(topic, envelope={"target_topic": target})
    [item] = acme.take(target, 1)
    assert item.envelope == {"target_topic": target}
    body = {"topic": topic, "value": "v", "envelope": {"target_topic": target}}
    assert_not_found(scopes[DEFAULT].send("POST", "/v1/produce", json=body))
    forged = {**body, "envelope": {"target_topic": f"acme\x1fprod\x1f{target}"}}
    assert_invalid(scopes[DEFAULT].send("POST", "/v1/produce", json=forged))


def test_rows_of_a_write_name_topics_of_the_same_namespace(
    scopes: dict[tuple[str, str], ScopedBroker],
) -> None:
    topic, target = new_name("rows"), new_name("target")
    for scope in (DEFAULT, ACME):
        for name in (topic, target):
            scopes[scope].must("POST", "/v1/topics", json={"name": name})
    rows = [
        {"topic": topic, "value": "named"},
        {"value": "by default"},
        {"topic": topic, "value": "moved", "envelope": {"target_topic": target}},
    ]
    acme, producer = scopes[ACME], new_name("producer")
    body = "\n".join(json.dumps(row) for row in rows).encode()
    acme.must("PUT", f"/v1/writes/{producer}/1/0/0?topic={topic}", content=body)
    parts = {"parts": [{"part": 0, "pieces": 1, "rows": 3}]}
    acme.must("POST", f"/v1/writes/{producer}/1/commit", json=parts)
    assert acme.values(topic) == ["named", "by default"]
    [item] = acme.take(target, 1)
    assert (item.value, item.envelope) == ("moved", {"target_topic": target})
    assert scopes[DEFAULT].values(topic) == scopes[DEFAULT].values(target) == []


def test_a_router_sees_plain_names_and_stays_in_the_namespace(
    start_broker: StartBroker, http_router: HttpRouter
) -> None:
    broker = start_broker("--router", http_router.url)
    create_namespaces(broker)
    acme, plain = ScopedBroker(broker, ACME), ScopedBroker(broker, DEFAULT)
    for name in ("orders", "urgent"):
        acme.must("POST", "/v1/topics", json={"name": name})
    plain.must("POST", "/v1/topics", json={"name": "orders"})
    http_router.says({"target_topic": "urgent"})
    acme.produce("orders", "routed")
    assert http_router.asked[-1]["topic"] == "orders"
    assert acme.values("urgent") == ["routed"]
    # A router has no say about other tenants: such an answer is nonsense, and nothing is routed.
    http_router.says({"target_topic": "acme\x1fprod\x1furgent"})
    plain.produce("orders", "kept")
    assert plain.values("orders") == ["kept"]
    assert acme.values("urgent") == ["routed"]


# -- namespaces that come and go -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["namespace", "tenant"])
def test_a_namespace_with_topics_is_deleted_only_with_cascade(
    broker: BrokerProcess, kind: str
) -> None:
    tenant = new_name("leaving")
    path = f"/v1/tenants/{tenant}"
    broker.client.post("/v1/tenants", json={"tenant_id": tenant})
    broker.client.post(f"{path}/namespaces", json={"namespace": "n"})
    scoped = ScopedBroker(broker, (tenant, "n"))
    scoped.must("POST", "/v1/topics", json={"name": "orders"})
    scoped.produce("orders")
    if kind == "namespace":
        path += "/namespaces/n"
    assert broker.client.delete(path).status_code == 409
    stream = scoped.open_consume("orders")
    stream.take(1)
    assert_done(broker.client.delete(f"{path}?cascade=true"))
    assert stream.wait_for_end() == []
    stream.close()
    assert_not_found(scoped.send("GET", "/v1/topics/orders"))
    broker.client.post("/v1/tenants", json={"tenant_id": tenant})
    broker.client.post(f"/v1/tenants/{tenant}/namespaces", json={"namespace": "n"})
    assert scoped.must("GET", "/v1/topics").json() == {"topics": []}


def test_a_topic_in_a_namespace_that_does_not_exist_is_404(broker: BrokerProcess) -> None:
    for scope, unknown in (
        (("nobody", "prod"), "unknown tenant 'nobody'"),
        (("default", "nowhere"), "unknown namespace 'nowhere' of tenant 'default'"),
    ):
        reply = ScopedBroker(broker, scope).send("POST", "/v1/topics", json={"name": "t"})
        assert_not_found(reply)
        assert reply.json()["message"] == unknown


# -- restarts and reports ------------------------------------------------------------------------


def test_namespaces_stay_apart_across_a_kill(start_broker: StartBroker) -> None:
    broker = start_broker()
    create_namespaces(broker)
    scoped = [ScopedBroker(broker, scope) for scope in SCOPES]
    for each in scoped:
        each.fill("orders")
    before = [each.picture("orders") for each in scoped]
    broker.restart(kill=True)
    for each, shown in zip(scoped, before, strict=True):
        # What was in flight is ready again; everything else is as it was.
        again = each.picture("orders")
        assert {name: again[name] for name in shown if name != "topic"} == {
            name: text for name, text in shown.items() if name != "topic"
        }
        each.produce("orders", "again", envelope={"idempotency_key": KEY})
        assert len(each.values("orders")) == 3
        values = {item.value for item in each.take("orders", 3, group="new")}
        assert values == {f"value of {each.word}", f"row of {each.word}"}


def test_the_journal_tells_tenants_apart(start_broker: StartBroker) -> None:
    broker = start_broker()
    create_namespaces(broker)
    for scope in SCOPES:
        scoped = ScopedBroker(broker, scope)
        scoped.must("POST", "/v1/topics", json={"name": "orders"})
        scoped.produce("orders")
    broker.client.get("/v1/journal/offsets?fresh=true").raise_for_status()

    def rows(query: str = "", **headers: str) -> list[tuple[Any, ...]]:
        reply = broker.client.get(f"/v1/journal?format=ndjson{query}", headers=headers)
        found = [json.loads(line) for line in reply.text.splitlines()]
        return [(row.get("tenant"), row.get("namespace"), row["topic"]) for row in found]

    of_default, of_acme = (None, None, "orders"), ("acme", "prod", "orders")
    of_globex, of_test = ("globex", "prod", "orders"), ("acme", "test", "orders")
    assert rows() == [of_default, of_acme, of_globex, of_test]
    tenant, namespace = "X-Penstock-Tenant", "X-Penstock-Namespace"
    assert rows(**{tenant: "acme"}) == [of_acme, of_test]
    assert rows(**{tenant: "acme", namespace: "test"}) == [of_test]
    assert rows(**{tenant: "default"}) == [of_default]
    assert rows("&topic=orders", **{tenant: "globex"}) == [of_globex]
    assert rows(**{tenant: "nobody"}) == []
    # The archived position covers the rows of everybody.
    refused = broker.client.post("/v1/journal/archived", json={"next": 0}, headers={tenant: "acme"})
    assert_invalid(refused)
    assert broker.client.post("/v1/journal/archived", json={"next": 0}).is_success


def test_metrics_name_the_tenant_of_other_namespaces_only(
    scopes: dict[tuple[str, str], ScopedBroker], broker: BrokerProcess
) -> None:
    topic = new_name("measured")
    for scope in (DEFAULT, ACME):
        scopes[scope].must("POST", "/v1/topics", json={"name": topic})
        scopes[scope].produce(topic)
        scopes[scope].take(topic, 1)
    text = broker.client.get("/metrics").text
    assert f'penstock_buffered_messages{{partition="0",topic="{topic}"}} 1.0' in text
    named = f'namespace="prod",partition="0",tenant_id="acme",topic="{topic}"'
    assert f'penstock_lag{{group="g",{named}}} 1.0' in text
    assert "\x1f" not in text
