"""The connection to NATS: addresses, TLS, servers that misbehave, vanish or come late."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.jetstream.addresses import read_addresses
from penstock.cluster.jetstream.connection import NatsConnection
from penstock.cluster.jetstream.errors import ClusterRefused, NatsAddressInvalid
from penstock.cluster.jetstream.services import JetStreamServices, NatsSettings
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Unanswered
from tests.cluster.nats_servers import NatsServers, free_ports, nats_servers
from tests.tls_proxy import make_certificate

INFO = b'INFO {"server_name":"fake","version":"2.15.0","headers":true,"max_payload":1048576}\r\n'
WAIT_S = 60.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def fake_server(serve: Serve) -> AsyncIterator[str]:
    """A server that does what `serve` does with each connection, then hangs up."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def connection_to(url: str, **settings: Any) -> AsyncIterator[NatsConnection]:
    connection = NatsConnection(read_addresses(url), **settings)
    connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The handshake of a server."""
    writer.write(INFO)
    await reader.readuntil(b"PING\r\n")
    writer.write(b"PONG\r\n")


async def connected(connection: NatsConnection) -> None:
    await asyncio.wait_for(connection.connected(), WAIT_S)


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - whatever makes it true does not know of the test
        await asyncio.sleep(0.005)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "penstock.cluster"]


# -- addresses -------------------------------------------------------------------------------------


def test_addresses_share_scheme_and_credentials() -> None:
    found = read_addresses("nats://u:p%40ss@a, b:4223 ,[::1]:7")
    assert [str(each) for each in found] == ["a:4222", "b:4223", "[::1]:7"]
    assert [each.credentials.options() for each in found] == 3 * [{"user": "u", "pass": "p@ss"}]
    secured = read_addresses("tls://t%2Fk@a,nats://b")
    assert [each.needs_tls for each in secured] == [True, False]
    assert [each.credentials.options() for each in secured] == 2 * [{"auth_token": "t/k"}]


@pytest.mark.parametrize(
    "text",
    ["", "a", "http://a", "nats://", "nats://a,", "nats://a:0", "nats://a:x", "nats://a:70000",
     "nats://u:sesame@", "nats://u:sesame@a/b", "nats://u:sesame@a b", "nats://u:sesame@[::1"],
)  # fmt: skip
def test_an_address_that_cannot_be_read_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(NatsAddressInvalid) as refused:
        read_addresses(text)
    assert "nats://HOST[:PORT]" in str(refused.value)
    assert "sesame" not in str(refused.value)


def test_credentials_never_show_themselves() -> None:
    found = read_addresses("nats://u:sesame@a")
    assert "sesame" not in f"{found} {found[0]} {found[0]!r} {found[0].credentials}"


# -- servers that come late, vanish, or are none ---------------------------------------------------


def test_it_waits_for_servers_that_come_late_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait() -> None:
        servers = NatsServers(tmp_path, 1)
        servers._make(tmp_path / "late")
        url = servers.url.replace("nats://", "nats://u:sesame@a..b,nats://")
        async with connection_to(url) as connection:
            await asyncio.sleep(1.5)
            assert not connection.is_connected
            answer = await connection.ask(b"x", b"")
            assert isinstance(answer, Unanswered)
            servers.nodes[0].start()
            try:
                await connected(connection)
            finally:
                servers.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(wait())
    told = warnings_in(caplog)
    assert len(told) >= 2
    assert told[0].startswith("cannot connect to NATS (")
    assert "trying until it works" in told[0]
    assert told[1].startswith("connected to NATS again, at n0")
    assert "sesame" not in caplog.text


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts, and closes at once."""


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read()


async def be_old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(INFO.replace(b'"headers":true', b'"headers":false'))
    await reader.readuntil(b"PING\r\n")
    writer.write(b"PONG\r\n")
    await reader.read()


