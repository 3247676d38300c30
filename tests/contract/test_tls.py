"""TLS of the broker itself: HTTP, streams, WebSockets, the SDK and the command line over it, client
certificates, files that change, and clients that are slow or hostile."""

from __future__ import annotations

import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import httpx
import pytest

from penstock.client import Client
from penstock.model.errors import InvalidArgument
from penstock.server.tls import HANDSHAKE_TIMEOUT_S
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.contract.conftest import SMALL_SEGMENTS
from tests.contract.test_identity import TOKEN, bearer
from tests.tls_proxy import Certificate, make_certificate
from tests.websocket import WebSocket


class TlsBroker(BrokerProcess):
    """A broker with TLS, optional client certificates and access control."""

    certificate: Certificate
    admin = ""

    def new_client(self, **options: Any) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.certificate.file))
        if options.pop("anonymous", True):
            return super().new_client(verify=context, **options)
        shown: Certificate = options.pop("shown")
        context.load_cert_chain(shown.file, shown.key)
        return super().new_client(verify=context, **options)

    def connect(self) -> ssl.SSLSocket:
        return self.wrapped(socket.create_connection(("127.0.0.1", self.port), 20))

    def wrapped(self, plain: socket.socket) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificate.file))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def env_of_client(self) -> dict[str, str]:
        return {"SSL_CERT_FILE": str(self.certificate.file), "PENSTOCK_TOKEN": self.admin}


class Files(NamedTuple):
    """Own files of one broker, replaced by tests."""

    folder: Path
    certificate: Certificate


def signed_by(authority: Certificate, folder: Path, subject: str) -> Certificate:
    """A client's certificate."""
    folder.mkdir(exist_ok=True)
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    request, extensions = folder / "request.pem", folder / "extensions.cnf"
    name, dns = subject.split("+") if "+" in subject else (subject, "")
    extensions.write_text(
        "basicConstraints = CA:FALSE\nsubjectKeyIdentifier = hash\n"
        "authorityKeyIdentifier = keyid:always\n" + (f"subjectAltName = {dns}\n" if dns else "")
    )
    _openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", name, "-keyout",
             str(made.key), "-out", str(request))  # fmt: skip
    _openssl("x509", "-req", "-in", str(request), "-days", "2", "-CA", str(authority.file),
             "-CAkey", str(authority.key), "-CAcreateserial", "-extfile", str(extensions), "-out",
             str(made.file))  # fmt: skip
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    return Files(folder, make_certificate(folder))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("authority"), "DNS:authority.example")


@pytest.fixture(scope="module")
def broker(files: Files, authority: Certificate) -> Iterator[TlsBroker]:
    cert, key = files.certificate
    process = TlsBroker(
        None, "--access-control", "--tls-cert", str(cert), "--tls-key", str(key),
        "--tls-client-ca", str(authority.file), "--tls-client-auth", "optional",
        env=SMALL_SEGMENTS,
    )  # fmt: skip
    process.certificate = files.certificate
    try:
        process.start()
        process.admin = TOKEN.findall(process.stdout())[0]
        yield process
        assert "Traceback" not in process.stderr(), process.stderr()
        assert "has no effect" not in process.stderr(), process.stderr()
        began = time.monotonic()
        with process.connect() as idle:
            assert process.terminate() == 0
            assert time.monotonic() - began < 8
            assert "did not close" not in process.stderr()
            assert idle.recv(100) == b""
    finally:
        process.close()


@pytest.fixture
def admin(broker: TlsBroker) -> Iterator[httpx.Client]:
    with broker.new_client(headers=bearer(broker.admin)) as client:
        yield client


@pytest.fixture(scope="module")
def silent(broker: TlsBroker) -> Iterator[list[socket.socket]]:
    """Clients that begin a handshake, or not even that, and say nothing more."""
    found = [socket.create_connection(("127.0.0.1", broker.port), 30) for _ in range(20)]
    for number, each in enumerate(found):
        each.sendall(b"\x16\x03\x01\x02\x00"[: number % 6])
    yield found
    for each in found:
        each.close()


