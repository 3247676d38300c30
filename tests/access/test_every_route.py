"""Every route and every message × who sends it, made from the tables, so that none is forgotten."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.model.permissions import ALL_PERMISSIONS, BROKER_PERMISSIONS
from penstock.model.principals import Principal
from penstock.server.access import Filtered, HandlerNeeds, Needs, Open
from penstock.server.message_actions import MESSAGES
from penstock.server.message_description import MessageDescription
from penstock.server.openapi import build_document
from penstock.server.routes.endpoint import Endpoint, PathNames
from penstock.server.routes.table import ENDPOINTS
from tests.access.scope_reading import READ
from tests.access.server import AccessServer
from tests.websocket import BINARY

CHECKED = [each for each in ENDPOINTS if isinstance(each.access, Needs | HandlerNeeds)]
FILTERED = [each for each in ENDPOINTS if isinstance(each.access, Filtered)]
OPEN = [each for each in ENDPOINTS if isinstance(each.access, Open)]
CHECKED_MESSAGES = [each for each in MESSAGES if isinstance(each.access, HandlerNeeds)]

OPEN_ROUTES = {
    "GET /v1/version",
    "GET /v1/cluster",
    "GET /v1/healthz",
    "GET /v1/livez",
    "GET /v1/readyz",
    "GET /v1/access/check",
    "GET /v1/access/self",
    "POST /v1/felix",
    "POST /v1/transactions",
    "GET /v1/felix/ws",
}
"""Everything else needs a permission, or shows only what the sender may see."""

FROM_BODY: dict[str, Any] = {
    "GET /v1/consume": {"topic": "orders", "group": "g", "owner": "o"},
}


@pytest.fixture(scope="module", autouse=True)
def principals(server: AccessServer) -> None:
    server.know(Principal("nobody"))
    server.know(Principal("stranger", tenant_id="other", is_admin=True))


@pytest.fixture(autouse=True)
def resources(server: AccessServer) -> None:
    """Creates what the examples name, if a test before has deleted it."""
    for path, body in (
        ("/v1/topics", {"name": "orders"}),
        ("/v1/tenants", {"tenant_id": "default"}),
        ("/v1/tenants/default/namespaces", {"namespace": "default"}),
        ("/v1/tenants/default/namespaces/default/streams", {"name": "default"}),
        ("/v1/tenants/default/namespaces/default/caches", {"name": "default"}),
    ):
        # 409: it is there, with the settings of an example.
        assert server.ask("root", "POST", path, body).status_code in (200, 201, 409)


def example_path(endpoint: Endpoint) -> str:
    properties = msgspec.json.schema(PathNames)["$defs"]["PathNames"]["properties"]

    def example(found: re.Match[str]) -> str:
        given = endpoint.path_examples.get(found[1])
        return str(given or properties[found[1]]["examples"][0])

    return re.sub(r"\{(\w+)\}", example, endpoint.path)


def send(server: AccessServer, who: str, endpoint: Endpoint, **more_headers: str) -> httpx.Response:
    """Sends the endpoint's own example; of a stream only the head is read."""
    path, body = example_path(endpoint), None
    if endpoint.query_only or (endpoint.body is None and endpoint.example):
        pairs = FROM_BODY.get(endpoint.route, endpoint.example)
        path += "?" + "&".join(f"{name}={value}" for name, value in pairs.items())
    elif endpoint.example is not None:
        body = json.dumps(endpoint.example).encode()
    if endpoint.path == "/v1/idempotency":
        path += "?topic=orders&group=g&key=k"
    headers = {"Authorization": f"Bearer {who}", "X-Penstock-Tenant": "default"} | more_headers
    if endpoint.path == "/v1/access/rules/{rule}":
        path = f"/v1/access/rules/{server.grant('victim', 'read')}"
    elif endpoint.path.startswith("/v1/tokens"):
        # Tokens of every tenant are an admin's; see test_tokens.py.
        wanted = {"principal": "bot", "tenant_id": "default"}
        body = json.dumps(wanted).encode() if endpoint.path == "/v1/tokens" else body
        if "{" in endpoint.path:
            made = server.must("root", "POST", "/v1/tokens", wanted)
            path = path.replace(example_path(endpoint).split("/")[3], made["id"])
    with server.http.stream(endpoint.method, path, content=body, headers=headers) as reply:
        is_stream = reply.headers.get("transfer-encoding") == "chunked"
        if not is_stream:
            reply.read()
    return reply