async def never_end_a_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"INFO " + b"x" * 65536)
        await writer.drain()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (hang_up, "the server closed the connection"),
        (say_nothing, "it does not answer"),
        (speak_http, "the server sent something unknown"),
        (be_old, "is too old: it has no headers"),
        (never_end_a_line, "a line without an end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_is_none_is_left_for_the_next_and_named(
    serve: Serve, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.jetstream.session.CONNECT_TIMEOUT_S", 0.5)

    async def good(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.read()

    async def wait() -> None:
        async with fake_server(serve) as bad, fake_server(good) as other:
            async with connection_to(f"nats://{bad}") as connection:
                await until(lambda: bool(caplog.records))
                assert not connection.is_connected
            async with connection_to(f"nats://{bad},{other}") as connection:
                await connected(connection)
                assert other in connection.server

    asyncio.run(asyncio.wait_for(wait(), WAIT_S))
    assert reason in warnings_in(caplog)[0]


@pytest.mark.parametrize("seed", range(20))
def test_garbage_from_a_server_ends_the_connection_and_nothing_else(seed: int) -> None:
    """Every request is answered once, the loop has no error, and the next connection works."""
    draw = random.Random(seed)
    greetings = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greetings
        greetings += 1
        await greet(reader, writer)
        if greetings > 3:
            await reader.read()
        line = (await reader.readuntil(b"\r\n")).split()
        inbox = line[1][:-1]
        kinds = [
            draw.randbytes(draw.randint(1, 2000)) + b"\r\n",
            b"MSG %b1 1 5\r\n{\xff\xfe}\r\r\n" % inbox,
            b"HMSG %b1 1 12 12\r\nNATS/1.0 100\r\n" % inbox,
            b"MSG %b1 1 999999999999\r\n" % inbox,
            b"MSG \xff\xff 2 2\r\nhi\r\n",
            b"INFO {}\r\nINFO nonsense\r\n",
            b"-ERR 'Permissions Violation for Publish to \"\xff\"'\r\n",
        ]
        writer.write(b"".join(draw.choices(kinds, k=3)))
        await writer.drain()
        await reader.read(100)

    async def run() -> list[Any]:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        answers: list[Any] = []
        async with fake_server(serve) as place, connection_to(f"nats://{place}") as connection:
            asked = 0
            while greetings < 4:
                await connected(connection)
                connection.subscribe(b"news", lambda message: None)
                connection.request(b"x", b"", answers.append, timeout_s=0.2)
                asked += 1
                await asyncio.sleep(0.02)
            await until(lambda: len(answers) == asked)
            await connected(connection)
        assert len(answers) == asked
        return errors

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == []


def test_a_server_that_falls_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.jetstream.session.PING_INTERVAL_S", 0.1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.read()

    async def run() -> None:
        states: list[bool] = []
        async with fake_server(serve) as place, connection_to(f"nats://{place}") as connection:
            connection.listen(states.append)
            await until(lambda: states[:3] == [True, False, True])

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_requests_under_way_are_unanswered_when_the_connection_breaks() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.readuntil(b"PUB ")

    async def run() -> Any:
        async with fake_server(serve) as place, connection_to(f"nats://{place}") as connection:
            await connected(connection)
            return await connection.ask(b"x", b"", WAIT_S)

    answer = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert isinstance(answer, Unanswered)
    assert "the connection to NATS was lost" in answer.reason


def test_a_late_answer_is_nobodys() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        for wait_s in (0.3, 0.0):
            await reader.readuntil(b"PUB ")
            reply = (await reader.readuntil(b"\r\n")).split()[1]
            await asyncio.sleep(wait_s)
            writer.write(b"MSG %b 1 2\r\nhi\r\n" % reply)
        await reader.read()

    async def run() -> list[Any]:
        async with fake_server(serve) as place, connection_to(f"nats://{place}") as connection:
            await connected(connection)
            return [
                await connection.ask(b"x", b"", 0.1),
                await connection.ask(b"x", b"", WAIT_S),
            ]

    first, second = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert isinstance(first, Unanswered)
    assert isinstance(second, NatsMessage)
    assert second.data == b"hi"


def test_lame_duck_mode_makes_it_leave_for_another_server() -> None:
    is_ending = asyncio.Event()

    async def lame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_ending.is_set():
            return
        await greet(reader, writer)
        await is_ending.wait()
        writer.write(INFO.replace(b"{", b'{"ldm":true,'))
        while await reader.readline():
            writer.write(b"PONG\r\n")

    async def well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_ending.is_set():
            await greet(reader, writer)
            await reader.read()

    async def run() -> None:
        async with (
            fake_server(lame) as one,
            fake_server(well) as other,
            connection_to(f"nats://{one},{other}") as connection,
        ):
            await connected(connection)
            assert one in connection.server
            is_ending.set()
            await until(lambda: other in connection.server)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


# -- TLS ------------------------------------------------------------------------------------------


def tls_server(folder: Path, **extra: Any) -> Any:
    made = make_certificate(folder)
    section = f'tls {{ cert_file: "{made.file}", key_file: "{made.key}" }}'
    return made, nats_servers(folder / "nats", 1, extra=section)


async def first_word(url: str, ca: str, caplog: pytest.LogCaptureFixture) -> str:
    """The server's name once it is connected, or what the log says first."""
    settings = NatsSettings(read_addresses(url), "c", 1024, ca=ca)
    services = JetStreamServices(settings, "b1")
    services.connection.open()
    try:
        while not services.connection.is_connected:
            if told := warnings_in(caplog):
                return told[0]
            await asyncio.sleep(0.01)
        return services.connection.server_name
    finally:
        await services.close()


def test_tls_works_with_the_servers_ca_and_with_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, server = tls_server(tmp_path)
    with server as running:
        tls = running.url.replace("nats://", "tls://u:sesame@")
        trusted, other_name = str(made.file), tls.replace("127.0.0.1", "localhost")
        for url, ca, expected in [
            (tls, trusted, "n0"),
            (running.url, trusted, "n0"),  # The server requires TLS.
            (tls, "", "CERTIFICATE_VERIFY_FAILED"),
            (running.url, "", "CERTIFICATE_VERIFY_FAILED"),
            (other_name, trusted, "CERTIFICATE_VERIFY_FAILED"),
        ]:
            caplog.clear()
            found = asyncio.run(asyncio.wait_for(first_word(url, ca, caplog), WAIT_S))
            assert expected in found
    assert "sesame" not in caplog.text


def test_tls_is_never_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody between the broker and the server gets the password by saying that there is no TLS."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        seen.append(await reader.read(100))

    async def run() -> str:
        async with fake_server(serve) as place:
            return await first_word(f"tls://u:sesame@{place}", "", caplog)

    told = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert "it has no TLS, but its address says tls://" in told
    assert seen in ([], [b""])


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_a_ca_file_without_certificates_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)

    async def make() -> None:
        JetStreamServices(NatsSettings(read_addresses("tls://a"), "c", 1, ca=str(file)), "b1")

    with pytest.raises(ClusterRefused, match=r"the file .*ca\.pem with the NATS servers' CA"):
        asyncio.run(make())


def test_ports_that_nobody_listens_on_are_all_named(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        one, other = free_ports(2)
        async with connection_to(f"nats://127.0.0.1:{one},127.0.0.1:{other}"):
            await until(lambda: bool(caplog.records))
        assert all(str(port) in caplog.text for port in (one, other))

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
