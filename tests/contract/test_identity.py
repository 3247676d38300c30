"""Identity: with access control every request needs a credential, and none outlives its end."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from penstock.server.pages import WebPages
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import assert_error, new_name
from tests.contract.conftest import SMALL_SEGMENTS, StartBroker
from tests.jwt_tokens import (
    AUDIENCE,
    EC_KEY,
    ISSUER,
    KEYS,
    claims,
    damaged,
    forged,
    key_set,
    signed,
)
from tests.ndjson import ConsumeStream
from tests.routes import all_routes
from tests.websocket import Closed, WebSocket

TOKEN = re.compile(r"pst_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")
OPEN_PATHS = {"/v1/healthz", "/v1/livez", "/v1/readyz"}
SIGN_IN = {"/docs", "/docs/sign-in.js"}
"""Pages that ask for a token in their own words."""
PAGES = {("GET", path.decode()) for path in WebPages().routes()}
ROUTES = sorted({(method, path) for method, path in all_routes() | PAGES if path not in SIGN_IN})


class Guarded:
    """A broker with access control, and the requests of an admin to it."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process
        found = TOKEN.findall(process.stdout())
        assert len(found) == 1, process.stdout()
        self.admin = found[0]
        self.client = process.new_client(headers=bearer(self.admin))
        # The senders of these tests may use topics, streams and caches, but not manage tokens.
        for who in ({"principal": "someone"}, {"role": "reader"}):
            rule = who | {"tenant_id": "default", "permissions": ["writer"]}
            assert self.client.post("/v1/access/rules", json=rule).status_code in (200, 201)

    def create(self, **wanted: Any) -> dict[str, Any]:
        reply = self.client.post("/v1/tokens", json={"principal": "someone"} | wanted)
        assert reply.status_code == 201, reply.text
        made: dict[str, Any] = reply.json()
        return made

    def rotate(self, made: dict[str, Any], **how: Any) -> dict[str, Any]:
        reply = self.client.post(f"/v1/tokens/{made['id']}/rotate", json=how)
        assert reply.status_code == 200, reply.text
        rotated: dict[str, Any] = reply.json()
        return rotated

    def revoke(self, made: dict[str, Any]) -> None:
        assert self.client.delete(f"/v1/tokens/{made['id']}").status_code == 204

    def status(self, token: str, path: str = "/v1/topics", **options: Any) -> int:
        with self.process.new_client() as client:
            return client.get(path, headers=bearer(token), **options).status_code

    def topic(self) -> str:
        name = new_name()
        assert self.client.post("/v1/topics", json={"name": name}).status_code == 201
        return name

    def put(self, topic: str, value: str) -> None:
        reply = self.client.post("/v1/produce", json={"topic": topic, "value": value})
        assert reply.status_code == 200, reply.text

    def consume(self, topic: str, token: str) -> ConsumeStream:
        target = f"/v1/consume?topic={topic}&group=g&owner=o&lease_ms=60000"
        headers = [("Authorization", f"Bearer {token}")]
        stream = ConsumeStream(self.process.port, target, headers=headers)
        assert stream.status == 200
        return stream

    def open_feed(self, target: str, token: str, accept: str) -> socket.socket:
        """A connection with an open feed, whose head has come."""
        feed = socket.create_connection(("127.0.0.1", self.process.port), 10)
        lines = f"Host: localhost\r\nAuthorization: Bearer {token}\r\nAccept: {accept}\r\n\r\n"
        feed.sendall(f"GET {target} HTTP/1.1\r\n{lines}".encode())
        assert feed.recv(4096).startswith(b"HTTP/1.1 200")
        return feed


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def issuer() -> Iterator[IssuerServer]:
    server = IssuerServer()
    yield server
    server.close()


