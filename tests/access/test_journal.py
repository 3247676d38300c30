"""The journal shows each principal the rows of the topics that it may see, and no others."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from penstock.model.principals import Principal
from tests.access.server import AccessServer


@pytest.fixture(scope="module", autouse=True)
def history(server: AccessServer) -> None:
    """Topics of two tenants. Both have `orders`."""
    for name in ("orders", "orders-eu", "secret"):
        server.must("root", "POST", "/v1/topics", {"name": name})
        server.must("root", "POST", "/v1/produce", {"topic": name, "value": "v"})
    theirs = {"X-Penstock-Tenant": "other", "Authorization": "Bearer root"}
    server.http.post("/v1/topics", json={"name": "orders"}, headers=theirs).raise_for_status()
    message = {"topic": "orders", "value": "v"}
    server.http.post("/v1/produce", json=message, headers=theirs).raise_for_status()
    server.must("root", "GET", "/v1/journal/offsets?fresh=true")


def rows(server: AccessServer, who: str, query: str = "") -> list[dict[str, Any]]:
    reply = server.ask(who, "GET", f"/v1/journal?format=ndjson{query}")
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def topics(server: AccessServer, who: str, query: str = "") -> set[tuple[str, str]]:
    found = rows(server, who, query)
    return {(row.get("tenant", "default"), row["topic"]) for row in found}


def test_rows_of_other_tenants_and_topics_are_hidden(server: AccessServer) -> None:
    """felix-96"""
    ours = [("default", name) for name in ("orders", "orders-eu", "secret")]
    theirs = ("other", "orders")
    assert {*ours, theirs} <= topics(server, "root")
    some = server.know(Principal("some"))
    server.grant(some, "journal", resource="topic:orders*")
    assert topics(server, some) == set(ours[:2])
    assert topics(server, some, "&topic=secret") == set()
    here = server.know(Principal("here", tenant_id="default", roles=frozenset({"reader"})))
    assert theirs not in topics(server, here)
    there = server.know(Principal("there", tenant_id="other", is_admin=True))
    assert topics(server, there) == {theirs}


def test_a_rule_for_a_topic_does_not_open_the_stream_of_the_same_name(server: AccessServer) -> None:
    """felix-94"""
    path = "/v1/tenants/default/namespaces/default/streams"
    server.must("root", "POST", path, {"name": "orders", "durable": True})
    server.must("root", "POST", f"{path}/orders/publish", {"payload": "dg=="})
    server.must("root", "GET", "/v1/journal/offsets?fresh=true")
    for kind in ("topic", "stream"):
        who = server.know(Principal(f"only-{kind}"))
        server.grant(who, "journal", resource=f"{kind}:orders")
        for query in ("", "&topic=orders", "&stream=orders"):
            kinds = {"topic", "stream"} if not query else {query[1:].partition("=")[0]}
            assert {row["resource_kind"] for row in rows(server, who, query)} == kinds & {kind}
        arrow = server.ask(who, "GET", "/v1/journal").content
        table = pa.ipc.open_stream(arrow).read_all()
        assert set(table.column("resource_kind").to_pylist()) == {kind}
    every = server.know(Principal("every-stream"))
    server.grant(every, "journal", resource="stream:*")
    assert {row["resource_kind"] for row in rows(server, every)} == {"stream"}


def test_an_arrow_stream_is_filtered_too(server: AccessServer) -> None:
    """The bytes on disk are not sent as they are to somebody who may see only a part of them."""
    who = server.know(Principal("arrow"))
    server.grant(who, "journal", resource="topic:secret")
    reply = server.ask(who, "GET", "/v1/journal")
    table = pa.ipc.open_stream(reply.content).read_all()
    assert set(table.column("topic").to_pylist()) == {"secret"}


def test_without_the_permission_the_journal_is_403(server: AccessServer) -> None:
    who = server.know(Principal("none"))
    server.grant(who, "read", "consume")
    for path in ("/v1/journal", "/v1/journal/offsets", "/v1/journal/splits"):
        assert server.ask(who, "GET", path).status_code == 403
