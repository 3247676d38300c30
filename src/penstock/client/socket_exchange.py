"""Requests, answers and channels of one logical WebSocket, which outlives its connections. No IO.

Invariants: requests leave in the order in which they were put. A request that has not left when the
connection breaks leaves on the next one; one that has left is sent again only if it changes
nothing, and otherwise ends with OutcomeUnknown. Every request ends once. Must not know asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from penstock.client.calls import SocketForm, error_from
from penstock.client.socket_channels import AnyChannel, ChangesChannel, SubscriptionChannel
from penstock.client.socket_frames import (
    MAX_NUMBER,
    AnswerHead,
    decode_cache_event,
    decode_events,
    decode_head,
    encode_message,
)
from penstock.model.errors import Internal, OutcomeUnknown, PenstockError, Unavailable
from penstock.model.limits import MIB

MAX_OUTGOING = 8192
MAX_OUTGOING_BYTES = 4 * MIB
"""Requests that have not left. Beyond it, callers wait."""
MAX_TRIES = 3
"""How often a read is sent before it fails: it may be what breaks the connection."""
POSTS_PER_PING = 1024
"""Publishes without an answer between two pings, whose answers say that the broker has handled the
publishes before them."""

Outcome = bytes | PenstockError
"""The frame that answers a request, or the error that ended it."""
Done = Callable[[Outcome], None]

PING = SocketForm("ping", {}, is_read=True)


class Outgoing:
    """A request. `done` None: it is a publish of `events` events that gets no answer.

    `answers` is how many answers are due. `is_wanted` False: nobody waits for it any more.
    `posts_before` counts the events that had left without an answer before this request left.
    """

    __slots__ = (
        "answers", "channel", "done", "events", "form", "frame", "is_binary", "is_sent",
        "is_wanted", "number", "posts_before", "tries",
    )  # fmt: skip

    def __init__(
        self,
        form: SocketForm,
        number: int,
        frame: bytes,
        done: Done | None = None,
        *,
        is_binary: bool = False,
    ) -> None:
        self.form = form
        self.number = number
        self.frame = frame
        self.done = done
        self.is_binary = is_binary
        self.events = 0
        self.answers = 1
        self.channel: AnyChannel | None = None
        self.is_sent = False
        self.is_wanted = True
        self.posts_before = 0
        self.tries = 0

    def end(self, outcome: Outcome) -> None:
        """Ends a request that has an answer."""
        done, self.done = self.done, None
        if done is not None and self.is_wanted:
            if isinstance(outcome, PenstockError) and self.form.refusal is not None:
                outcome = self.form.refusal(outcome)
            done(outcome)


class SocketExchange:
    """`report` gets errors of publishes without an answer. `retry` is asked to call a function
    later, when the broker has refused to resume a channel and may accept it then."""

    def __init__(
        self,
        report: Callable[[PenstockError], None],
        retry: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._report = report
        self._retry = retry
        self._numbers = count(1)
        self._outgoing: deque[Outgoing] = deque()
        self._outgoing_bytes = 0
        self._sent: dict[int, Outgoing] = {}
        self._channels: dict[str, AnyChannel] = {}
        self._wanted: dict[AnyChannel, None] = {}
        self._is_connected = False
        self._posts_sent = 0
        self._posts_handled = 0
        self._posts_pinged = 0
        self.last_words = ""

    # -- requests ------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Threads may call this."""
        return next(self._numbers) % MAX_NUMBER

    def is_full(self) -> bool:
        return len(self._outgoing) >= MAX_OUTGOING or self._outgoing_bytes >= MAX_OUTGOING_BYTES

    def is_idle(self) -> bool:
        """Tells whether nothing waits to leave, and every publish without an answer is handled."""
        return not self._outgoing and self._posts_sent == self._posts_handled

    def put(self, item: Outgoing) -> None:
        self._outgoing.append(item)
        self._outgoing_bytes += len(item.frame)

    def message(self, form: SocketForm, body: bytes, done: Done) -> Outgoing:
        """Returns a request that is a text frame."""
        number = self.next_number()
        return Outgoing(form, number, encode_message(form, body, number), done)

    def leave(self, max_bytes: int) -> list[Outgoing]:
        """Returns the next requests to write, of about `max_bytes`; at least one, if there is."""
        leaving: list[Outgoing] = []
        while self._outgoing and max_bytes > 0:
            item = self._outgoing.popleft()
            self._outgoing_bytes -= len(item.frame)
            if not item.is_wanted:
                continue
            max_bytes -= len(item.frame)
            leaving.append(item)
            self._note_sent(item)
        return leaving

    def _note_sent(self, item: Outgoing) -> None:
        item.is_sent = True
        item.tries += 1
        if item.done is None:
            self._posts_sent += item.events
            if self._posts_sent - self._posts_pinged >= POSTS_PER_PING:
                self._posts_pinged = self._posts_sent
                self._first(self.message(PING, b"", _ignore))
            return
        item.posts_before = self._posts_sent
        self._sent[item.number] = item

    def _first(self, item: Outgoing) -> None:
        self._outgoing.appendleft(item)
        self._outgoing_bytes += len(item.frame)

    # -- channels ------------------------------------------------------------------------------

    def open_channel(self, channel: AnyChannel) -> None:
        """Opens a channel, now or on the next connection."""
        self._wanted[channel] = None
        if self._is_connected:
            self.put(self._opening(channel))

    def close_channel(self, channel: AnyChannel) -> None:
        self._wanted.pop(channel, None)
        channel.close()
        self._end_channel(channel)

    def _end_channel(self, channel: AnyChannel) -> None:
        if channel.id:
            del self._channels[channel.id]
            self.put(self.message(channel.end_request(), b"", _ignore))
            channel.id = ""

    def _opening(self, channel: AnyChannel) -> Outgoing:
        item = self.message(channel.request(), b"", partial(self._opened, channel))
        item.channel = channel
        return item

    def _opened(self, channel: AnyChannel, outcome: Outcome) -> None:
        if isinstance(outcome, bytes):
            head = decode_head(outcome)
            if not (head.subscription_id or head.watch_id):
                raise Internal(f"the broker opened a {channel.kind} without an id")
            channel.open(head, _version_of(outcome))
            self._channels[channel.id] = channel
            if channel.is_closed:
                self._end_channel(channel)
        elif channel in self._wanted:
            if outcome.retryable and channel.was_open:
                self._retry(_wait_s(outcome), partial(self._open_again, channel))
            else:
                del self._wanted[channel]
                channel.fail(outcome)

    def _open_again(self, channel: AnyChannel) -> None:
        # A new connection may have opened it meanwhile.
        is_opening = any(
            each.channel is channel for each in (*self._outgoing, *self._sent.values())
        )
        if self._is_connected and channel in self._wanted and not channel.id and not is_opening:
            self.put(self._opening(channel))

    # -- frames of the broker ------------------------------------------------------------------

    def receive_binary(self, frame: bytes) -> None:
        channel_id, payloads = decode_events(frame)
        channel = self._channels.get(channel_id)
        if isinstance(channel, SubscriptionChannel):
            channel.offer(payloads)

    def receive_text(self, frame: bytes) -> None:
        """Ignores frames of an unknown type, and those of channels that were closed."""
        head = decode_head(frame)
        if head.type == "cache_event":
            channel = self._channels.get(head.watch_id)
            if isinstance(channel, ChangesChannel):
                channel.offer(decode_cache_event(frame))
        elif isinstance(head.request_id, int):
            self._answer(head, frame)
        elif head.type == "error":
            self._receive_error(head)

    def _answer(self, head: AnswerHead, frame: bytes) -> None:
        is_error = head.type == "error"
        item = self._sent.get(head.request_id) if isinstance(head.request_id, int) else None
        if item is None:
            if is_error:
                self._report(error_from(0, head))
            return
        item.answers -= 1
        if is_error or item.answers <= 0:
            del self._sent[item.number]
            self._posts_handled = max(self._posts_handled, item.posts_before)
            item.end(error_from(0, head) if is_error else frame)

    def _receive_error(self, head: AnswerHead) -> None:
        channel = self._channels.pop(head.subscription_id or head.watch_id, None)
        error = error_from(0, head)
        if channel is None:
            # The broker says why it closes the connection.
            self.last_words = head.message
        elif channel.resumes and isinstance(error, Unavailable):
            # The broker is stopping, or cannot write: the next connection may serve it again.
            channel.id = ""
            self._retry(_wait_s(error), partial(self._open_again, channel))
        else:
            self._wanted.pop(channel, None)
            channel.fail(error)

    # -- connections ---------------------------------------------------------------------------

    def connected(self) -> None:
        """Opens all channels again, before any request that has waited."""
        self._is_connected = True
        self.last_words = ""
        for channel in reversed(self._wanted):
            self._first(self._opening(channel))

    def lost(self, reason: str) -> None:
        """Notes that the connection broke."""
        self._is_connected = False
        self._channels.clear()
        sent, self._sent = [item for item in self._sent.values() if item.channel is None], {}
        again = {item: None for item in sent if item.form.is_read and item.tries < MAX_TRIES}
        unsent = [item for item in self._outgoing if item.channel is None]
        self._outgoing = deque([*again, *unsent])
        self._outgoing_bytes = sum(len(item.frame) for item in self._outgoing)
        for item in sent:
            if item not in again:
                item.end(_broken(item.form, reason))
        self._lose_posts(reason)
        for channel in [*self._wanted]:
            channel.id = ""
            if channel.was_open and not channel.resumes:
                del self._wanted[channel]
                channel.fail(Unavailable(reason))

    def _lose_posts(self, reason: str) -> None:
        missing = self._posts_sent - self._posts_handled
        self._posts_sent = self._posts_handled = self._posts_pinged = 0
        if missing:
            text = f"{reason}; up to {missing} events published with ack none may be lost"
            self._report(OutcomeUnknown(text))

    def end(self, error: PenstockError) -> None:
        """Ends every request and every channel."""
        items = [*self._sent.values(), *self._outgoing]
        self._sent.clear()
        self._outgoing.clear()
        self._outgoing_bytes = 0
        for item in items:
            if item.channel is None:
                item.end(error)
        unsent = sum(item.events for item in items if not item.is_sent)
        if unsent:
            text = f"{error.message}; {unsent} events published with ack none were not sent"
            self._report(Unavailable(text))
        wanted, self._wanted = self._wanted, {}
        self._channels.clear()
        for channel in wanted:
            channel.fail(error)


def _broken(form: SocketForm, reason: str) -> PenstockError:
    if form.is_read:
        return Unavailable(f"{reason}; {form.type} was tried {MAX_TRIES} times")
    return OutcomeUnknown(f"{reason}; it is unknown whether the broker executed {form.type}")


class _Versioned(msgspec.Struct):
    version: int = 0


def _version_of(frame: bytes) -> int:
    try:
        return msgspec.json.decode(frame, type=_Versioned).version
    except (msgspec.DecodeError, ValueError) as error:
        raise Internal(f"cannot read an answer of the broker: {error}") from error


def _wait_s(error: PenstockError) -> float:
    return float(getattr(error, "retry_after_ms", 1000)) / 1000


def _ignore(_: Outcome) -> None: ...
