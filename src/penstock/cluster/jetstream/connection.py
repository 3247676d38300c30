"""The broker's connection to NATS: requests with answers, and subscriptions, on whichever of the
servers answers.

Connects again by itself for ever, and says so in the log once in an outage. A request is sent once
and never repeated: after a broken connection its outcome is unknown. Subscriptions are made again
on each new connection; what was sent to them meanwhile is lost. Must not know JetStream.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.cluster.jetstream import wire
from penstock.cluster.jetstream.addresses import NatsAddress
from penstock.cluster.jetstream.errors import NatsConnectFailed
from penstock.cluster.jetstream.session import NatsSession
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Unanswered

REQUEST_TIMEOUT_S = 1.0
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
"""How long it waits before it asks all servers again, doubled from the first."""
REPLIES_SID = 1

Answered = Callable[[NatsMessage | Unanswered], None]
Received = Callable[[NatsMessage], None]

_INBOX = re.compile(r"_INBOX[.\w]*")
_log = logging.getLogger("penstock.cluster")


class NoResponders(Unanswered, frozen=True):
    """Nobody listens to the subject: JetStream is away, or has no such stream."""


class NotPermitted(Unanswered, frozen=True):
    """The user of this connection may not publish or subscribe to a subject. Nothing was sent."""


_VIOLATION = re.compile(r'Permissions Violation for (Publish|Subscription) to "([^"]*)"', re.I)


class _Request(NamedTuple):
    subject: bytes
    answered: Answered
    timer: asyncio.TimerHandle


class NatsSubscription:
    """Interest in a subject, on this connection and each later one, until it is closed."""

    def __init__(self, connection: NatsConnection, sid: int, subject: bytes, received: Received):
        self._connection = connection
        self.sid = sid
        self.subject = subject
        self.received = received

    def close(self) -> None:
        self._connection.unsubscribe(self)


class NatsConnection:
    """Used on the thread of its loop only. `open` begins, `close` ends it."""

    def __init__(
        self,
        addresses: Sequence[NatsAddress],
        *,
        name: str = "penstock",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._addresses = list(addresses)
        random.shuffle(self._addresses)
        self._name = name
        self._tls = tls
        self._session: NatsSession | None = None
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self._inbox = b"_INBOX.%b." % secrets.token_hex(11).encode()
        self._count = 0
        self._waiting: dict[bytes, _Request] = {}
        self._forbidden = ""
        """Why no answer can arrive on the present connection."""
        self._last_sid = REPLIES_SID
        self._subscriptions: dict[int, NatsSubscription] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._said: set[str] = set()
        """Topics of the warnings about this outage; each is logged once."""

    @property
    def is_connected(self) -> bool:
        return self._session is not None

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived in part: the server is not silent."""
        return self._session is not None and self._session.is_receiving

    @property
    def has_jetstream(self) -> bool:
        """Whether the present server has JetStream itself. Others of its cluster may have it."""
        return self._session is not None and self._session.info.jetstream

    @property
    def max_payload(self) -> int:
        """The largest payload, with its headers, that the present server takes; 0 without one."""
        return self._session.info.max_payload if self._session is not None else 0

    @property
    def server(self) -> str:
        """The name and address of the present server, for logs; empty without one."""
        session = self._session
        return f"{session.info.server_name} ({session.address})" if session is not None else ""

    @property
    def server_name(self) -> str:
        return self._session.info.server_name if self._session is not None else ""

    def open(self) -> None:
        """Begins to connect. Who needs to know when it has listens."""
        if self._task is None:
            self._task = self.loop.create_task(self._stay_connected())

    def listen(self, changed: Callable[[bool], None]) -> Callable[[], None]:
        """Calls `changed` with True after each connect and with False after each loss, until the
        function that it returns is called."""
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed) if changed in self._listeners else None

    async def connected(self) -> None:
        """Returns once there is a connection, however long that takes."""
        if self.is_connected:
            return
        future: asyncio.Future[None] = self.loop.create_future()

        def changed(is_connected: bool) -> None:
            if is_connected and not future.done():
                future.set_result(None)

        stop = self.listen(changed)
        try:
            await future
        finally:
            stop()

    def say(self, text: str, of: str = "") -> None:
        """Logs that something does not work, unless this outage had a line about the same."""
        if (of or text) in self._said or self._is_closed:
            return
        self._said.add(of or text)
        _log.warning("%s; trying until it works", text)

    async def close(self) -> None:
        """Ends the connection. Requests under way are Unanswered; nobody else is told anything."""
        self._is_closed = True
        self._listeners.clear()
        self._subscriptions.clear()
        self._forget_session("the connection was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # -- requests and subscriptions -----------------------------------------------------------

    def new_inbox(self) -> bytes:
        """A subject of this connection that nobody else uses."""
        self._count += 1
        return b"_INBOX.%b.%d" % (secrets.token_hex(11).encode(), self._count)

    def request(
        self,
        subject: bytes,
        data: bytes,
        answered: Answered,
        *,
        headers: bytes = b"",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Sends a request and calls `answered` exactly once, in a later turn. `headers` are whole
        lines."""
        session = self._session
        if session is None:
            return self._answer_later(answered, "there is no connection to NATS")
        if self._forbidden:
            self.loop.call_soon(answered, NotPermitted(self._forbidden))
            return None
        if session.is_congested:
            return self._answer_later(answered, "the NATS server takes nothing any more")
        if len(data) + len(headers) + len(b"NATS/1.0\r\n\r\n") > session.info.max_payload:
            size = f"{len(data)} bytes are more than its max_payload of {session.info.max_payload}"
            self.say(f"{self.server}: {size}")
            return self._answer_later(answered, size)
        self._count += 1
        key = b"%d" % self._count
        timer = self.loop.call_later(timeout_s, self._time_out, key, timeout_s)
        self._waiting[key] = _Request(subject, answered, timer)
        session.write(wire.publish(subject, self._inbox + key, headers, data))

    async def ask(
        self,
        subject: bytes,
        data: bytes,
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: bytes = b"",
    ) -> NatsMessage | Unanswered:
        """Like `request`, for coroutines."""
        future: asyncio.Future[NatsMessage | Unanswered] = self.loop.create_future()

        def answered(answer: NatsMessage | Unanswered) -> None:
            if not future.done():
                future.set_result(answer)

        self.request(subject, data, answered, headers=headers, timeout_s=timeout_s)
        return await future

    def publish(self, subject: bytes, data: bytes) -> bool:
        """Sends a message that nobody answers. False if there is no connection."""
        session = self._session
        if session is None or session.is_congested or len(data) > session.info.max_payload:
            return False
        session.write(wire.publish(subject, b"", b"", data))
        return True

    def subscribe(self, subject: bytes, received: Received) -> NatsSubscription:
        self._last_sid += 1
        subscription = NatsSubscription(self, self._last_sid, subject, received)
        self._subscriptions[subscription.sid] = subscription
        if self._session is not None:
            self._session.write(wire.subscribe(subject, subscription.sid))
        return subscription

    def unsubscribe(self, subscription: NatsSubscription) -> None:
        """Its receiver is told nothing more, not of what has arrived already either."""
        found = self._subscriptions.pop(subscription.sid, None)
        if found is not None and self._session is not None:
            self._session.write(wire.unsubscribe(subscription.sid))

    # -- inside -------------------------------------------------------------------------------

    def _received(self, message: NatsMessage) -> None:
        if message.sid != REPLIES_SID:
            subscription = self._subscriptions.get(message.sid)
            if subscription is not None:
                subscription.received(message)
            return
        waiting = self._waiting.pop(message.subject[len(self._inbox) :], None)
        if waiting is None:
            return  # It came too late; Unanswered was said.
        waiting.timer.cancel()
        if message.is_no_responders:
            waiting.answered(NoResponders("nobody answers: there is no leader, or no such stream"))
        else:
            waiting.answered(message)

    def _answer_later(self, answered: Answered, reason: str) -> None:
        self.loop.call_soon(answered, Unanswered(reason))

    def _time_out(self, key: bytes, timeout_s: float) -> None:
        self._waiting.pop(key).answered(Unanswered(f"no answer within {timeout_s:g} s"))

    async def _stay_connected(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            session = await self._connect_to_any()
            if session is None:
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s = FIRST_WAIT_S
            self._lost = self.loop.create_future()
            self._begin(session)
            reason = await self._lost
            self.say(f"lost the connection to NATS at {session.address}: {reason}")
            # A server that accepts and hangs up at once is not asked again without a pause.
            await asyncio.sleep(FIRST_WAIT_S * random.uniform(0.5, 1.0))

    async def _connect_to_any(self) -> NatsSession | None:
        """Asks each server once, the one that was used last at the end."""
        failures: dict[str, str] = {}
        for _ in range(len(self._addresses)):
            address = self._addresses.pop(0)
            self._addresses.append(address)
            session = NatsSession(address, self.loop, self._received, self._refused, self._ended)
            try:
                await session.open(self._tls, self._name)
            except NatsConnectFailed as error:
                failures[str(address)] = str(error)
            else:
                return session
        places = "; ".join(f"{address}: {failures[address]}" for address in sorted(failures))
        # Again when the reasons change: first no server is there, then the password is wrong.
        self.say(f"cannot connect to NATS ({places})", of=" ".join(sorted(set(failures.values()))))
        return None

    def _begin(self, session: NatsSession) -> None:
        lines = [wire.subscribe(self._inbox + b"*", REPLIES_SID)]
        lines += [wire.subscribe(each.subject, sid) for sid, each in self._subscriptions.items()]
        session.write(b"".join(lines))
        self._session = session
        self._forbidden = ""
        if self._said:
            _log.warning("connected to NATS again, at %s", self.server)
            self._said.clear()
        self._tell(True)

    def _ended(self, session: NatsSession, reason: str) -> None:
        if session is self._session:
            self._forget_session(reason)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    def _forget_session(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        session.abort(reason)
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.timer.cancel()
            self._answer_later(each.answered, f"the connection to NATS was lost: {reason}")
        self._tell(False)

    def _tell(self, is_connected: bool) -> None:
        for each in self._listeners:
            self.loop.call_soon(each, is_connected)

    def _refused(self, text: str) -> None:
        self.say(f"NATS at {self.server} refuses something: {text}", of=_INBOX.sub("_INBOX", text))
        found = _VIOLATION.search(text)
        if found is None:
            return
        subject = found[2].encode()
        if found[1].lower() == "publish":
            refused = [key for key, each in self._waiting.items() if each.subject == subject]
        elif subject == self._inbox + b"*":
            self._forbidden = f"NATS does not permit to subscribe to {found[2]}"
            refused = list(self._waiting)
        else:
            return
        for key in refused:
            request = self._waiting.pop(key)
            request.timer.cancel()
            request.answered(NotPermitted(f"NATS does not permit it: {text}"))