class IssuerServer:
    """An identity provider: serves its keys over HTTP."""

    def __init__(self) -> None:
        self.keys = key_set(**KEYS)
        self.status = 200
        self.fetches = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.fetches += 1
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.keys)

            def log_message(self, *args: Any) -> None:
                """Prints nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"
        threading.Thread(target=self._server.serve_forever).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, issuer: IssuerServer) -> Iterator[Guarded]:
    data_dir = tmp_path_factory.mktemp("guarded")
    env = SMALL_SEGMENTS | {
        "PENSTOCK_JWT_ISSUER": ISSUER,
        "PENSTOCK_JWT_AUDIENCE": AUDIENCE,
        "PENSTOCK_JWT_REFRESH_MS": "1000",
        "PENSTOCK_JWT_LEEWAY_MS": "0",
        "PENSTOCK_LOG_LEVEL": "debug",
    }
    process = BrokerProcess(data_dir, "--access-control", "--jwt-keys", issuer.url, env=env)
    try:
        guarded = Guarded(process.start())
        yield guarded
        guarded.client.close()
        assert "Traceback" not in process.stderr()
    finally:
        process.close()
        shutil.rmtree(data_dir)


# -- every route -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_credentials(guarded: Guarded) -> dict[str, str]:
    revoked, rotated = guarded.create(), guarded.create()
    guarded.revoke(revoked)
    guarded.rotate(rotated)
    expired = guarded.create(expires_in_ms=1)
    now_s = time.time()
    good = claims(now_s)
    eventually(lambda: guarded.status(expired["token"]) == 401)
    return {
        "none": "",
        "unknown": "Bearer pst_0123456789abcdef_" + "x" * 43,
        "another scheme": f"Basic {guarded.admin}",
        "a wrong secret": f"Bearer {guarded.admin[:-1]}{'A' if guarded.admin[-1] != 'A' else 'B'}",
        "revoked": f"Bearer {revoked['token']}",
        "rotated": f"Bearer {rotated['token']}",
        "expired": f"Bearer {expired['token']}",
        "expired JWT": b"Bearer ".decode() + signed(claims(now_s, exp=now_s - 1)).decode(),
        "wrong audience": "Bearer " + signed(claims(now_s, aud="another")).decode(),
        "alg none": "Bearer " + forged({"alg": "none", "kid": "RS256"}, good).decode(),
    }


def test_only_the_holder_of_an_expired_token_is_told_so(
    guarded: Guarded, bad_credentials: dict[str, str]
) -> None:
    """Who does not know the secret learns nothing about a token."""
    expired = bad_credentials["expired"]
    wrong = expired[:-1] + ("A" if expired[-1] != "A" else "B")
    with guarded.process.new_client() as client:
        told = [
            client.get("/v1/topics", headers={"Authorization": given}).json()["message"]
            for given in (expired, wrong, bad_credentials["unknown"], bad_credentials["revoked"])
        ]
    assert told[0] == "this token has expired; ask for a new one"
    assert told[1] == told[2] == told[3]
    assert "revoked" in told[1]


@pytest.mark.parametrize(
    "kind",
    [
        "none", "unknown", "another scheme", "a wrong secret", "revoked", "rotated", "expired",
        "expired JWT", "wrong audience", "alg none",
    ],
)  # fmt: skip
def test_every_route_but_the_probes_is_401(
    guarded: Guarded, bad_credentials: dict[str, str], kind: str
) -> None:
    """From the table of routes, so that a new one cannot be forgotten."""
    given = bad_credentials[kind]
    headers = {"Authorization": given} if given else {}
    with guarded.process.new_client(headers=headers) as client:
        for method, path in ROUTES:
            if path not in OPEN_PATHS:
                reply = client.request(method, path)
                assert reply.status_code == 401, (method, path, reply.text)
                assert reply.json()["error"] == "UNAUTHENTICATED"
                assert given[7:] not in reply.text or not given
        for path in OPEN_PATHS:
            assert client.get(path).status_code == 200
    with WebSocket(guarded.process.port, headers=[f"Authorization: {given}"]) as refused:
        assert refused.status == 401


def test_two_authorization_headers_are_refused(guarded: Guarded) -> None:
    """A proxy in front might check the one, and the broker use the other."""
    headers = [("Authorization", f"Bearer {guarded.admin}"), ("Authorization", "Bearer x")]
    with guarded.process.new_client() as client:
        for order in (headers, headers[::-1]):
            assert client.get("/v1/topics", headers=order).status_code == 401


# -- the first token -------------------------------------------------------------------------------


def test_the_first_token_is_printed_once_and_in_no_log(start_broker: StartBroker) -> None:
    """With access control the broker may listen beyond loopback, too."""
    broker = start_broker("--access-control", host="0.0.0.0")
    first = Guarded(broker)
    first.client.close()
    assert "of an admin, shown only now" in broker.stdout()
    assert "PENSTOCK_TOKEN" in broker.stdout()
    assert TOKEN.search(broker.stderr()) is None
    broker.restart(kill=True)
    assert TOKEN.search(broker.stdout() + broker.stderr()) is None
    assert first.status(first.admin) == 200
    with broker.new_client(headers=bearer(first.admin)) as client:
        made = client.get("/v1/tokens").json()["tokens"]
    assert [(each["principal"], each["admin"]) for each in made] == [("admin", True)]


def test_what_a_start_creates_is_in_the_audit_log(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """The declared resources and the first admin token; a restart changes nothing."""
    file = tmp_path / "penstock.toml"
    file.write_text('[[tenants]]\ntenant_id = "acme"\n[[topics]]\nname = "tasks"\n')
    broker = start_broker("--access-control", "--config", str(file))
    first = Guarded(broker)
    expected = [
        ("tenant.create", "tenant:acme"),
        ("topic.create", "topic:tasks"),
        ("token.create", f"token:{first.admin[4:20]}"),
    ]
    for _ in range(2):
        with broker.new_client(headers=bearer(first.admin)) as client:
            text = client.get("/v1/topics/penstock.audit/partitions/0/records?format=ndjson").text
        rows = [json.loads(json.loads(line)["value"]) for line in text.splitlines()]
        of_broker = [row for row in rows if row["principal"] == "broker"]
        assert [(row["action"], row["resource"]) for row in of_broker] == expected
        assert {row["address"] for row in of_broker} == {""}
        broker.restart()
    first.client.close()


def test_the_static_token_is_an_admin_and_no_other_is_made(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker("--access-control", memory=True, env={"PENSTOCK_TOKEN": "the-static-one"})
    assert TOKEN.search(broker.stdout()) is None
    with broker.new_client(headers=bearer("the-static-one")) as client:
        made = client.post("/v1/tokens", json={"principal": "p"}).json()
    with broker.new_client(headers=bearer(made["token"])) as client:
        assert client.get("/v1/topics").status_code == 200
        assert_error(client.get("/v1/tokens"), 403, "PERMISSION_DENIED")


def test_a_new_static_token_closes_only_the_connections_of_the_old(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    broker = start_broker("--access-control", "--token-file", str(file), memory=True)
    with broker.new_client(headers=bearer("one")) as client:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        made = client.post("/v1/tokens", json={"principal": "p", "admin": True}).json()
    target = "/v1/consume?topic=t&group=g&owner=o&lease_ms=60000"
    old, other = (
        ConsumeStream(broker.port, target, headers=[("Authorization", f"Bearer {token}")])
        for token in ("one", made["token"])
    )
    file.write_text("two")
    assert broker.process is not None
    broker.process.send_signal(1)
    old.wait_for_end()
    old.close()
    with broker.new_client(headers=bearer("two")) as client:
        body = {"topic": "t", "value": "v"}
        assert client.post("/v1/produce", json=body).status_code == 200
    assert other.next().value == "v"
    other.close()


def test_without_access_control_there_are_no_tokens_to_manage(broker: BrokerProcess) -> None:
    """Otherwise whoever reaches an open broker could leave a token for later."""
    for method, path in ROUTES:
        if path.startswith("/v1/tokens"):
            reply = broker.client.request(method, path, json={"principal": "p", "admin": True})
            assert_error(reply, 409, "FAILED_PRECONDITION")
            assert "access_control is off" in reply.text


# -- life of a token -------------------------------------------------------------------------------


def test_a_token_is_created_listed_described_rotated_and_revoked(guarded: Guarded) -> None:
    made = guarded.create(principal="billing", roles=["b", "a", "b"], expires_in_ms=3_600_000)
    shown = {name: value for name, value in made.items() if name != "token"}
    assert (shown["principal"], shown["roles"], shown["admin"]) == ("billing", ["a", "b"], False)
    assert 3_500_000 < shown["expires_ms"] - shown["created_ms"] <= 3_600_000 + 60_000
    assert guarded.client.get(f"/v1/tokens/{made['id']}").json() == shown
    assert shown in guarded.client.get("/v1/tokens").json()["tokens"]
    assert guarded.status(made["token"]) == 200
    rotated = guarded.rotate(made)
    assert (guarded.status(made["token"]), guarded.status(rotated["token"])) == (401, 200)
    guarded.revoke(made)
    assert guarded.status(rotated["token"]) == 401
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/rotate")):
        reply = guarded.client.request(method, f"/v1/tokens/{made['id']}{path}")
        assert_error(reply, 404, "NOT_FOUND")


def test_the_old_secret_is_valid_for_its_grace(guarded: Guarded) -> None:
    made = guarded.create()
    stream = guarded.consume(guarded.topic(), made["token"])
    rotated = guarded.rotate(made, grace_ms=1500)
    assert rotated["old_until_ms"] > time.time() * 1000
    with guarded.process.new_client(headers=bearer(made["token"])) as client:
        assert client.get("/v1/topics").status_code == 200
        eventually(lambda: client.get("/v1/topics").status_code == 401)
    stream.wait_for_end()
    stream.close()
    assert time.time() * 1000 >= rotated["old_until_ms"]
    assert guarded.status(rotated["token"]) == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"principal": "  "}, 400),
        ({"principal": "p", "namespace": "default"}, 400),
        ({"principal": "p", "tenant_id": "nobody"}, 404),
        ({"principal": "p", "tenant_id": "default", "namespace": "nowhere"}, 404),
        ({"principal": "p", "roles": ["r"] * 65}, 400),
        ({"principal": "p", "roles": [""]}, 400),
        ({"principal": "p", "expires_in_ms": -1}, 400),
        ({"principal": "p", "secret": "mine"}, 400),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(
    guarded: Guarded, body: dict[str, Any], status: int
) -> None:
    assert guarded.client.post("/v1/tokens", json=body).status_code == status


def test_nobody_creates_or_sees_a_token_that_reaches_further_than_their_own(
    guarded: Guarded,
) -> None:
    for tenant in ("acme", "other"):
        assert guarded.client.post("/v1/tenants", json={"tenant_id": tenant}).status_code == 201
    path = "/v1/tenants/acme/namespaces"
    assert guarded.client.post(path, json={"namespace": "prod"}).status_code == 201
    of_tenant = guarded.create(tenant_id="acme", admin=True)
    of_namespace = guarded.create(tenant_id="acme", namespace="prod", admin=True)
    reaches: list[dict[str, Any]] = [
        {}, {"tenant_id": "other"}, {"tenant_id": "acme"},
        {"tenant_id": "acme", "namespace": "prod"},
    ]  # fmt: skip
    for manager, allowed in ((of_tenant, reaches[2:]), (of_namespace, reaches[3:])):
        with guarded.process.new_client(headers=bearer(manager["token"])) as client:
            for reach in reaches:
                reply = client.post("/v1/tokens", json={"principal": "p", "admin": True} | reach)
                assert reply.status_code == (201 if reach in allowed else 403), reach
            seen = client.get("/v1/tokens").json()["tokens"]
            assert {each["tenant_id"] for each in seen} == {"acme"}
            for hidden in guarded.client.get("/v1/tokens").json()["tokens"]:
                if hidden not in seen:
                    target = f"/v1/tokens/{hidden['id']}"
                    assert_error(client.get(target), 404, "NOT_FOUND")
                    assert_error(client.delete(target), 404, "NOT_FOUND")
                    assert_error(client.post(f"{target}/rotate"), 404, "NOT_FOUND")


def test_tokens_of_a_deleted_tenant_are_refused(guarded: Guarded) -> None:
    assert guarded.client.post("/v1/tenants", json={"tenant_id": "gone"}).status_code == 201
    made = guarded.create(tenant_id="gone")
    with guarded.process.new_client(headers=bearer(made["token"])) as client:
        assert client.get("/v1/topics").status_code == 200
        assert guarded.client.delete("/v1/tenants/gone").status_code == 204
        assert guarded.client.post("/v1/tenants", json={"tenant_id": "gone"}).status_code == 201
        assert guarded.status(made["token"]) == 401


# -- open streams end with their credential --------------------------------------------------------

End = Callable[[Guarded, dict[str, Any]], object]


def _expire(guarded: Guarded, made: dict[str, Any]) -> None:
    """Nothing to do: the token was made to end."""


ENDS: dict[str, tuple[End, dict[str, Any]]] = {
    "revoked": (lambda guarded, made: guarded.revoke(made), {}),
    "rotated": (lambda guarded, made: guarded.rotate(made), {}),
    "expired": (_expire, {"expires_in_ms": 1500}),
}


@pytest.fixture(params=ENDS)
def ending(request: pytest.FixtureRequest) -> tuple[End, dict[str, Any]]:
    return ENDS[request.param]


def test_a_consumer_ends_and_the_next_gets_what_it_did_not(
    guarded: Guarded, ending: tuple[End, dict[str, Any]]
) -> None:
    end, how = ending
    topic, made = guarded.topic(), guarded.create(**how)
    stream = guarded.consume(topic, made["token"])
    guarded.put(topic, "first")
    assert stream.next().value == "first"
    end(guarded, made)
    assert stream.wait_for_end() == []
    stream.close()
    guarded.put(topic, "second")
    with_admin = guarded.consume(topic, guarded.admin)
    item = with_admin.next()
    assert (item.value, item.attempts) == ("second", 1)
    with_admin.close()


def test_feeds_watches_and_sockets_end(
    guarded: Guarded, ending: tuple[End, dict[str, Any]]
) -> None:
    end, how = ending
    made = guarded.create(**how)
    base = "/v1/tenants/default/namespaces/default"
    feeds = [
        guarded.open_feed(target, made["token"], accept)
        for target in (f"{base}/streams/default/subscribe", f"{base}/caches/default/watch?prefix=")
        for accept in ("application/x-ndjson", "text/event-stream")
    ]
    port = guarded.process.port
    sockets = [
        WebSocket(port, headers=[f"Authorization: Bearer {made['token']}"]) for _ in range(2)
    ]
    names = {"tenant_id": "default", "namespace": "default", "stream": "default"}
    assert sockets[0].ask({"type": "subscribe", **names})["type"] == "subscribed"
    end(guarded, made)
    for feed in feeds:
        with feed:
            while feed.recv(4096):
                pass
    for each in sockets:
        with pytest.raises(Closed) as closed:
            each.receive()
        assert (closed.value.code, closed.value.reason) == (
            1001,
            "the credential is no longer valid",
        )
        each.socket.close()


@pytest.fixture(scope="module")
def events(guarded: Guarded) -> str:
    """The path of a durable stream with an event."""
    path = "/v1/tenants/default/namespaces/default/streams"
    settings = {"name": "events", "delivery": "at_least_once"}
    assert guarded.client.post(path, json=settings).status_code == 201
    assert guarded.client.post(f"{path}/events/publish", json={"payload": ""}).status_code == 200
    return f"{path}/events"


def test_feeds_and_channels_of_durable_streams_end(
    guarded: Guarded, ending: tuple[End, dict[str, Any]], events: str
) -> None:
    """felix-97: named subscriptions and replays, over HTTP, as server-sent events, and sockets."""
    end, how = ending
    made = guarded.create(**how)
    feeds = [
        guarded.open_feed(f"{events}/subscribe?{query}", made["token"], accept)
        for query in ("", "name=billing&owner=o", "start=earliest")
        for accept in ("application/x-ndjson", "text/event-stream")
    ]
    names = {"tenant_id": "default", "namespace": "default", "stream": "events"}
    sockets = []
    for start in ({"name": "billing"}, {"start": 1}):
        headers = [f"Authorization: Bearer {made['token']}"]
        sockets.append(WebSocket(guarded.process.port, headers=headers))
        assert sockets[-1].ask({"type": "subscribe", **start, **names})["type"] == "subscribed"
    end(guarded, made)
    for feed in feeds:
        with feed:
            while feed.recv(4096):
                pass
    for each in sockets:
        assert each.close_code() == 1001
        each.socket.close()
    assert guarded.status(made["token"], f"{events}/subscribe?start=earliest") == 401


def test_a_request_whose_credential_ends_before_its_body_has_come_is_not_handled(
    guarded: Guarded,
) -> None:
    topic, made = guarded.topic(), guarded.create()
    body = json.dumps({"topic": topic, "value": "late"}).encode()
    head = (
        f"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {made['token']}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", guarded.process.port), 10) as connection:
        connection.sendall(head + body[:5])
        eventually(lambda: guarded.status(made["token"]) == 200)
        guarded.revoke(made)
        assert connection.recv(1000) == b""
    described = guarded.client.get(f"/v1/topics/{topic}").json()
    assert "late" not in json.dumps(described)
    guarded.put(topic, "next")
    stream = guarded.consume(topic, guarded.admin)
    assert stream.next().value == "next"
    stream.close()


def test_what_waits_behind_a_stream_is_dropped_with_its_credential(guarded: Guarded) -> None:
    topic, made = guarded.topic(), guarded.create()
    produce = json.dumps({"topic": topic, "value": "behind"}).encode()
    consume = (
        f"GET /v1/consume?topic={topic}&group=g&owner=o&lease_ms=60000 HTTP/1.1\r\n"
        f"Host: localhost\r\nAuthorization: Bearer {guarded.admin}\r\n\r\n"
    ).encode()
    behind = (
        f"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(produce)}\r\n"
        f"Authorization: Bearer {made['token']}\r\n\r\n"
    ).encode() + produce
    with socket.create_connection(("127.0.0.1", guarded.process.port), 10) as connection:
        # The last request of the connection is the admin's, whose credential goes on.
        connection.sendall(consume + behind + consume)
        assert b"200 OK" in connection.recv(1000)
        guarded.revoke(made)
        while connection.recv(1000):
            pass
    guarded.put(topic, "next")
    stream = guarded.consume(topic, guarded.admin)
    assert stream.next().value == "next"
    stream.close()


def test_a_token_may_revoke_itself_and_gets_its_answer(guarded: Guarded) -> None:
    made = guarded.create(admin=True)
    with guarded.process.new_client(headers=bearer(made["token"])) as client:
        reply = client.delete(f"/v1/tokens/{made['id']}")
        assert (reply.status_code, reply.headers["connection"]) == (204, "close")
        assert client.get("/v1/topics").status_code == 401


# -- JWTs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(KEYS))
def test_a_jwt_of_the_issuer_is_a_credential(guarded: Guarded, algorithm: str) -> None:
    text = signed(claims(time.time()), algorithm).decode()
    assert guarded.status(text) == 200
    assert guarded.status(text, "/v1/tokens") == 403


def test_a_damaged_jwt_opens_nothing_over_the_wire(guarded: Guarded) -> None:
    """As an HTTP request and as the upgrade of a WebSocket: refused, and the broker serves on."""
    random, now_s = Random(7), time.time()
    good = [signed(claims(now_s, sub=f"s{n}"), algorithm) for n, algorithm in enumerate(KEYS)]
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: felix.v1\r\n"
    )
    requests = {"/v1/topics": (b"", 200), "/v1/felix/ws": (upgrade, 101)}
    for path, (headers, accepted) in requests.items():
        for text in good:
            assert first_status(guarded.process.port, path, headers, text) == accepted
        for _ in range(60):
            text = damaged(random, good, now_s)
            if text not in good:
                # 400: what it contains may not be in a header.
                assert first_status(guarded.process.port, path, headers, text) in (400, 401), text


def first_status(port: int, path: str, headers: bytes, token: bytes) -> int:
    """The status of the answer to a request whose token may be any bytes."""
    head = b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b"%b%bAuthorization: Bearer %b\r\n\r\n" % (head, headers, token))
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def test_a_stream_ends_when_its_jwt_expires(guarded: Guarded) -> None:
    now_s = int(time.time())
    text = signed(claims(now_s, exp=now_s + 2)).decode()
    stream = guarded.consume(guarded.topic(), text)
    stream.wait_for_end()
    stream.close()
    assert time.time() >= now_s + 2
    assert guarded.status(text) == 401


def test_a_key_that_the_issuer_withdraws_ends_its_tokens(
    guarded: Guarded, issuer: IssuerServer
) -> None:
    """The keys are fetched again and again; while that fails, the last good ones stay."""
    text = signed(claims(time.time())).decode()
    stream = guarded.consume(guarded.topic(), text)
    before = issuer.fetches
    issuer.status = 500
    eventually(lambda: issuer.fetches >= before + 2)
    assert guarded.status(text) == 200
    issuer.status, issuer.keys = 200, key_set(ES256=EC_KEY)
    try:
        stream.wait_for_end()
        stream.close()
        assert guarded.status(text) == 401
        assert guarded.status(signed(claims(time.time()), "ES256").decode()) == 200
    finally:
        issuer.keys = key_set(**KEYS)
        eventually(lambda: guarded.status(text) == 200)


def test_a_shared_key_signs_jwts_too(start_broker: StartBroker, tmp_path: Path) -> None:
    """As JSON the first token is on stdout only, too."""
    secret = b"k" * 40
    (tmp_path / "key").write_bytes(secret + b"\n")
    env = {
        "PENSTOCK_ACCESS_CONTROL": "yes", "PENSTOCK_JWT_KEYS": str(tmp_path / "key"),
        "PENSTOCK_JWT_ISSUER": ISSUER, "PENSTOCK_JWT_AUDIENCE": AUDIENCE,
        "PENSTOCK_JWT_ALGORITHMS": "hs256", "PENSTOCK_JWT_ADMIN_ROLE": "root",
    }  # fmt: skip
    broker = start_broker("--log-format", "json", memory=True, env=env)
    facts = json.loads(broker.stdout())
    assert TOKEN.fullmatch(facts["first_token"])
    assert "first_token" not in broker.stderr()
    assert facts["first_token"] not in broker.stderr()
    text = signed(claims(time.time(), roles=["root"]), "HS256", "", secret).decode()
    with broker.new_client(headers=bearer(text)) as client:
        assert client.get("/v1/tokens").status_code == 200


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_are_nowhere_but_in_the_answers_that_show_them(
    guarded: Guarded, bad_credentials: dict[str, str]
) -> None:
    """Logs at debug level, metrics, errors, the journal, lists, and every file on disk."""
    process = guarded.process
    made = guarded.create()
    rotated = guarded.rotate(made, grace_ms=60_000)
    jwt = signed(claims(time.time())).decode()
    topic = guarded.topic()
    with process.new_client() as client:
        for token in (made["token"], rotated["token"], jwt):
            assert client.get("/v1/topics", headers=bearer(token)).status_code == 200
            body = {"topic": topic, "value": "v"}
            client.post("/v1/produce", json=body, headers=bearer(token))
        damaged = jwt[:-4] + "AAAA"
        errors = client.get("/v1/topics", headers=bearer(damaged)).text
        errors += client.post("/v1/tokens", content=b"{", headers=bearer(made["token"])).text
        errors += client.get("/v1/nothing/" + made["id"], headers=bearer(made["token"])).text
    pages = ["/metrics", "/v1/tokens", f"/v1/tokens/{made['id']}", "/docs", "/v1/access/rules"]
    seen = errors + "".join(guarded.client.get(page).text for page in pages)
    seen += rows_of_everything(guarded, topic, made["id"])
    seen += process.stderr() + process.stdout().replace(guarded.admin, "", 1)
    texts = [guarded.admin, made["token"], rotated["token"], jwt, damaged]
    texts += [text[7:] for text in bad_credentials.values() if len(text) > 20]
    parts = {part for text in texts for part in (text, text[21:], text.split(".")[-1])}
    secrets = {part for part in parts if len(part) > 20}
    for secret in secrets:
        assert secret not in seen, secret
    assert process.data_dir is not None
    for file in process.data_dir.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for secret in secrets:
                assert secret.encode() not in data, (file, secret)


def rows_of_everything(guarded: Guarded, topic: str, token_id: str) -> str:
    """The journal, messages and the audit log as lines: on disk they are compressed."""
    client = guarded.client
    assert client.get("/v1/journal/offsets?fresh=true").status_code == 200
    records = "/v1/topics/{}/partitions/0/records?format=ndjson"
    targets = {
        "/v1/journal?format=ndjson": f'"{topic}"',
        records.format(topic): '"value":"v"',
        records.format("penstock.audit"): f"token:{token_id}",
    }
    found = ""
    for target, expected in targets.items():
        reply = client.get(target)
        assert reply.status_code == 200, reply.text
        assert expected in reply.text, target
        found += reply.text
    return found


def test_the_client_reads_a_rotated_token_again(guarded: Guarded, tmp_path: Path) -> None:
    from penstock.client import Client

    made = guarded.create()
    held = [made["token"]]
    with Client(guarded.process.url, token=lambda: held[0]) as client:
        client.list_topics()
        held[0] = guarded.rotate(made)["token"]
        client.list_topics()


def test_a_browser_is_asked_for_a_token_at_the_docs(guarded: Guarded) -> None:
    with guarded.process.new_client() as client:
        page = client.get("/docs", headers={"Accept": "text/html"})
        assert (page.status_code, "needs a token" in page.text) == (200, True)
        assert client.get("/docs").status_code == 401
    assert isinstance(guarded.client, httpx.Client)