def is_denied(reply: httpx.Response, endpoint: Endpoint) -> bool:
    if endpoint.batch and reply.status_code == 200:
        results = reply.json()["results"]
        return bool(results) and all(each.get("code") == 403 for each in results)
    if reply.status_code != 403:
        return False
    return bool(reply.json()["error"]) and "PERMISSION_DENIED" in reply.text


def need(described: Endpoint | MessageDescription) -> Needs | HandlerNeeds:
    assert isinstance(described.access, Needs | HandlerNeeds)
    return described.access


def names(endpoints: list[Endpoint]) -> list[str]:
    return [endpoint.route for endpoint in endpoints]


def test_only_known_routes_are_open() -> None:
    """A new route says what it needs; leaving it open takes a line in this test."""
    assert {endpoint.route for endpoint in OPEN} == OPEN_ROUTES


@pytest.mark.parametrize("endpoint", CHECKED, ids=names(CHECKED))
def test_without_a_rule_a_route_is_403(server: AccessServer, endpoint: Endpoint) -> None:
    """felix-94: a principal without a rule is denied everything."""
    assert is_denied(send(server, "nobody", endpoint), endpoint)


@pytest.mark.parametrize("endpoint", CHECKED, ids=names(CHECKED))
def test_every_other_permission_is_too_little(server: AccessServer, endpoint: Endpoint) -> None:
    """felix-93: a rule allows exactly its permissions."""
    needed = need(endpoint).permission
    who = server.know(Principal(f"all-but-{needed}"))
    others = sorted(ALL_PERMISSIONS - {needed})
    server.grant(who, *sorted({*others} - BROKER_PERMISSIONS))
    server.grant(who, *others, resource="broker")
    assert is_denied(send(server, who, endpoint), endpoint)


@pytest.mark.parametrize("endpoint", CHECKED, ids=names(CHECKED))
def test_the_right_permission_is_enough(server: AccessServer, endpoint: Endpoint) -> None:
    """felix-93. Who grants needs what they grant, too, so there the role is admin."""
    needed, kind = need(endpoint).permission, need(endpoint).kind
    who = server.know(Principal(f"only-{needed}-{kind}"))
    if needed == "access":
        server.grant(who, "admin")
    elif kind == "broker":
        server.grant(who, needed, resource="broker")
    else:
        server.grant(who, needed, resource=f"{kind}:*")
    reply = send(server, who, endpoint)
    assert reply.status_code != 403, reply.text
    assert not is_denied(reply, endpoint)


@pytest.mark.parametrize("endpoint", FILTERED, ids=names(FILTERED))
def test_a_list_shows_a_stranger_nothing_of_the_tenant(
    server: AccessServer, endpoint: Endpoint
) -> None:
    """felix-96: lists show only what the principal may see."""
    server.grant("root", "read")
    server.must("root", "POST", "/v1/tokens", {"principal": "bot", "tenant_id": "default"})
    server.must("root", "PUT", "/v1/access/roles/orders-team", {"permissions": ["read"]})
    own = send(server, "root", endpoint)
    assert own.status_code == 200, own.text
    assert "default" in own.text or "orders" in own.text
    for who in ("nobody", "stranger"):
        reply = send(server, who, endpoint)
        if reply.status_code == 403:
            continue
        assert reply.status_code == 200, reply.text
        (shown,) = [value for value in reply.json().values() if isinstance(value, list)]
        assert not [each for each in shown if "other" not in json.dumps(each)], reply.text


@pytest.mark.parametrize("endpoint", OPEN, ids=names(OPEN))
def test_an_open_route_is_not_403(server: AccessServer, endpoint: Endpoint) -> None:
    if endpoint.path in ("/v1/felix", "/v1/felix/ws", "/v1/transactions"):
        pytest.skip("its messages or operations are checked, one by one")
    if endpoint.path == "/v1/access/check":
        path = "/v1/access/check?permission=produce&resource=topic:orders"
        assert server.must("nobody", "GET", path)["allowed"] is False
        return
    assert send(server, "nobody", endpoint).status_code == 200


