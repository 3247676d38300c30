"""Asks the operating system whether a silent peer is still there, and how much it has accepted.

The machine of a peer acknowledges every attempt to send, even while the program does not read.
Must not know what a connection is for.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios

LOST_ATTEMPTS = 3

_BYTES_ACKED = 120
"""The offset of `tcpi_bytes_acked`, 8 bytes, in the `tcp_info` of Linux."""


_ENDED = frozenset({6, 7, 8, 9, 11})
"""TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK and CLOSING, as Linux numbers them."""


def is_unreachable(transport: asyncio.Transport) -> bool:
    """Returns whether a peer has not even acknowledged the latest attempts to send."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    retransmits, probes = info[2], info[3]
    return max(retransmits, probes) >= LOST_ATTEMPTS


def acknowledged_bytes(transport: asyncio.Transport) -> int:
    """Returns a number that changes whenever the peer accepts bytes: how many it has accepted, or,
    where the system does not say, minus how many are still to be sent."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.fileno() >= 0:
        size = _BYTES_ACKED + 8
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) == size:
            return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder)
    return -transport.get_write_buffer_size()


def give_up_when_unreachable(transport: asyncio.Transport, check_s: float) -> None:
    """Ends the connection when the peer could not be reached at two checks in a row."""
    loop = asyncio.get_running_loop()

    def check(was_doubtful: bool) -> None:
        if transport.is_closing():
            return
        is_doubtful = is_unreachable(transport)
        if was_doubtful and is_doubtful:
            transport.abort()
        else:
            loop.call_later(check_s, check, is_doubtful)

    loop.call_later(check_s, check, False)


def reset(transport: asyncio.Transport) -> None:
    """Ends a connection at once. A peer that has not accepted everything is told by a reset: a
    plain end would wait behind the bytes that it does not take."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.fileno() >= 0:
        (unaccepted,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        if unaccepted:
            at_once = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    transport.abort()


def probe_when_idle(transport: asyncio.Transport, idle_s: float) -> None:
    """Lets the operating system probe a peer to which nothing is sent, and end the connection if
    it does not answer."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = max(1, round(idle_s))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_ATTEMPTS)


def has_ended(transport: asyncio.BaseTransport) -> bool:
    """Returns whether the peer has ended or reset the connection. Knows it of a connection that is
    not read, too."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None or connection.fileno() < 0:
        return False
    state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in _ENDED