def test_slow_and_failed_handshakes_delay_nobody(
    broker: TlsBroker, silent: list[socket.socket]
) -> None:
    began = time.monotonic()
    with broker.new_client(headers=bearer(broker.admin)) as client:
        assert client.get("/v1/topics").status_code == 200
        # Long before the handshakes of the silent ones are given up.
        assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S - 1
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\xff\xff"):
            with socket.create_connection(("127.0.0.1", broker.port), 20) as hostile:
                hostile.sendall(nonsense)
        assert client.get("/v1/topics").status_code == 200


def test_the_broker_says_https_and_answers_there(broker: TlsBroker, admin: httpx.Client) -> None:
    assert f"listens on https://127.0.0.1:{broker.port}" in broker.stdout()
    assert admin.get("/v1/topics").status_code == 200
    page = admin.get("/docs").text
    assert f"https://127.0.0.1:{broker.port}" in page
    assert f"http://127.0.0.1:{broker.port}" not in page


def test_the_sdk_and_the_command_line_work(
    broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broker.env_of_client().items():
        monkeypatch.setenv(name, value)
    with Client(broker.url) as client:
        client.create_topic("sdk")
        client.produce("sdk", "x" * 300_000)
        found = [each.value for each in client.consume("sdk", "g", wait_s=0.5)]
        assert found == ["x" * 300_000]
        made = client.create_token("robot", roles=["r"], expires_in_ms=60_000)
        assert client.describe_token(made.id).principal == "robot"
        rotated = client.rotate_token(made.id, grace_ms=10)
        assert [each.id for each in client.list_tokens()][-1] == made.id
        with Client(broker.url, token=rotated.token) as other:
            # Nothing was granted to the principal, so it sees nothing.
            assert other.list_topics() == []
        client.revoke_token(made.id)
    created = penstock(broker, "token", "create", "ops", "--admin", "--expires-in", "1d")
    text = created.stdout.strip()
    assert TOKEN.fullmatch(text), created
    assert text not in created.stderr
    listed = penstock(broker, "token", "list", "--token", text)
    token_id = text.split("_")[1]
    assert (token_id in listed.stdout, "admin" in listed.stdout) == (True, True)
    again = penstock(broker, "token", "rotate", token_id).stdout.strip()
    assert TOKEN.fullmatch(again)
    assert penstock(broker, "token", "revoke", "--yes", token_id).returncode == 0
    assert penstock(broker, "topic", "list", "--token", again).returncode == 1


def penstock(broker: TlsBroker, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | broker.env_of_client() | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "penstock", *arguments, "--url", broker.url]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_websocket_works_and_ends_quietly(broker: TlsBroker) -> None:
    headers = [f"Authorization: Bearer {broker.admin}"]
    with WebSocket(broker.port, headers=headers, wrap=broker.wrapped) as session:
        names = {"tenant_id": "default", "namespace": "default", "stream": "default"}
        assert session.ask({"type": "subscribe", **names})["type"] == "subscribed"
        publish = {"type": "publish", **names, "payload": "aGVsbG8="}
        session.send(publish)
        kinds = {session.receive()["type"] for _ in range(2)}
        assert kinds == {"publish_ok", "event"}


def test_a_refused_request_gets_its_answer_before_the_end(broker: TlsBroker) -> None:
    """Closing on unread bytes would reset the connection, and the answer with it."""
    with broker.new_client() as client:
        for _ in range(3):
            assert client.post("/v1/produce", content=b"x" * 900_000).status_code == 401
    head = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
    with broker.connect() as connection:
        connection.sendall(head)
        # The answer is there, and the client still sends.
        select.select([connection], [], [], 10)
        for _ in range(20):
            connection.sendall(b"x" * 10_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


def test_a_slow_reader_of_the_last_answer_gets_all_of_it(
    broker: TlsBroker, admin: httpx.Client
) -> None:
    admin.post("/v1/topics", json={"name": "large"})
    values = [{"topic": "large", "value": "v" * 100_000} for _ in range(60)]
    assert admin.post("/v1/produce/batch", json=values).status_code == 200
    with broker.connect() as connection:
        head = (
            f"Host: localhost\r\nAuthorization: Bearer {broker.admin}\r\nConnection: close\r\n\r\n"
        )
        target = "/v1/topics/large/partitions/0/records"
        connection.sendall(f"GET {target} HTTP/1.1\r\n{head}".encode())
        size = 0
        while data := connection.recv(65_536):
            size += len(data)
            if size < 2_000_000:
                time.sleep(0.02)
    assert size > 6_000_000


def test_a_certificate_names_the_sender_if_no_token_does(
    broker: TlsBroker, authority: Certificate, tmp_path: Path
) -> None:
    named = signed_by(authority, tmp_path / "named", "/CN=robot")
    other = signed_by(authority, tmp_path / "other", "/O=acme+DNS:robot.example")
    nameless = signed_by(authority, tmp_path / "nameless", "/O=acme")
    for shown, status in ((named, 200), (other, 200), (nameless, 401)):
        with broker.new_client(anonymous=False, shown=shown) as client:
            for _ in range(3):
                assert client.get("/v1/topics").status_code == status
            assert client.get("/v1/topics", headers=bearer("wrong")).status_code == 401
            admin = bearer(broker.admin)
            assert client.get("/v1/tokens", headers=admin).status_code == 200
    # The same bytes without a certificate: no cached head may let them in.
    with broker.new_client() as client:
        assert client.get("/v1/topics").status_code == 401


def test_the_sdk_and_the_command_line_show_a_certificate(
    broker: TlsBroker, authority: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = signed_by(authority, tmp_path / "client", "/CN=robot")
    monkeypatch.setenv("SSL_CERT_FILE", str(broker.certificate.file))
    cert, key = str(shown.file), str(shown.key)
    with Client(broker.url, client_cert=cert, client_key=key) as client:
        client.list_topics()
    options = ("--token", "", "--client-cert", cert, "--client-key", key)
    assert penstock(broker, "topic", "list", *options).returncode == 0
    monkeypatch.setenv("PENSTOCK_CLIENT_CERT", cert)
    monkeypatch.setenv("PENSTOCK_CLIENT_KEY", key)
    with Client(broker.url) as client:
        client.list_topics()
    with pytest.raises(InvalidArgument, match="client certificate"):
        Client(broker.url, client_cert="/no/file")


def test_a_certificate_of_another_authority_is_refused(broker: TlsBroker, tmp_path: Path) -> None:
    stranger = make_certificate(tmp_path, "DNS:stranger.example")
    shown = signed_by(stranger, tmp_path / "client", "/CN=robot")
    with (
        broker.new_client(anonymous=False, shown=shown) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get("/v1/topics")


def test_old_versions_of_tls_are_refused(broker: TlsBroker) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", broker.port), 20) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain)


def test_a_handshake_that_does_not_go_on_is_given_up(silent: list[socket.socket]) -> None:
    """Their time has mostly passed during the tests before."""
    for each in silent:
        each.settimeout(30)
        try:
            assert each.recv(100) == b""
        except ConnectionResetError:
            continue


def test_new_files_are_used_without_a_dropped_connection_and_bad_ones_are_not(
    broker: TlsBroker, files: Files, admin: httpx.Client, tmp_path: Path
) -> None:
    """The last test with this broker: it changes its certificate."""
    assert admin.post("/v1/topics", json={"name": "reload"}).status_code == 201
    before = seen_certificate(broker)
    consumer, session = open_consumer(broker, "reload"), open_subscription(broker)
    good_key = files.certificate.key.read_text()
    files.certificate.key.write_text("nonsense")
    eventually(lambda: "TLS stays as it was" in broker.stderr())
    assert seen_certificate(broker) == before
    assert broker.process is not None
    broker.process.send_signal(1)
    eventually(lambda: broker.stderr().count("TLS stays as it was") >= 2)
    assert seen_certificate(broker) == before
    files.certificate.key.write_text(good_key)
    new = make_certificate(tmp_path)
    for source, target in zip(new, files.certificate, strict=True):
        os.replace(source, target)
    eventually(lambda: seen_certificate(broker) != before)
    # The connections from before are still open: one answers, the others go on.
    body = {"topic": "reload", "value": "after the reload"}
    assert admin.post("/v1/produce", json=body).status_code == 200
    assert '"after the reload"' in next(line for line in consumer if line.startswith("{"))
    assert session.ask({"type": "publish", **STREAM, "payload": "aGk=", "ack": "none"})["payload"]
    consumer.close()
    session.socket.close()
    with broker.new_client(headers=bearer(broker.admin)) as client:
        assert client.get("/v1/topics").status_code == 200


STREAM = {"tenant_id": "default", "namespace": "default", "stream": "default"}


def open_consumer(broker: TlsBroker, topic: str) -> TextIO:
    """The lines of a consumer over TLS, whose head has come."""
    connection = broker.connect()
    head = f"Host: localhost\r\nAuthorization: Bearer {broker.admin}\r\n\r\n"
    target = f"/v1/consume?topic={topic}&group=g&owner=o&lease_ms=60000"
    connection.sendall(f"GET {target} HTTP/1.1\r\n{head}".encode())
    lines = connection.makefile("r")
    connection.close()  # when the file is closed
    assert " 200 " in lines.readline()
    return lines


def open_subscription(broker: TlsBroker) -> WebSocket:
    headers = [f"Authorization: Bearer {broker.admin}"]
    session = WebSocket(broker.port, headers=headers, wrap=broker.wrapped)
    assert session.ask({"type": "subscribe", **STREAM})["type"] == "subscribed"
    return session


def test_every_client_needs_a_certificate_of_the_authorities_that_are_in_force(
    authority: Certificate, tmp_path: Path
) -> None:
    """`required` is the default, and the file of the authorities is read again, too."""
    trusted = tmp_path / "authorities.pem"
    shutil.copy(authority.file, trusted)
    own = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other", "DNS:other.example")
    first, second = (
        signed_by(each, tmp_path / name, "/CN=robot")
        for each, name in ((authority, "first"), (other, "second"))
    )
    process = TlsBroker(
        None, "--access-control", "--tls-cert", str(own.file), "--tls-key", str(own.key),
        "--tls-client-ca", str(trusted), env=SMALL_SEGMENTS,
    )  # fmt: skip
    process.certificate = own

    def is_let_in(shown: Certificate | None) -> bool:
        options: dict[str, Any] = {} if shown is None else {"anonymous": False, "shown": shown}
        try:
            with process.new_client(**options) as client:
                return client.get("/v1/topics").status_code == 200
        except httpx.TransportError:
            return False

    try:
        process.start()
        assert (is_let_in(None), is_let_in(first), is_let_in(second)) == (False, True, False)
        with process.new_client(anonymous=False, shown=first) as kept:
            assert kept.get("/v1/topics").status_code == 200
            shutil.copy(other.file, tmp_path / "new.pem")
            os.replace(tmp_path / "new.pem", trusted)
            eventually(lambda: is_let_in(second))
            assert (is_let_in(None), is_let_in(first)) == (False, False)
            assert kept.get("/v1/topics").status_code == 200
            trusted.write_text("nonsense")
            eventually(lambda: "TLS stays as it was" in process.stderr())
            assert (is_let_in(None), is_let_in(first), is_let_in(second)) == (False, False, True)
    finally:
        process.close()


def seen_certificate(broker: TlsBroker) -> str:
    return ssl.get_server_certificate(("127.0.0.1", broker.port), timeout=20)


def first_bytes(broker: TlsBroker) -> bytes:
    """The beginning of the answer to a client without a certificate, or nothing."""
    try:
        with broker.connect() as client:
            client.sendall(b"GET /v1/livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(100)
    except OSError:
        return b""


def test_the_log_says_that_a_client_showed_no_certificate(
    files: Files, authority: Certificate
) -> None:
    """The client sees only a closed connection. Repeats do not fill the log."""
    cert, key = files.certificate
    process = TlsBroker(
        None, "--access-control", "--tls-cert", str(cert), "--tls-key", str(key),
        "--tls-client-ca", str(authority.file), "--tls-client-auth", "required",
    )  # fmt: skip
    process.certificate = files.certificate
    told = "tls_client_ca asks for a certificate, and it showed none"
    try:
        process.start()
        for _ in range(5):
            assert first_bytes(process) == b""
        eventually(lambda: told in process.stderr())
        assert process.stderr().count(told) == 1
    finally:
        process.close()
