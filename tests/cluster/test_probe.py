"""A probe tells that a process is gone when its port refuses connections, and never else."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.cluster import probe as probe_module
from penstock.cluster.probe import TcpProbe

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "AGAIN_S", 0.02)


class Port:
    """A port of this machine that somebody may listen on."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        with socket.socket() as free:
            free.bind((host, 0))
            self.number: int = free.getsockname()[1]
        self.accepted = 0
        self._accepting = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.number}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, self.number)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        async with self._accepting:
            self.accepted += 1
            self._accepting.notify_all()

    async def accepts(self, count: int) -> None:
        async with self._accepting, asyncio.timeout(TIMEOUT_S):
            await self._accepting.wait_for(lambda: self.accepted >= count)

    def hang_up(self, data: bytes = b"") -> None:
        """Closes the connections, after some last words; the port goes on listening."""
        for writer in self._writers:
            writer.write(data)
            writer.close()
        self._writers.clear()

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def end(self) -> None:
        """What the end of a process does."""
        self.stop_listening()
        self.hang_up()


class Watch:
    def __init__(self, url: str, *, was_reached: bool = False) -> None:
        self._gone = asyncio.Event()
        self.told = 0
        self.tail = TcpProbe(asyncio.get_running_loop()).watch(
            url, self._tell, was_reached=was_reached
        )

    def _tell(self) -> None:
        self.told += 1
        self._gone.set()

    async def gone(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._gone.wait()


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Port, Watch]]:
    """A port that listens, and a probe that has reached it."""
    port = Port()
    await port.listen()
    watch = Watch(port.url)
    await port.accepts(1)
    try:
        yield port, watch
    finally:
        watch.tail.close()
        port.end()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            await scenario()

    asyncio.run(within())


def test_a_probe_tells_once_that_the_process_has_ended() -> None:
    async def scenario() -> None:
        async with watched() as (port, watch):
            assert watch.told == 0
            port.end()
            await watch.gone()
            await asyncio.sleep(0.1)
            assert watch.told == 1

    run(scenario)


def test_a_probe_is_not_misled_by_a_port_that_hangs_up() -> None:
    async def scenario() -> None:
        async with watched() as (port, watch):
            for number in range(2, 5):
                port.hang_up(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
                await port.accepts(number)
            assert watch.told == 0

    run(scenario)


def test_a_probe_is_not_misled_by_a_broker_that_stops_listening_and_serves_on() -> None:
    """An orderly stop closes the port first, and goes on with the connections it has."""

    async def scenario() -> None:
        async with watched() as (port, watch):
            port.stop_listening()
            await asyncio.sleep(0.2)
            assert watch.told == 0
            port.hang_up()
            await watch.gone()

    run(scenario)


def test_an_address_that_was_never_reached_is_not_gone() -> None:
    async def scenario() -> None:
        port = Port()
        watch = Watch(port.url)
        await asyncio.sleep(0.2)
        assert watch.told == 0
        await port.listen()
        await port.accepts(1)
        port.end()
        await watch.gone()

    run(scenario)


def test_an_address_that_was_reached_before_is_gone_when_it_refuses() -> None:
    async def scenario() -> None:
        await Watch(Port().url, was_reached=True).gone()

    run(scenario)


def test_a_probe_that_is_closed_tells_nothing() -> None:
    async def scenario() -> None:
        async with watched() as (port, watch):
            watch.tail.close()
            port.end()
            await asyncio.sleep(0.2)
            assert watch.told == 0

    run(scenario)


def test_a_name_with_several_addresses_is_probed_where_it_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most names have an IPv6 and an IPv4 address, and a broker may listen on one of them."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        port = Port()
        resolve = loop.getaddrinfo

        async def two_addresses(host: str, *arguments: object, **named: object) -> object:
            if host != "broker.test":
                return await resolve(host, *arguments, **named)  # type: ignore[arg-type]
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.9", port.number)), (*kind, ("127.0.0.1", port.number))]

        monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
        await port.listen()
        watch = Watch(f"http://broker.test:{port.number}")
        await port.accepts(1)
        port.end()
        await watch.gone()

    run(scenario)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://", "http://x:99999999", "http://[::1", "http://" + "x" * 300]
)
def test_an_address_that_makes_no_sense_is_not_gone(url: str) -> None:
    async def scenario() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(about))
        watch = Watch(url, was_reached=True)
        await asyncio.sleep(0.05)
        assert watch.told == 0
        del watch
        gc.collect()
        assert problems == []

    run(scenario)
