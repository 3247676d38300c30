"""Backpressure of one connection: whether it is read, and whether it accepts more bytes."""

from __future__ import annotations

import asyncio


class FlowControl:
    """`read_paused`: the broker reads nothing for now. `write_paused`: the transport holds more
    than its high-water mark, and nothing more is to be written."""

    __slots__ = ("_transport", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()
