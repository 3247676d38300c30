"""Is the peer of a connection still there, though it says nothing and takes nothing?

A peer that is there acknowledges every attempt to send, even while its reader stands still; that
is what the operating system is asked. Must not know what a connection is for.
"""

from __future__ import annotations

import asyncio
import socket
import sys

LOST_ATTEMPTS = 3


def is_unreachable(transport: asyncio.Transport) -> bool:
    """Of a peer that has bytes to take: has it not even acknowledged the latest attempts?"""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    retransmits, probes = info[2], info[3]
    return max(retransmits, probes) >= LOST_ATTEMPTS


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
