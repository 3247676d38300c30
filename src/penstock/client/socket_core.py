"""Keeps a WebSocket to a broker open: connects, reconnects with backoff, and closes in order.

Owns the event loop's side of a `SocketExchange`; both clients use it. Invariants: callers wait
while the outgoing buffer is full. Closing sends all that was accepted before, or raises. Runs in
one event loop; another thread may only call `check_posts`, `is_full` and `next_number`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from penstock.client.calls import Call, SocketForm
from penstock.client.socket_channels import AnyChannel, GapMark, SocketChannel
from penstock.client.socket_connection import SocketConnection, SocketEndpoint, connect
from penstock.client.socket_exchange import PING, Outcome, Outgoing, SocketExchange
from penstock.model.errors import (
    Internal,
    InvalidArgument,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from penstock.model.limits import KIB

OnError = Callable[[PenstockError], None]

WRITE_BYTES = 64 * KIB
"""About as much is written at once."""
FIRST_WAIT_S = 0.05
MAX_WAIT_S = 5.0
"""The wait before a reconnect doubles from the first to the last with every failure. A random part
of it is left out, so that clients of a broker that restarts do not all come back at once."""
STABLE_S = 5.0
"""A connection that has lasted so long counts as a success: the wait begins at the first again."""
LEAVE_S = 5.0
"""How long a named subscription that is closed waits for events that the broker had sent."""

T = TypeVar("T")

log = logging.getLogger("penstock.socket")


class SocketCore:
    """`reconnects` counts how often the connection was made again."""

    def __init__(self, endpoint: SocketEndpoint, on_error: OnError | None) -> None:
        self.reconnects = 0
        self._endpoint = endpoint
        self._on_error = on_error
        self._exchange = SocketExchange(self._report, self._call_later)
        self._connection: SocketConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_writing = False
        self._has_room = asyncio.Event()
        self._end: PenstockError | None = Unavailable("the socket is not open; use it in a `with`")
        self._reported: PenstockError | None = None
        self._why_away = ""

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def has_ended(self) -> bool:
        """Whether no request can succeed any more."""
        return self._end is not None

    def is_full(self) -> bool:
        return self._exchange.is_full()

    def next_number(self) -> int:
        return self._exchange.next_number()

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connects. Raises the error if that fails; only later connections are tried again."""
        if self._keeper is not None:
            self.check()
            return
        self._loop = asyncio.get_running_loop()
        connection = await connect(self._endpoint, self)
        self._end = None
        self._attach(connection)
        self._keeper = asyncio.create_task(self._keep(connection))
        self._keeper.add_done_callback(self._keeper_ended)

    async def close(self) -> None:
        """Sends what was accepted, waits until the broker has handled it, and closes. Raises an
        error of a publish without an answer that nobody has heard of."""
        if self._end is not None:
            self._raise_reported()
            return
        try:
            if self.is_connected or not self._exchange.is_idle():
                await self._drain()
        finally:
            await self._stop(Unavailable("the socket is closed"))
        self._raise_reported()

    async def abort(self) -> None:
        """Closes without waiting for what was accepted."""
        if self._end is None:
            await self._stop(Unavailable("the socket is closed"))

    async def _drain(self) -> None:
        pending = self._request(self._exchange.message(PING, b"", _ignore))
        self._end = Unavailable("the socket is closing")
        try:
            await pending
        except PenstockError as error:
            raise OutcomeUnknown(
                f"{error.message}; what was published with ack none just before may be lost"
            ) from error

    async def _stop(self, end: PenstockError) -> None:
        self._end = end
        if self._keeper is not None:
            self._keeper.cancel()
        self._exchange.end(end)
        self._has_room.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _keep(self, connection: SocketConnection) -> None:
        """Makes a new connection whenever one breaks."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            since = loop.time()
            reason = await asyncio.shield(connection.closed)
            self._connection = None
            self._why_away = reason = self._explained(reason)
            log.warning("%s; reconnecting to %s", reason, self._endpoint.url)
            self._exchange.lost(reason)
            if self._endpoint.book is not None:
                self._endpoint.book.doubt()
            if loop.time() - since >= STABLE_S:
                failures = 0
            while True:
                await asyncio.sleep(wait_before(failures))
                failures += 1
                try:
                    connection = await connect(self._endpoint, self)
                    break
                except PenstockError as error:
                    if self._is_final(error):
                        self._fail(error)
                        return
                    self._why_away = error.message
            self.reconnects += 1
            log.info("connected to %s again", self._endpoint.url)
            self._attach(connection)

    def _is_final(self, error: PenstockError) -> bool:
        """Tells whether trying to connect again cannot help. A token that is read again may be
        right later, as when it is replaced here after it was replaced at the broker."""
        if isinstance(error, Unauthenticated):
            return not self._endpoint.credentials.can_change
        return isinstance(error, InvalidArgument | PermissionDenied)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """Ends everything after a defect of this module, so that nobody waits for ever."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            log.error("reconnecting failed", exc_info=error)
            self._fail(Internal(f"reconnecting failed: {error!r}"))

    def _explained(self, reason: str) -> str:
        words = self._exchange.last_words
        return f"{reason}: {words}" if words and words not in reason else reason

    def _attach(self, connection: SocketConnection) -> None:
        self._connection = connection
        self._exchange.connected()
        self._schedule()

    def _fail(self, error: PenstockError) -> None:
        """Ends everything: no connection can be made any more."""
        log.error("the socket to %s has ended: %s", self._endpoint.url, error.message)
        self._end = error
        self._exchange.end(error)
        self._has_room.set()

    # -- requests ------------------------------------------------------------------------------

    async def send(self, call: Call[T]) -> T:
        """Sends a call and returns its result. Raises the error that the broker answered with."""
        if call.form is None:
            raise InvalidArgument(f"{call.path} is not available over the WebSocket")
        self.check()
        if self.is_full():
            await self.room()
        frame = await self._request(self._exchange.message(call.form, call.body, _ignore))
        return call.answer(200, frame)

    async def settle(self, channel: AnyChannel, form: SocketForm) -> bytes | None:
        """Acks, nacks or extends an event of a channel. Waits while the channel is away. Returns
        None if the channel has ended, so that the request has to go another way."""
        if self._end is not None or not self._exchange.is_wanted(channel):
            return None
        if self.is_full():
            await self.room()
        return await self._request(self._exchange.settle(channel, form))

    async def request(self, item: Outgoing) -> bytes:
        """Sends a request and returns the frame that answers it."""
        self.check()
        if self.is_full():
            await self.room()
        return await self._request(item)

    async def post(self, item: Outgoing) -> None:
        """Accepts a request that gets no answer."""
        self.check_posts()
        if self.is_full():
            await self.room()
        self.put(item)

    def put(self, item: Outgoing) -> None:
        if self._end is None:
            self._exchange.put(item)
            self._schedule()
        else:
            # Another thread has closed the socket since this one was accepted.
            self._report(Unavailable(f"{self._end.message}; an event was not sent"))

    async def flush(self) -> None:
        """Waits until the broker has handled everything that was accepted. Raises an error of a
        publish without an answer."""
        self.check()
        await self._request(self._exchange.message(PING, b"", _ignore))
        self._raise_reported()

    async def room(self) -> None:
        """Waits until the outgoing buffer has room."""
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                while self.is_full():
                    self._has_room.clear()
                    await self._has_room.wait()
                    self.check()
        except TimeoutError as error:
            raise Unavailable(f"the outgoing buffer is full: {self._away()}") from error

    def check(self) -> None:
        if self._end is not None:
            raise _copy(self._end)

    def check_posts(self) -> None:
        """Raises if the socket has ended, or an earlier publish without an answer has failed."""
        self.check()
        if self._reported is not None:
            self._raise_reported()

    async def _request(self, item: Outgoing) -> bytes:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if answered.done():
                return
            if isinstance(outcome, PenstockError):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        item.done = done
        self._exchange.put(item)
        self._schedule()
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                return await answered
        except TimeoutError as error:
            raise self._timed_out(item) from error
        finally:
            item.is_wanted = False

    def _timed_out(self, item: Outgoing) -> PenstockError:
        if not item.is_sent:
            return Unavailable(f"{self._away()}; {item.form.type} was not sent")
        text = f"the broker at {self._endpoint.url} did not answer in time"
        if item.form.is_read:
            return Unavailable(text)
        return OutcomeUnknown(f"{text}; it is unknown whether it executed {item.form.type}")

    def _away(self) -> str:
        if self.is_connected:
            return f"the broker at {self._endpoint.url} does not read"
        return self._why_away or f"no broker answers at {self._endpoint.url}"

    # -- channels ------------------------------------------------------------------------------

    async def open_channel(self, channel: AnyChannel) -> None:
        """Opens a channel. Raises the error with which the broker refuses it."""
        self.check()
        opened = channel.opening()
        self._exchange.open_channel(channel)
        self._schedule()
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await opened
        except BaseException as error:
            self.close_channel(channel)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"could not open the {channel.kind}: {self._away()}") from error
            raise

    async def take(self, channel: AnyChannel, wait_s: float) -> list[Any]:
        """Returns what can be read from a channel; waits up to `wait_s` for it. Raises the error
        that ended the channel when all before it has been read."""
        if not channel.has_news():
            channel.news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await channel.news.wait()
            except TimeoutError:
                return []
        try:
            return channel.take()
        finally:
            self._exchange.taken(channel)
            self._schedule()

    async def end_channel(self, channel: AnyChannel) -> None:
        self.close_channel(channel)

    async def leave_channel(self, channel: SocketChannel[T]) -> list[T | GapMark]:
        """Ends a channel, and returns what arrived for it and was not taken. The answer to the
        pause comes behind everything that the broker had sent."""
        left: list[T | GapMark] = []
        with suppress(PenstockError, TimeoutError):
            if channel.id:
                async with asyncio.timeout(LEAVE_S):
                    await self.settle(channel, SocketForm("pause", {}, is_idempotent=True))
            left = channel.take()
        self.close_channel(channel)
        return left

    def close_channel(self, channel: AnyChannel) -> None:
        self._exchange.close_channel(channel)
        self._schedule()

    # -- frames --------------------------------------------------------------------------------

    def receive_text(self, frame: bytes) -> None:
        self._exchange.receive_text(frame)
        self._schedule()

    def receive_binary(self, frame: bytes) -> None:
        self._exchange.receive_binary(frame)

    def writable(self) -> None:
        self._schedule()

    def _schedule(self) -> None:
        """Writes once in this turn of the loop, however many requests there are."""
        if not self._is_writing and self._loop is not None:
            self._is_writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_writing = False
        connection = self._connection
        while connection is not None and connection.is_writable:
            leaving = self._exchange.leave(WRITE_BYTES)
            if not leaving:
                break
            connection.send([(item.is_binary, item.frame) for item in leaving])
        if not self._has_room.is_set() and not self.is_full():
            self._has_room.set()

    # -- errors of publishes without an answer ---------------------------------------------------

    def _report(self, error: PenstockError) -> None:
        """Tells the callback, or keeps the first error for the next call."""
        if self._on_error is None:
            self._reported = self._reported or error
            return
        try:
            self._on_error(error)
        except Exception:
            # It is the application's error, and must not end the connection.
            log.exception("on_error failed")

    def _raise_reported(self) -> None:
        reported, self._reported = self._reported, None
        if reported is not None:
            # The place that raises it is far from the publish: the traceback should say so.
            reported.add_note("An earlier publish with ack none failed.")
            raise reported

    def _call_later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self._schedule()

        if self._loop is not None:
            self._loop.call_later(seconds, act)


def wait_before(failures: int) -> float:
    """Returns how long to wait before the next try to connect."""
    longest = min(FIRST_WAIT_S * 2 ** min(failures, 16), MAX_WAIT_S)
    return random.uniform(longest / 2, longest)


def _copy(error: PenstockError) -> PenstockError:
    """Returns an error of the same kind: each raise adds to a traceback."""
    return type(error)(error.message)


def _ignore(_: Outcome) -> None: ...
