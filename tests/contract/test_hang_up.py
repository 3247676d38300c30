"""SIGHUP: the broker goes on, and reads its token files again."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.wire import Wire
from tests.websocket import WebSocket

OLD, NEW = "old-Token_1", "new-Token_2"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def hang_up(broker: BrokerProcess, answer: str) -> None:
    """Sends SIGHUP, and returns when the broker has logged it with these words."""
    assert broker.process is not None
    before = len(hang_ups(broker))
    broker.process.send_signal(signal.SIGHUP)
    eventually(lambda: hang_ups(broker), lambda lines: len(lines) > before)
    assert answer in hang_ups(broker)[-1]


def read_for(stream: httpx.Response, seconds: float) -> None:
    """Reads to the end, which must come within this time."""
    deadline = time.monotonic() + seconds
    for _ in stream.iter_raw():
        assert time.monotonic() < deadline, "the stream goes on"


def hang_ups(broker: BrokerProcess) -> list[str]:
    return [line for line in broker.stderr().splitlines() if "SIGHUP" in line]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose token is in the file `token` of the test's folder."""
    (tmp_path / "token").write_text(OLD)
    with BrokerProcess(None, "--token-file", str(tmp_path / "token")) as process:
        yield process


def test_sighup_does_not_end_the_broker() -> None:
    broker = BrokerProcess(None)
    try:
        broker.start().create_topic("t")
        hang_up(broker, "no token file")
        broker.put("t", "v")
        assert broker.terminate() == 0
    finally:
        broker.close()


def test_the_old_token_is_refused_after_sighup_and_the_new_one_works(
    guarded: BrokerProcess, tmp_path: Path
) -> None:
    for _ in range(3):  # so that the head of this request is known
        assert guarded.client.get("/v1/topics", headers=bearer(OLD)).status_code == 200
    (tmp_path / "token").write_text(NEW + "\n")
    assert guarded.client.get("/v1/topics", headers=bearer(NEW)).status_code == 401
    hang_up(guarded, "the token has changed")
    for _ in range(3):  # on new connections, since the broker is closing the client's own
        topics = f"{guarded.url}/v1/topics"
        assert httpx.get(topics, headers=bearer(OLD)).status_code == 401
        assert httpx.get(topics, headers=bearer(NEW)).status_code == 200
    assert OLD not in guarded.stdout() + guarded.stderr()
    assert NEW not in guarded.stdout() + guarded.stderr()


def test_connections_of_the_old_token_are_closed(guarded: BrokerProcess, tmp_path: Path) -> None:
    """A stream and a WebSocket would else be served for as long as they are kept open."""
    old = bearer(OLD)
    guarded.client.post("/v1/topics", json={"name": "t"}, headers=old)
    query = {"topic": "t", "group": "g", "owner": "o", "heartbeat_ms": "200"}
    with (
        guarded.client.stream("GET", "/v1/consume", params=query, headers=old) as stream,
        WebSocket(guarded.port, headers=[f"Authorization: Bearer {OLD}"]) as ws,
    ):
        assert (stream.status_code, ws.status) == (200, 101)
        (tmp_path / "token").write_text(NEW)
        hang_up(guarded, "the token has changed")
        with pytest.raises(httpx.RemoteProtocolError):
            read_for(stream, 10)
        assert ws.close_code() == 1001
    new = bearer(NEW)
    produced = guarded.client.post("/v1/produce", json={"topic": "t", "value": "v"}, headers=new)
    assert produced.status_code == 200
    with guarded.client.stream("GET", "/v1/consume", params=query, headers=new) as stream:
        assert any(b'"value":"v"' in chunk for chunk in stream.iter_raw())


def test_a_stream_that_waits_for_its_turn_does_not_begin_with_the_old_token(
    guarded: BrokerProcess, tmp_path: Path
) -> None:
    """Large answers that are not read hold it up; they come, and then the connection ends."""
    old, path = bearer(OLD), "/v1/tenants/default/namespaces/default/caches/default/entries/k"
    value = bytes(6 * 2**20)
    assert guarded.client.put(f"{path}?raw=true", content=value, headers=old).status_code == 200
    guarded.client.post("/v1/topics", json={"name": "t"}, headers=old)
    targets = [f"{path}?raw=true"] * 2 + ["/v1/consume?topic=t&group=g&owner=o"]
    head = f"host: 127.0.0.1\r\nAuthorization: Bearer {OLD}\r\n\r\n"
    with Wire(guarded.port, receive_buffer=4096) as wire:
        wire.send("".join(f"GET {target} HTTP/1.1\r\n{head}" for target in targets).encode())
        assert wire.socket.recv(1, socket.MSG_PEEK)
        (tmp_path / "token").write_text(NEW)
        hang_up(guarded, "the token has changed")
        received = b""
        while data := wire.socket.recv(2**20):
            received += data
            assert b"x-ndjson" not in received[-2000:]


def test_no_stream_that_was_being_opened_survives_a_change_of_the_token(tmp_path: Path) -> None:
    """On disk a new group waits to be stored before its stream begins."""
    (tmp_path / "token").write_text(OLD)
    broker = BrokerProcess(tmp_path / "data", "--token-file", str(tmp_path / "token"))
    try:
        broker.start().client.post("/v1/topics", json={"name": "t"}, headers=bearer(OLD))
        wires = [Wire(broker.port) for _ in range(60)]
        for number, wire in enumerate(wires):
            wire.send(
                f"GET /v1/consume?topic=t&group=g{number}&owner=o HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                f"Authorization: Bearer {OLD}\r\n\r\n".encode()
            )
            if number == 30:
                (tmp_path / "token").write_text(NEW)
                assert broker.process is not None
                broker.process.send_signal(signal.SIGHUP)
        eventually(lambda: hang_ups(broker))
        for wire in wires:
            assert_ends(wire)
    finally:
        broker.close()


def assert_ends(wire: Wire) -> None:
    """It is refused, or was let in before the change and is closed."""
    with wire, suppress(ConnectionResetError):
        received = b""
        while b"HTTP/1.1 401" not in received and (data := wire.socket.recv(2**16)):
            received += data


@pytest.mark.parametrize("damage", ["missing", "empty", "unsendable"])
def test_a_token_file_that_cannot_be_read_changes_nothing(
    guarded: BrokerProcess, tmp_path: Path, damage: str
) -> None:
    if damage == "missing":
        (tmp_path / "token").unlink()
    else:
        (tmp_path / "token").write_text("\n" if damage == "empty" else "bad token\nxx")
    hang_up(guarded, "the tokens stay as they were")
    assert guarded.client.get("/v1/topics", headers=bearer(OLD)).status_code == 200
    assert guarded.client.get("/v1/topics").status_code == 401


def test_the_token_for_the_control_plane_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(OLD)
    plane = BrokerProcess(None, "--token-file", str(file))
    follower = None
    try:
        plane.start()
        follower = BrokerProcess(
            None, "--control-plane", plane.url, "--control-plane-token-file", str(file)
        )
        follower.start()
        registry = "/v1/registry"
        eventually(lambda: follower.client.get(registry).json()["connected"])
        file.write_text(NEW)
        hang_up(plane, "the token has changed")
        eventually(lambda: not follower.client.get(registry).json()["connected"])
        hang_up(follower, "the token files were read again")
        eventually(lambda: follower.client.get(registry).json()["connected"])
    finally:
        plane.close()
        if follower is not None:
            follower.close()
