"""The quota `connections`: whom an open connection counts for, and when it is one too many."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.contract.wire import Closed, Wire
from tests.websocket import WebSocket

HELLO = b"GET /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n"


@pytest.fixture
def tenant(broker: BrokerProcess) -> str:
    name = new_name("tenant")
    made = {"tenants": [{"tenant_id": name, "namespaces": ["prod", "test"]}]}
    assert broker.client.post("/v1/apply", json=made).status_code == 200
    return name


def limit(broker: BrokerProcess, tenant: str, most: int | None, namespace: str = "") -> None:
    at = f"/v1/tenants/{tenant}" + (f"/namespaces/{namespace}" if namespace else "")
    changed = broker.client.patch(f"{at}/quota", json={"connections": most})
    assert changed.status_code == 200, changed.text


def used(broker: BrokerProcess, tenant: str, namespace: str = "") -> int:
    at = f"/v1/tenants/{tenant}" + (f"/namespaces/{namespace}" if namespace else "")
    count: int = broker.client.get(f"{at}/quota").json()["used"]["connections"]
    return count


def scope_lines(tenant: str, namespace: str = "prod") -> list[str]:
    return [f"X-Penstock-Tenant: {tenant}", f"X-Penstock-Namespace: {namespace}"]


def request(tenant: str, namespace: str = "prod") -> bytes:
    lines = "".join(f"{line}\r\n" for line in scope_lines(tenant, namespace)) if tenant else ""
    return HELLO % lines.encode()


def opened(broker: BrokerProcess, stack: ExitStack, tenant: str, namespace: str = "prod") -> Wire:
    wire = stack.enter_context(Wire(broker.port))
    wire.send(request(tenant, namespace))
    return wire


def assert_one_too_many(wire: Wire, name: str = "connections") -> None:
    refused = wire.read()
    assert (refused.status, refused.json()["limit"]) == (429, name)
    assert refused.json()["reason"] == "quota"
    assert refused.headers["connection"] == "close"
    with pytest.raises((Closed, ConnectionError)):
        wire.read()


def test_one_connection_too_many_is_429_and_closed(broker: BrokerProcess, tenant: str) -> None:
    """felix-99, 102: closing one frees its place, and other tenants notice nothing."""
    limit(broker, tenant, 3)
    with ExitStack() as stack:
        wires = [opened(broker, stack, tenant) for _ in range(3)]
        assert [wire.read().status for wire in wires] == [200] * 3
        assert_one_too_many(opened(broker, stack, tenant, "test"))
        assert opened(broker, stack, "").read().status == 200
        assert (used(broker, tenant), used(broker, tenant, "prod")) == (3, 3)
        # Those that are open go on, and count once however much they ask.
        for _ in range(3):
            wires[0].send(request(tenant))
            assert wires[0].read().status == 200
        wires.pop().socket.close()
        assert eventually(lambda: used(broker, tenant) == 2)
        assert opened(broker, stack, tenant).read().status == 200
        metrics = broker.client.get("/metrics").text
        labels = f'namespace="",quota="connections",tenant="{tenant}"'
        assert f"penstock_quota_used{{{labels}}} 3.0" in metrics
        assert f"penstock_quota_refusals_total{{{labels}}} 1.0" in metrics
    assert eventually(lambda: used(broker, tenant) == 0)


def _reset(wire: Wire) -> None:
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wire.socket.close()


def _half(wire: Wire) -> None:
    wire.socket.shutdown(socket.SHUT_WR)


def _nonsense(wire: Wire) -> None:
    wire.send(b"nonsense\r\n\r\n")


def _last(wire: Wire) -> None:
    wire.send(HELLO % b"Connection: close\r\n")


def _socket_cut(wire: Wire) -> None:
    _upgrade(wire)
    _reset(wire)


def _socket_violation(wire: Wire) -> None:
    _upgrade(wire)
    wire.send(b"\xff\xff")


def _stream_cut(wire: Wire) -> None:
    wire.send(b"GET /v1/consume?topic=nothing&group=g&owner=o HTTP/1.1\r\nHost: a\r\n\r\n")
    _reset(wire)


def _upgrade(wire: Wire) -> None:
    wire.send(
        b"GET /v1/felix/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: felix.v1\r\n\r\n"
    )


ENDS = [_reset, _half, _nonsense, _last, _socket_cut, _socket_violation, _stream_cut]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__.strip("_"))
def test_a_place_is_free_however_a_connection_ends(
    broker: BrokerProcess, tenant: str, end: Callable[[Wire], None]
) -> None:
    limit(broker, tenant, 1)
    for _ in range(3):
        with ExitStack() as stack:
            wire = opened(broker, stack, tenant)
            assert wire.read().status == 200
            end(wire)
            assert eventually(lambda: used(broker, tenant) == 0)


def test_a_connection_counts_for_the_sender_of_its_latest_request(
    broker: BrokerProcess, tenant: str
) -> None:
    """It may move within a tenant that has no other place left."""
    limit(broker, tenant, 1)
    with ExitStack() as stack:
        wire = opened(broker, stack, tenant)
        assert wire.read().status == 200
        wire.send(request(tenant, "test"))
        assert wire.read().status == 200
        counted = [used(broker, tenant, namespace) for namespace in ("", "prod", "test")]
        assert counted == [1, 0, 1]
        wire.send(request(""))
        assert wire.read().status == 200
        assert used(broker, tenant) == 0
        other = opened(broker, stack, tenant)
        assert other.read().status == 200
        wire.send(request(tenant))
        assert_one_too_many(wire)
        assert used(broker, tenant) == 1


def test_nothing_behind_a_refused_request_is_done(broker: BrokerProcess, tenant: str) -> None:
    """Pipelined, with a head that the broker knows and one that it does not."""
    limit(broker, tenant, 1)
    plain = new_name("topic")
    body = b'{"name": "%b"}' % plain.encode()
    create = b"POST /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
    known = b"POST /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
    with ExitStack() as stack:
        assert opened(broker, stack, tenant).read().status == 200
        for _ in range(3):
            with Wire(broker.port) as wire:
                wire.send(known % (2, b"{}"))
                wire.read()
                wire.send(
                    request("") + request(tenant) + (create + known) % ((len(body), body) * 2)
                )
                assert wire.read().status == 200
                assert_one_too_many(wire)
    assert plain not in broker.client.get("/v1/topics").json()["topics"]


def test_a_websocket_is_refused_at_its_handshake(broker: BrokerProcess, tenant: str) -> None:
    """felix-99: and one that is open counts until it closes."""
    limit(broker, tenant, 2, "prod")
    headers = scope_lines(tenant)
    with WebSocket(broker.port, headers=headers) as first:
        assert first.status == 101
        with ExitStack() as stack:
            assert opened(broker, stack, tenant).read().status == 200
            assert used(broker, tenant, "prod") == 2
            with WebSocket(broker.port, headers=headers) as refused:
                assert (refused.status, refused.body["limit"]) == (429, "connections")
            assert used(broker, tenant, "prod") == 2
        assert eventually(lambda: used(broker, tenant, "prod") == 1)
    assert eventually(lambda: used(broker, tenant, "prod") == 0)


def test_a_handshake_behind_other_requests_counts_for_its_own_sender(
    broker: BrokerProcess, tenant: str
) -> None:
    with WebSocket(broker.port, headers=scope_lines(tenant, "test"), before=request(tenant)) as ws:
        ws.read_head()
        ws.read_body(len(b'{"topics":[]}'))
        ws.read_handshake()
        assert ws.status == 101
        assert [used(broker, tenant, each) for each in ("prod", "test")] == [0, 1]


def test_a_sender_whose_token_is_refused_counts_for_nobody(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """Otherwise anybody could use up the places of a tenant."""
    broker = start_broker(env={"PENSTOCK_TOKEN": "secret"})
    admin = {"Authorization": "Bearer secret"}
    healthz = b"GET /v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Penstock-Tenant: acme\r\n\r\n"
    with broker.new_client(headers=admin) as client, ExitStack() as stack:
        client.post("/v1/apply", json={"tenants": [{"tenant_id": "acme"}]})
        client.patch("/v1/tenants/acme/quota", json={"connections": 1})
        for _ in range(3):
            wire = stack.enter_context(Wire(broker.port))
            wire.send(healthz)
            assert wire.read().status == 200
            wire.send(request("acme"))
            assert wire.read().status == 401
        assert client.get("/v1/tenants/acme/quota").json()["used"]["connections"] == 0


def test_a_sender_without_a_tenant_of_its_own_counts_for_nobody(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """With access control a header is not enough: whoever has no right in a tenant could use up its
    places."""
    broker = start_broker(env={"PENSTOCK_TOKEN": "secret", "PENSTOCK_ACCESS_CONTROL": "true"})
    admin = {"Authorization": "Bearer secret"}
    with broker.new_client(headers=admin) as client, ExitStack() as stack:
        client.post("/v1/apply", json={"tenants": [{"tenant_id": "acme"}]})
        client.patch("/v1/tenants/acme/quota", json={"connections": 1})

        def open_as(**token: str) -> Wire:
            made = client.post("/v1/tokens", json={"principal": "p", **token}).json()["token"]
            lines = f"Authorization: Bearer {made}\r\nX-Penstock-Tenant: acme\r\n"
            wire = stack.enter_context(Wire(broker.port))
            wire.send(HELLO % lines.encode())
            return wire

        for _ in range(3):
            assert open_as().read().status == 200
        assert open_as(tenant_id="acme").read().status == 200
        assert_one_too_many(open_as(tenant_id="acme"))
        assert client.get("/v1/tenants/acme/quota").json()["used"]["connections"] == 1
