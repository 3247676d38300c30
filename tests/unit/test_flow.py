"""How a connection closes: one with TLS must first have passed on all that it holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.http import flow
from penstock.server.http.flow import FlowControl


class Transport(asyncio.Transport):
    """Holds some bytes of an answer, and says when it is closed."""

    def __init__(self, held_bytes: int, **info: Any) -> None:
        super().__init__(info)
        self.held_bytes = held_bytes
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.held_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def test_a_connection_with_tls_closes_when_its_last_answer_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The TLS layer would give up what it holds after its timeout."""
    monkeypatch.setattr(flow, "WRITTEN_CHECK_S", 0)

    async def test() -> None:
        transport = Transport(100, ssl_object=object())
        FlowControl(transport).close_when_written()
        for _ in range(5):
            await asyncio.sleep(0)
            assert not transport.is_closed
        transport.held_bytes = 0
        async with asyncio.timeout(5):
            while not transport.is_closed:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

    asyncio.run(test())


def test_a_plain_connection_closes_at_once_and_sends_what_it_holds() -> None:
    transport = Transport(100)
    FlowControl(transport).close_when_written()
    assert transport.is_closed


def test_a_connection_with_tls_has_the_high_water_mark_of_a_plain_one() -> None:
    transport = Transport(0, ssl_object=object())
    assert FlowControl(transport).is_tls
    assert transport.high == 64 * 1024
