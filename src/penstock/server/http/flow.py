"""Backpressure of one connection: whether it is read, and whether it accepts more bytes."""

from __future__ import annotations

import asyncio

from penstock.model.limits import KIB, MIB

LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, the broker reads and discards after it has refused a request."""

TLS_HIGH_WATER_BYTES = 64 * KIB
"""The high-water mark of a TLS connection, that of a plain one. By default TLS would hold eight
times as much."""


WRITTEN_CHECK_S = 0.05
"""How often a TLS connection that is to close checks whether its last answer was sent."""


class FlowControl:
    """`read_paused`: the broker reads nothing for now. `write_paused`: the transport holds more
    than its high-water mark, and nothing more is to be written. `is_tls`: the peer cannot close one
    direction alone."""

    __slots__ = ("_transport", "is_tls", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_tls = transport.get_extra_info("ssl_object") is not None
        if self.is_tls:
            transport.set_write_buffer_limits(TLS_HIGH_WATER_BYTES)
        self.read_paused = False
        self.write_paused = False

    def close_when_written(self) -> None:
        """Closes the transport. One with TLS would give up what it holds after its timeout, so it
        is closed only when it has passed everything on; a reader that stalls is cut off by the
        budget for answers."""
        transport = self._transport
        if self.is_tls and transport.get_write_buffer_size() and not transport.is_closing():
            asyncio.get_running_loop().call_later(WRITTEN_CHECK_S, self.close_when_written)
        else:
            transport.close()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()