def test_metrics_need_their_permission(server: AccessServer) -> None:
    server.know(Principal("scraper"))
    for who in ("nobody", "stranger", "scraper"):
        assert server.ask(who, "GET", "/metrics").status_code == 403
    server.grant("scraper", "metrics", resource="broker")
    assert server.ask("scraper", "GET", "/metrics").status_code == 200


@pytest.fixture(scope="module")
def read_parts(server: AccessServer) -> Iterator[Callable[[Endpoint], set[str]]]:
    """Sends the endpoint's example, and tells which parts of the request's scope were read."""

    def send_and_tell(endpoint: Endpoint) -> set[str]:
        example = endpoint.example
        if isinstance(example, dict):
            # A body that names the tenant itself needs no header.
            example = {name: value for name, value in example.items() if name != "tenant_id"}
        READ.clear()
        # What was read of a head that had been sent before is not asked again.
        send(server, "root", msgspec.structs.replace(endpoint, example=example), test="reads")
        return set(READ)

    server.admission.remembers_reads = True
    yield send_and_tell
    server.admission.remembers_reads = False


DOCUMENT = build_document()
REFUSES_SCOPE = "POST /v1/journal/archived"
"""The archived position is that of all tenants: a request that names one is refused."""


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=names(list(ENDPOINTS)))
def test_the_document_has_the_scope_headers_that_a_route_reads(
    read_parts: Callable[[Endpoint], set[str]], endpoint: Endpoint
) -> None:
    """Of every route, a new one too: whoever reads the scope of a request says so."""
    read = read_parts(endpoint)
    operation = DOCUMENT["paths"][endpoint.path][endpoint.method.lower()]
    documented = {each["name"] for each in operation.get("parameters", [])}
    headers = {"X-Penstock-Tenant": "tenant", "X-Penstock-Namespace": "namespace"}
    shown = {part for header, part in headers.items() if header in documented}
    if endpoint.route == REFUSES_SCOPE:
        assert (read, shown) == ({"tenant", "namespace"}, set())
    else:
        assert shown == read


# -- messages --------------------------------------------------------------------------------------


def message_types(messages: list[MessageDescription]) -> list[str]:
    return [each.type for each in messages]


def exchange(server: AccessServer, who: str, each: MessageDescription) -> dict[str, Any]:
    with server.socket(who) as socket:
        answer: dict[str, Any] = socket.ask({"type": each.type, **each.example})
        return answer


@pytest.mark.parametrize("each", CHECKED_MESSAGES, ids=message_types(CHECKED_MESSAGES))
@pytest.mark.parametrize("who", ["nobody", "stranger", "weak", "right"])
def test_a_message_needs_its_permission(
    server: AccessServer, each: MessageDescription, who: str
) -> None:
    """felix-95: on the socket as over HTTP."""
    needed = need(each).permission
    if who in ("weak", "right"):
        granted = {needed} if who == "right" else ALL_PERMISSIONS - BROKER_PERMISSIONS - {needed}
        who = server.know(Principal(f"{who}-{needed}"))
        server.grant(who, *sorted(granted))
    answers = [exchange(server, who, each)]
    if each.action is not None:
        body = {"type": each.type, **each.example}
        answers.append(server.ask(who, "POST", "/v1/felix", body).json())
        answers += server.ask(who, "POST", "/v1/felix", [body]).json()
    for answer in answers:
        is_refused = "PERMISSION_DENIED" in json.dumps(answer)
        assert is_refused is not who.startswith("right"), answer


def test_messages_that_need_nothing_are_about_the_connection_itself() -> None:
    without = {each.type for each in MESSAGES if isinstance(each.access, Open)}
    own = {"unsubscribe", "lag", "pause", "resume", "cache_unwatch", "ping"}
    own |= {"event_ack", "event_nack", "event_extend", "event_release"}
    assert without == own


def test_a_binary_publish_needs_publish(server: AccessServer) -> None:
    """felix-95"""
    name = b"\x07default"
    frame = struct.pack("<BBI", 2, 2, 1) + 3 * name + struct.pack("<II", 1, 1) + b"x"
    server.know(Principal("binary"))
    with server.socket("binary", subprotocol="felix.v1+binary") as socket:
        socket.send_frame(BINARY, frame)
        assert "PERMISSION_DENIED" in json.dumps(socket.receive())
        server.grant("binary", "publish", resource="stream:default")
        socket.send_frame(BINARY, frame)
        assert socket.receive()["type"] == "publish_ok"
