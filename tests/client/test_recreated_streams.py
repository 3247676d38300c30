"""A stream that is deleted and created again under the same name is another one.

Its offsets begin at 0 again, so a position in the old stream would leave out events of the new one
without a word. Clients that have such a position get OutOfRange.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncClient, Client, PositionFile
from penstock.client.sync_handles import StreamHandle
from penstock.client.sync_socket import Socket
from penstock.model.errors import InvalidArgument, OutOfRange
from tests.broker_process import BrokerProcess, eventually
from tests.cli.conftest import run_penstock
from tests.tcp_proxy import TcpProxy, tcp_proxy

WAIT_S = 30.0
NEW = ["new0", "new1", "new2", "new3"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        process.keep_port()
        yield process


@pytest.fixture
def proxy(broker: BrokerProcess) -> Iterator[TcpProxy]:
    with tcp_proxy(broker.port) as proxy:
        yield proxy


@pytest.fixture
def socket(proxy: TcpProxy) -> Iterator[Socket]:
    """A socket whose connection can be cut."""
    with Client(proxy.url, timeout_s=WAIT_S) as client, client.connect() as socket:
        yield socket
        proxy.allow()


@pytest.fixture
def stream(client: Client, request: pytest.FixtureRequest) -> StreamHandle:
    """A durable stream of the test's own, with three events."""
    name = f"s{abs(hash(request.node.name))}"
    client.create_stream("default", "default", name, delivery="at_least_once")
    stream = client.stream(name)
    stream.publish_batch(["old0", "old1", "old2"])
    return stream


def create_again(stream: StreamHandle) -> None:
    stream.client.delete_stream(*stream.path)
    stream.client.create_stream(*stream.path, delivery="at_least_once")
    stream.publish_batch(NEW)


@pytest.mark.parametrize("way", ["http", "socket"])
def test_a_position_file_of_the_old_stream_is_refused(
    way: str, stream: StreamHandle, socket: Socket, tmp_path: Path
) -> None:
    handle: Any = stream if way == "http" else socket.stream(stream.path[2])
    options: Any = {"name": "n", "start": "earliest", "wait_s": 1}
    with (
        PositionFile(tmp_path / "position") as handled,
        handle.subscribe(once=handled, **options) as events,
    ):
        for event in events:
            event.ack()
        assert handled.stream_id == events.stream_id == stream.offsets().stream_id
    create_again(stream)
    with PositionFile(tmp_path / "position") as handled:
        assert handled.ranges == [(0, 3)]
        with pytest.raises(OutOfRange, match="created again"):
            handle.subscribe(once=handled, **options).open()
    assert not stream.subscriptions().named, "events were taken, or acked unseen"
    (tmp_path / "position").unlink()
    with (
        PositionFile(tmp_path / "position") as handled,
        handle.subscribe(once=handled, **options) as events,
    ):
        assert [event.payload.decode() for event in events] == NEW


def test_a_position_file_of_another_stream_is_refused(
    stream: StreamHandle, socket: Socket, tmp_path: Path
) -> None:
    handled = PositionFile(tmp_path / "position")
    handled.begin(("default", "default", "another"), 0)
    for handle in (stream, socket.stream(stream.path[2])):
        with pytest.raises(InvalidArgument, match="position in stream 'default/default/another'"):
            handle.subscribe(name="n", once=handled)


@pytest.mark.parametrize("way", ["http", "socket"])
def test_a_position_that_refuses_the_stream_gives_its_events_back(
    way: str, stream: StreamHandle, socket: Socket
) -> None:
    """Any position may have a `begin`, which learns the stream before the first event."""
    told = []

    class Position(set[int]):
        def has(self, offset: int) -> bool:
            return offset in self

        def begin(self, path: tuple[str, str, str], stream_id: int) -> None:
            told.append((path, stream_id))
            if len(told) == 1:
                eventually(lambda: [each.unacked for each in stream.subscriptions().named] == [3])
                raise LookupError("no such position")

    handle: Any = stream if way == "http" else socket.stream(stream.path[2])
    options: Any = {"name": "n", "start": "earliest", "lease_ms": 600_000, "wait_s": WAIT_S}
    with pytest.raises(LookupError, match="no such position"):
        handle.subscribe(once=Position(), **options).open()
    with handle.subscribe(once=Position(), **options) as events:
        for offset in range(3):
            event = next(events)
            assert (event.offset, event.attempt) == (offset, 1)
            event.ack()
    assert told == [(stream.path, stream.offsets().stream_id)] * 2


