"""Requests, answers and channels of one logical WebSocket, which outlives its connections. No IO.

Invariants: requests leave in the order in which they were put. A request that has not left when the
connection breaks leaves on the next one; one that has left is sent again only if it changes
nothing or is idempotent, and otherwise ends with OutcomeUnknown. A message that names a channel by
its id never reaches another connection, where the id may mean another channel. Every request ends
once. Must not know asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from penstock.client.calls import SocketForm, error_from
from penstock.client.socket_channels import AnyChannel, ChangesChannel, SubscriptionChannel
from penstock.client.socket_event_channels import NamedEventsChannel, StartedChannel
from penstock.client.socket_frames import (
    MAX_NUMBER,
    AnswerHead,
    decode_cache_event,
    decode_events,
    decode_head,
    decode_named_event,
    encode_message,
)
from penstock.model.errors import Internal, NotFound, OutcomeUnknown, PenstockError, Unavailable
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
    `channel` is the one that it opens. `settles` is the one whose event it acks, nacks or extends,
    under the `settled_id` that the channel had when the frame was made.
    """

    __slots__ = (
        "answers", "channel", "done", "events", "form", "frame", "is_binary", "is_sent",
        "is_wanted", "number", "posts_before", "settled_id", "settles", "tries",
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
        self.settles: AnyChannel | None = None
        self.settled_id = ""
        self.is_sent = False
        self.is_wanted = True
        self.posts_before = 0
        self.tries = 0

    def can_repeat(self) -> bool:
        """Tells whether it may be sent again when its outcome is unknown."""
        form = self.form
        if not self.is_wanted:
            return False
        return form.is_idempotent or (form.is_read and self.tries < MAX_TRIES)

    def is_of_connection(self) -> bool:
        """Tells whether it means nothing, or something else, on another connection."""
        members = self.form.members
        return self.channel is not None or "subscription_id" in members or "watch_id" in members

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
        self._settling: dict[AnyChannel, list[Outgoing]] = {}
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
        if item.settles is not None and not self._address(item, item.settles):
            return
        self._outgoing.append(item)
        self._outgoing_bytes += len(item.frame)

    def message(self, form: SocketForm, body: bytes, done: Done) -> Outgoing:
        """Returns a request that is a text frame."""
        number = self.next_number()
        return Outgoing(form, number, encode_message(form, body, number), done)

    def settle(self, channel: AnyChannel, form: SocketForm) -> Outgoing:
        """Returns a request that acks, nacks or extends an event of the channel."""
        item = Outgoing(form, self.next_number(), b"")
        item.settles = channel
        return item

    def _address(self, item: Outgoing, channel: AnyChannel) -> bool:
        """Makes the frame, which has the channel's id. Until the channel is open again, the item
        waits; its caller gives it up after a while."""
        if not channel.id:
            waiting = [each for each in self._settling.get(channel, ()) if each.is_wanted]
            self._settling[channel] = [*waiting, item]
            return False
        item.settled_id = channel.id
        form = SocketForm(item.form.type, item.form.members | {"subscription_id": channel.id})
        item.frame = encode_message(form, b"", item.number)
        return True

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

    def is_wanted(self, channel: AnyChannel) -> bool:
        """Tells whether the channel is open, or will be on the next connection."""
        return channel in self._wanted

    def close_channel(self, channel: AnyChannel) -> None:
        self._forget(channel, Unavailable("the subscription was closed"))
        channel.close()
        self._end_channel(channel)

    def taken(self, channel: AnyChannel) -> None:
        """Lets the broker go on with a channel whose reader has taken what was there."""
        if channel.must_reopen:
            channel.must_reopen = False
            self._end_channel(channel)
            self._open_again(channel)
        elif channel.is_paused and channel.id:
            channel.is_paused = False
            self.put(self._flow("resume", channel))

    def _flow(self, kind: str, channel: AnyChannel) -> Outgoing:
        form = SocketForm(kind, {"subscription_id": channel.id}, is_read=True)
        return self.message(form, b"", _ignore)

    def _check_mark(self, channel: AnyChannel) -> None:
        if channel.is_above_mark() and not channel.is_paused:
            channel.is_paused = True
            self.put(self._flow("pause", channel))

    def _forget(self, channel: AnyChannel, error: PenstockError) -> None:
        """Ends the requests that wait for a channel which will not be open again."""
        self._wanted.pop(channel, None)
        for item in self._settling.pop(channel, ()):
            item.end(_not_settled(item, error))

    def _fail(self, channel: AnyChannel, error: PenstockError) -> None:
        self._forget(channel, error)
        channel.fail(error)

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
            for item in self._settling.pop(channel, ()):
                self.put(item)
        elif channel in self._wanted:
            if outcome.retryable and channel.was_open:
                self._retry(_wait_s(outcome), partial(self._open_again, channel))
            else:
                self._fail(channel, outcome)

    def _open_again(self, channel: AnyChannel) -> None:
        # A new connection may have opened it meanwhile.
        is_opening = any(
            each.channel is channel for each in (*self._outgoing, *self._sent.values())
        )
        if self._is_connected and channel in self._wanted and not channel.id and not is_opening:
            self.put(self._opening(channel))

    # -- frames of the broker ------------------------------------------------------------------

    def receive_binary(self, frame: bytes) -> None:
        channel_id, offset, payloads = decode_events(frame)
        channel = self._channels.get(channel_id)
        if isinstance(channel, SubscriptionChannel | StartedChannel):
            channel.offer(offset, payloads)
            self._check_mark(channel)

    def receive_text(self, frame: bytes) -> None:
        """Ignores frames of an unknown type, and those of channels that were closed."""
        head = decode_head(frame)
        if head.type == "cache_event":
            channel = self._channels.get(head.watch_id)
            if isinstance(channel, ChangesChannel):
                channel.offer(decode_cache_event(frame))
        elif head.type == "event":
            channel = self._channels.get(head.subscription_id)
            if isinstance(channel, NamedEventsChannel):
                channel.offer(decode_named_event(frame))
                self._check_mark(channel)
        elif isinstance(head.request_id, int):
            self._answer(head, frame)
        elif head.type in _ERRORS:
            self._receive_error(head)

    def _answer(self, head: AnswerHead, frame: bytes) -> None:
        is_error = head.type in _ERRORS
        item = self._sent.get(head.request_id) if isinstance(head.request_id, int) else None
        if item is None:
            if is_error:
                self._report(error_from(head.code, head))
            return
        item.answers -= 1
        if is_error or item.answers <= 0:
            del self._sent[item.number]
            self._posts_handled = max(self._posts_handled, item.posts_before)
            outcome = error_from(head.code, head) if is_error else frame
            if not self._settle_again(item, outcome):
                item.end(outcome)

    def _settle_again(self, item: Outgoing, outcome: Outcome) -> bool:
        """Sends an ack again if the broker had ended its channel meanwhile, and the channel goes
        on: this ack was not executed."""
        channel = item.settles
        if channel is None or not isinstance(outcome, NotFound) or not item.is_wanted:
            return False
        if channel.id == item.settled_id or channel not in self._wanted:
            return False
        self.put(item)
        return True

    def _receive_error(self, head: AnswerHead) -> None:
        channel = self._channels.pop(head.subscription_id or head.watch_id, None)
        error = error_from(head.code, head)
        if channel is None:
            # The broker says why it closes the connection.
            self.last_words = head.message
        elif channel.resumes and isinstance(error, Unavailable):
            # The broker is stopping, or cannot write: the next connection may serve it again.
            channel.id = ""
            self._retry(_wait_s(error), partial(self._open_again, channel))
        else:
            self._fail(channel, error)

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
        sent, self._sent = self._sent, {}
        for channel in self._wanted:
            # Before anything is put again: acks then wait for the next id.
            channel.id = ""
        again = [item for item in sent.values() if item.can_repeat()]
        items = [*again, *self._outgoing]
        self._outgoing = deque()
        self._outgoing_bytes = 0
        for item in items:
            if not item.is_of_connection():
                self.put(item)
        for item in sent.values():
            if not item.can_repeat():
                item.end(_broken(item.form, reason))
        for item in items:
            if item.channel is None and item.is_of_connection():
                item.end(Unavailable(reason))
        self._lose_posts(reason)
        for channel in [*self._wanted]:
            if channel.was_open and not channel.resumes:
                self._fail(channel, Unavailable(reason))

    def _lose_posts(self, reason: str) -> None:
        missing = self._posts_sent - self._posts_handled
        self._posts_sent = self._posts_handled = self._posts_pinged = 0
        if missing:
            text = f"{reason}; up to {missing} events published with ack none may be lost"
            self._report(OutcomeUnknown(text))

    def end(self, error: PenstockError) -> None:
        """Ends every request and every channel."""
        waiting = [item for items in self._settling.values() for item in items]
        items = [*self._sent.values(), *self._outgoing, *waiting]
        self._settling.clear()
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


def _not_settled(item: Outgoing, error: PenstockError) -> PenstockError:
    if item.is_sent:
        return _broken(item.form, error.message)
    return error


def _broken(form: SocketForm, reason: str) -> PenstockError:
    if form.is_read:
        return Unavailable(f"{reason}; {form.type} was tried {MAX_TRIES} times")
    return OutcomeUnknown(f"{reason}; it is unknown whether the broker executed {form.type}")


_ERRORS = frozenset({"error", "subscribe_cursor_error"})


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
