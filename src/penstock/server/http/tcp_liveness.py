"""Is the peer of a connection still there, though it says nothing? And does it take anything?

A peer that is there acknowledges every attempt to send, even while its reader stands still; that
is what the operating system is asked. Must not know what a connection is for.
"""

from __future__ import annotations

import asyncio
import socket
import sys

LOST_ATTEMPTS = 3

_BYTES_ACKED = 120
"""Where in Linux' `tcp_info` the number of bytes is that the peer has acknowledged, in 8 bytes."""


def is_unreachable(transport: asyncio.Transport) -> bool:
    """Of a peer that has bytes to take: has it not even acknowledged the latest attempts?"""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    retransmits, probes = info[2], info[3]
    return max(retransmits, probes) >= LOST_ATTEMPTS


def acknowledged_bytes(transport: asyncio.Transport) -> int:
    """A number that changes whenever the peer accepts bytes: how many it ever accepted or, where
    the system does not say, how many it has still to take."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.fileno() >= 0:
        size = _BYTES_ACKED + 8
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) == size:
            return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder)
    return -transport.get_write_buffer_size()


def probe_when_idle(transport: asyncio.Transport, idle_s: float) -> None:
    """Lets the operating system ask a peer to which nothing is sent, and end the connection if
    there is no answer."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = max(1, round(idle_s))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_ATTEMPTS)
