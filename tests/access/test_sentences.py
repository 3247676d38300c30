"""The numbered sentences about authorization, over HTTP and the WebSocket."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from penstock.model.principals import Principal
from tests.access.server import AccessServer

HERE = "/v1/tenants/default/namespaces/default"
THERE = "/v1/tenants/other/namespaces/default"
PAYLOAD = {"payload": base64.b64encode(b"x").decode()}
VALUE = {"value": base64.b64encode(b"x").decode()}
ORDER = {"topic": "orders", "value": "v"}


@pytest.fixture(scope="module", autouse=True)
def names(server: AccessServer) -> None:
    for place in (HERE, THERE):
        for name in ("prices", "prices-eu", "news"):
            server.must("root", "POST", f"{place}/streams", {"name": name})
        for name in ("sessions", "carts"):
            server.must("root", "POST", f"{place}/caches", {"name": name})


def status(server: AccessServer, who: str, method: str, path: str, body: Any = None) -> int:
    headers = {"Authorization": f"Bearer {who}"}
    content = None if body is None else json.dumps(body).encode()
    with server.http.stream(method, path, content=content, headers=headers) as reply:
        return reply.status_code


def test_a_rule_allows_exactly_its_actions_on_its_resource(server: AccessServer) -> None:
    """felix-93"""
    who = server.know(Principal("publisher"))
    server.grant(who, "publish", namespace="default", resource="stream:prices")
    assert status(server, who, "POST", f"{HERE}/streams/prices/publish", PAYLOAD) == 200
    for method, path, body in (
        ("GET", f"{HERE}/streams/prices/subscribe", None),
        ("GET", f"{HERE}/streams/prices", None),
        ("DELETE", f"{HERE}/streams/prices", None),
        ("POST", f"{HERE}/streams/news/publish", PAYLOAD),
        ("POST", f"{HERE}/streams/prices-eu/publish", PAYLOAD),
        ("POST", "/v1/produce", ORDER),
    ):
        assert status(server, who, method, path, body) == 403, path


def test_a_subscriber_subscribes_and_cannot_publish(server: AccessServer) -> None:
    """felix-94"""
    who = server.know(Principal("subscriber"))
    server.grant(who, "subscribe", resource="stream:prices")
    assert status(server, who, "GET", f"{HERE}/streams/prices/subscribe") == 200
    assert status(server, who, "POST", f"{HERE}/streams/prices/publish", PAYLOAD) == 403
    stranger = server.know(Principal("without-a-rule"))
    assert status(server, stranger, "GET", f"{HERE}/streams/prices/subscribe") == 403
    assert status(server, stranger, "POST", f"{HERE}/streams/prices/publish", PAYLOAD) == 403


def test_cache_operations_are_checked(server: AccessServer) -> None:
    """felix-95"""
    who = server.know(Principal("c95"))
    entry = f"{HERE}/caches/sessions/entries/k"
    assert status(server, who, "PUT", entry, VALUE) == 403
    server.grant(who, "cache_read", resource="cache:sess*")
    assert status(server, who, "GET", entry) == 200
    assert status(server, who, "PUT", entry, VALUE) == 403
    server.grant(who, "cache_write", resource="cache:sessions")
    assert status(server, who, "PUT", entry, VALUE) == 200
    assert status(server, who, "GET", f"{HERE}/caches/carts/entries/k") == 403


def test_control_plane_operations_are_checked(server: AccessServer) -> None:
    """felix-95"""
    who = server.know(Principal("r95"))
    path = "/v1/tenants/default/namespaces"
    assert status(server, who, "POST", path, {"namespace": "staging"}) == 403
    assert status(server, who, "POST", "/v1/tenants", {"tenant_id": "mine"}) == 403
    server.grant(who, "registry", resource="namespace:stag*")
    assert status(server, who, "POST", path, {"namespace": "staging"}) == 201
    assert status(server, who, "POST", path, {"namespace": "prod"}) == 403
    assert status(server, who, "POST", "/v1/tenants", {"tenant_id": "mine"}) == 403


def test_a_rule_grants_nothing_elsewhere(server: AccessServer) -> None:
    """felix-96: wildcards stay inside the tenant."""
    who = server.know(Principal("wild"))
    server.grant(who, "admin", namespace="*", resource="*")
    assert status(server, who, "POST", f"{HERE}/streams/prices/publish", PAYLOAD) == 200
    assert status(server, who, "POST", f"{THERE}/streams/prices/publish", PAYLOAD) == 403
    assert status(server, who, "GET", THERE) == 403
    rule = {"tenant_id": "*", "principal": who, "permissions": ["read"]}
    reply = server.ask("root", "POST", "/v1/access/rules", rule)
    assert (reply.status_code, reply.json()["error"]) == (400, "INVALID_ARGUMENT")


def test_a_bound_principal_stays_within_its_namespace_whatever_rules_say(
    server: AccessServer,
) -> None:
    """felix-96"""
    server.must("root", "POST", "/v1/tenants/default/namespaces", {"namespace": "second"})
    server.must("root", "POST", "/v1/tenants/default/namespaces/second/streams", {"name": "s"})
    who = server.know(Principal("bound", tenant_id="default", namespace="default"))
    server.grant(who, "publish", namespace="*", resource="stream:*")
    assert status(server, who, "POST", f"{HERE}/streams/news/publish", PAYLOAD) == 200
    second = "/v1/tenants/default/namespaces/second/streams/s/publish"
    assert status(server, who, "POST", second, PAYLOAD) == 403
    assert status(server, "root", "POST", second, PAYLOAD) == 200


def test_roles_hold_permissions_and_principals_hold_roles(server: AccessServer) -> None:
    """felix-97: per resource, and in effect without a restart."""
    alice, bob = server.know(Principal("alice")), server.know(Principal("bob"))
    publish = f"{HERE}/streams/prices/publish"
    server.must("root", "PUT", "/v1/access/roles/feeder", {"permissions": ["publish"]})
    rules = [server.grant(who, "feeder", resource="stream:prices") for who in (alice, bob)]
    assert status(server, alice, "POST", publish, PAYLOAD) == 200
    assert status(server, alice, "POST", f"{HERE}/streams/news/publish", PAYLOAD) == 403
    server.must("root", "PUT", "/v1/access/roles/feeder", {"permissions": ["subscribe"]})
    assert status(server, alice, "POST", publish, PAYLOAD) == 403
    assert status(server, alice, "GET", f"{HERE}/streams/prices/subscribe") == 200
    server.revoke(rules[0])
    assert status(server, alice, "GET", f"{HERE}/streams/prices/subscribe") == 403
    assert status(server, bob, "GET", f"{HERE}/streams/prices/subscribe") == 200


def test_roles_of_a_token_count_in_its_tenant_and_by_rules(server: AccessServer) -> None:
    """felix-97"""
    token = server.know(Principal("jwt", tenant_id="default", roles=frozenset({"reader"})))
    assert status(server, token, "GET", "/v1/topics/orders") == 200
    assert status(server, token, "POST", "/v1/produce", ORDER) == 403
    assert status(server, token, "GET", f"{THERE}/streams/news") == 403
    free = server.know(Principal("jwt2", roles=frozenset({"reader", "on-call"})))
    assert status(server, free, "GET", "/v1/topics/orders") == 403
    rule = {"tenant_id": "default", "role": "on-call", "permissions": ["operator"]}
    server.must("root", "POST", "/v1/access/rules", rule)
    assert status(server, free, "GET", "/v1/topics/orders") == 200


def test_an_unauthorised_invalidation_fails_the_whole_publish(server: AccessServer) -> None:
    """felix-84: no event, no invalidation."""
    who = server.know(Principal("invalidator"))
    server.grant(who, "publish", "subscribe", resource="stream:news")
    entry = f"{HERE}/caches/carts/entries/k"
    server.must("root", "PUT", entry, VALUE)
    body = PAYLOAD | {"invalidate": ["cache:carts:k"]}
    message = {"type": "publish", "tenant_id": "default", "namespace": "default", "stream": "news"}
    with server.socket("root") as listener:
        listener.ask(message | {"type": "subscribe"})
        assert status(server, who, "POST", f"{HERE}/streams/news/publish", body) == 403
        raw = f"{HERE}/streams/news/publish?raw=true&invalidate=cache:carts:k"
        assert server.ask(who, "POST", raw, b"x").status_code == 403
        batch = {"payloads": [PAYLOAD["payload"]], "invalidate": ["cache:carts:k"]}
        assert status(server, who, "POST", f"{HERE}/streams/news/publish_batch", batch) == 403
        with server.socket(who) as socket:
            answer = socket.ask(message | body)
            assert answer["error"] == "PERMISSION_DENIED", answer
        assert server.must("root", "GET", entry)["value"] is not None
        server.grant(who, "cache_write", resource="cache:carts")
        allowed = body | {"payload": base64.b64encode(b"allowed").decode()}
        assert status(server, who, "POST", f"{HERE}/streams/news/publish", allowed) == 200
        # The first event that comes is that of the publish that was allowed.
        assert listener.receive()["payload"] == allowed["payload"]
    assert server.must("root", "GET", entry)["value"] is None


def test_a_transaction_needs_every_cache_that_it_names(server: AccessServer) -> None:
    who = server.know(Principal("txn"))
    server.grant(who, "cache_write", resource="cache:sessions")
    path = f"{HERE}/caches/sessions/txn"
    ops = {"ops": [{"op": "incr", "key": "n", "cache": "carts"}]}
    assert status(server, who, "POST", path, ops) == 403
    checks = {
        "ops": [{"op": "incr", "key": "n"}],
        "checks": [{"key": "n", "cache": "carts", "exists": False}],
    }
    assert status(server, who, "POST", path, checks) == 403
    assert status(server, who, "POST", path, {"ops": [{"op": "incr", "key": "n"}]}) == 200


def test_a_message_for_another_topic_needs_the_target_too(server: AccessServer) -> None:
    """felix-93, for queues."""
    server.must("root", "POST", "/v1/topics", {"name": "secret"})
    who = server.know(Principal("producer"))
    server.grant(who, "produce", resource="topic:orders")
    redirected = ORDER | {"envelope": {"target_topic": "secret"}}
    assert status(server, who, "POST", "/v1/produce", redirected) == 403
    results = server.must(who, "POST", "/v1/produce/batch", [ORDER, redirected])["results"]
    assert [each.get("code", 200) for each in results] == [200, 403]
    described = server.must("root", "GET", "/v1/topics/secret")
    assert described["next_offset"] == 0


def test_settling_needs_consume(server: AccessServer) -> None:
    """felix-93, for queues."""
    who = server.know(Principal("settler"))
    delivery = {"topic": "orders", "group": "g", "partition": 0, "offset": 0, "owner": "o"}
    for path in ("ack", "nack", "release", "extend"):
        assert status(server, who, "POST", f"/v1/{path}", delivery) == 403
    server.grant(who, "consume", resource="topic:orders")
    for path in ("ack", "nack", "release", "extend"):
        assert status(server, who, "POST", f"/v1/{path}", delivery) != 403


def test_a_refusal_does_not_say_whether_the_resource_exists(server: AccessServer) -> None:
    who = server.know(Principal("curious"))
    there = server.ask(who, "GET", "/v1/topics/orders").json()
    absent = server.ask(who, "GET", "/v1/topics/absent").json()
    assert there["error"] == absent["error"] == "PERMISSION_DENIED"
    assert there["message"].replace("orders", "absent") == absent["message"]
    assert "read" in there["message"]


def test_staged_rows_need_produce_on_every_topic(server: AccessServer) -> None:
    who = server.know(Principal("stager"))
    server.grant(who, "write", resource="producer:nightly")
    server.grant(who, "produce", resource="topic:orders")
    lines = b'{"topic":"orders","value":"a"}\n{"topic":"secret","value":"b"}\n'
    assert server.ask(who, "PUT", "/v1/writes/nightly/1/0/0", lines).status_code == 403
    assert server.ask(who, "PUT", "/v1/writes/weekly/1/0/0", lines).status_code == 403
    own = b'{"topic":"orders","value":"a"}\n'
    assert server.ask(who, "PUT", "/v1/writes/nightly/1/0/0", own).status_code == 200
    cache = "/v1/writes/nightly/2/0/0?cache=default/default/carts"
    row = b'{"key":"k","value":"eA=="}\n'
    assert server.ask(who, "PUT", cache, row).status_code == 403


def test_staged_events_need_publish_on_the_stream(server: AccessServer) -> None:
    """felix-93: a refusal is the same whether the stream exists or not."""
    path = "/v1/tenants/default/namespaces/default/streams"
    server.must("root", "POST", path, {"name": "kept", "delivery": "at_least_once"})
    who = server.know(Principal("event-stager"))
    server.grant(who, "write", resource="producer:nightly")
    server.grant(who, "produce", "subscribe", "manage")
    piece = "/v1/writes/nightly/3/0/0?stream=default/default/"
    row = b'{"payload":"eA=="}\n'
    texts = set()
    for name in ("kept", "absent"):
        reply = server.ask(who, "PUT", piece + name, row)
        assert reply.status_code == 403
        assert "publish" in reply.text
        texts.add(reply.json()["message"].replace(name, "NAME"))
    assert len(texts) == 1
    server.grant(who, "publish", resource="stream:kept")
    assert server.ask(who, "PUT", piece + "kept", row).status_code == 200


def test_a_page_of_offsets_ends_with_a_visible_name(
    server: AccessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """felix-96: `after` would name a topic that must not be seen."""
    monkeypatch.setattr("penstock.engine.ranges.PAGE_PARTITIONS", 1)
    for name in ("zoo-1-hidden", "zoo-2-shown", "zoo-3-hidden"):
        server.must("root", "POST", "/v1/topics", {"name": name})
    who = server.know(Principal("visitor"))
    server.grant(who, "read", resource="topic:zoo-2*")
    after: str | None = "zoo"
    shown: list[str] = []
    while after is not None:
        reply = server.ask(who, "GET", f"/v1/offsets?after={after}")
        assert "hidden" not in reply.text
        page = reply.json()
        shown += [each["topic"] for each in page["topics"]]
        after = page.get("after")
    assert shown == ["zoo-2-shown"]
    assert server.must(who, "GET", "/v1/topics") == {"topics": ["zoo-2-shown"]}


def test_two_tenants_have_topics_of_the_same_name(server: AccessServer) -> None:
    """felix-96: a rule for `orders` of one tenant says nothing about that of the other."""
    who = server.know(Principal("both"))
    server.grant(who, "produce", "read", resource="topic:orders")

    def ask(tenant: str, path: str, body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {who}", "X-Penstock-Tenant": tenant}
        method = "GET" if body is None else "POST"
        return server.http.request(method, path, json=body, headers=headers).status_code

    root = {"Authorization": "Bearer root", "X-Penstock-Tenant": "other"}
    server.http.post("/v1/topics", json={"name": "orders"}, headers=root).raise_for_status()
    assert (ask("default", "/v1/produce", ORDER), ask("other", "/v1/produce", ORDER)) == (200, 403)
    assert (ask("default", "/v1/topics/orders"), ask("other", "/v1/topics/orders")) == (200, 403)
    named = {"name": "penstock.audit"}
    assert server.http.post("/v1/topics", json=named, headers=root).status_code == 403