@pytest.mark.parametrize("how", ["plain", "start", "name"])
@pytest.mark.parametrize("cause", ["cut", "kill"])
def test_a_socket_does_not_resume_in_the_new_stream(
    how: str,
    cause: str,
    stream: StreamHandle,
    socket: Socket,
    proxy: TcpProxy,
    broker: BrokerProcess,
) -> None:
    """At its old offset it would skip the first events there."""
    options: dict[str, Any] = {
        "plain": {},
        "start": {"start": "earliest"},
        "name": {"name": "n", "start": "earliest"},
    }[how]
    with socket.stream(stream.path[2]).subscribe(**options, wait_s=WAIT_S) as events:
        if how == "plain":
            stream.publish("live")
        next(events)
        proxy.cut()
        if cause == "kill":
            broker.restart(kill=True)
        eventually(lambda: not socket.is_connected, timeout_s=WAIT_S)
        create_again(stream)
        proxy.allow()
        seen = []
        with pytest.raises(OutOfRange, match="created again"):
            seen += [getattr(each, "payload", each) for each in events]
    # What had arrived before may still come; nothing of the new stream does.
    assert set(seen) <= {b"old1", b"old2"}
    eventually(lambda: socket.is_connected, timeout_s=WAIT_S)


@pytest.mark.parametrize("way", ["http", "socket"])
def test_a_start_with_the_id_of_the_old_stream_is_refused(
    way: str, stream: StreamHandle, socket: Socket
) -> None:
    handle: Any = stream if way == "http" else socket.stream(stream.path[2])
    with handle.subscribe(start=1, wait_s=WAIT_S) as events:
        stream_id = events.stream_id
        assert next(events).payload == b"old1"
    with handle.subscribe(start=2, stream_id=stream_id, wait_s=WAIT_S) as events:
        assert (next(events).payload, events.stream_id) == (b"old2", stream_id)
    create_again(stream)
    for options in ({"start": 3}, {"start": "latest"}, {"name": "n"}):
        with pytest.raises(OutOfRange, match=f"not {stream_id}"):
            handle.subscribe(**options, stream_id=stream_id).open()


def test_the_async_clients_refuse_the_old_stream_too(stream: StreamHandle, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncClient(stream.client.url) as client, client.connect() as socket:
            handles: tuple[Any, ...] = (
                client.stream(stream.path[2]),
                socket.stream(stream.path[2]),
            )
            with PositionFile(tmp_path / "position") as handled:
                async with handles[0].subscribe(name="n", start=0, once=handled) as events:
                    await (await anext(events)).ack()
                    stream_id = events.stream_id
                create_again(stream)
                for handle in handles:
                    with pytest.raises(OutOfRange, match="created again"):
                        await handle.subscribe(name="n", once=handled).open()
                    with pytest.raises(OutOfRange, match="created again"):
                        await handle.subscribe(start=1, stream_id=stream_id).open()

    asyncio.run(run())


def test_the_command_line_shows_the_id_and_refuses_the_old_stream(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    name = stream.path[2]

    def run(*words: str) -> Any:
        return run_penstock(*words, "--timeout", "10", "--max", "1", "--url", broker.url)

    stream_id = json.loads(run("subscribe", name, "--start", "0", "--json").out)["stream_id"]
    shown = run_penstock("stream", "describe", name, "--url", broker.url)
    assert f"id {stream_id}, keeps offsets 0 to before 3" in shown.out
    known = ("--stream-id", str(stream_id))
    assert run("subscribe", name, "--start", "1", *known).out == "old1\n"
    assert "--stream-id needs --start or --name" in run("subscribe", name, *known).err
    create_again(stream)
    for where in (("--start", "2"), ("--name", "n")):
        refused = run("subscribe", name, *where, *known)
        assert (refused.code, refused.out) == (1, "")
        assert "created again" in refused.err
