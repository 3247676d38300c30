"""Tails of streams: tell a listener of every message in order, over lost servers and connections.

Makes a new consumer whenever the present one ends, from the first message that its listener was
not told of. Nothing is told twice, and nothing is left out: what was purged before it was told ends
the tail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.cluster.jetstream.api import JetStreamApi
from penstock.cluster.jetstream.consumer import OrderedConsumer
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Bounds, BoundsOutcome, TailListener

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0

_log = logging.getLogger("penstock.cluster")


class StreamPlace(msgspec.Struct, frozen=True):
    """A stream that was found or made, and checked. `subject` and `identity` are others when
    somebody deletes the stream and makes it anew."""

    name: str
    subject: str
    identity: str


class RepeatedConsumer:
    """Keeps a consumer of a stream: another one when it ends. `start` says where it begins.
    `received` returns whether the message is of any use; one that is not makes no progress."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        stream: str,
        start: Callable[[], dict[str, object]],
        received: Callable[[int, NatsMessage], bool],
        skipped: Callable[[int], None],
    ) -> None:
        self._api = stream_api
        self._stream = stream
        self._start = start
        self._received = received
        self._skipped = skipped
        self._consumer: OrderedConsumer | None = None
        self._is_closed = False
        self._wait_s = FIRST_WAIT_S
        self._stop_listening = stream_api.connection.listen(self._connection_changed)
        self._timer = stream_api.connection.loop.call_soon(self.restart)

    def restart(self) -> None:
        """Begins again at `start`, at once."""
        self._end()
        if self._is_closed or not self._api.connection.is_connected:
            return  # The connection says when it is back.
        self._consumer = OrderedConsumer(
            self._api, self._stream, self._start(), self._take, self._skipped, self.retry
        )
        self._consumer.open()

    def close(self) -> None:
        self._is_closed = True
        self._stop_listening()
        self._end()

    def retry(self, reason: str) -> None:
        """Begins again at `start`, after a pause that grows while nothing is delivered."""
        _log.debug("a consumer of %s ended: %s", self._stream, reason)
        self._end()
        connection = self._api.connection
        if self._wait_s >= LONGEST_WAIT_S:
            text = f"cannot follow the stream {self._stream}: {reason}"
            connection.say(text, of=f"follow {self._stream}")
        self._timer = connection.loop.call_later(self._wait_s, self.restart)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _end(self) -> None:
        self._timer.cancel()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _take(self, seq: int, message: NatsMessage) -> None:
        if self._received(seq, message):
            self._wait_s = FIRST_WAIT_S

    def _connection_changed(self, is_connected: bool) -> None:
        if is_connected:
            self.restart()
        else:
            self._end()


class StreamTail:
    """Tells of message `seq` and all later ones. Tells nothing of a stream that somebody made anew
    under the same name, for that has another subject."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        place: StreamPlace,
        seq: int,
        listener: TailListener,
        bounds: Callable[[Callable[[BoundsOutcome], None]], None],
    ) -> None:
        self._api = stream_api
        self._place = place
        self._subject = place.subject.encode()
        self._next_seq = seq
        self._listener = listener
        self._bounds = bounds
        self._consumer: RepeatedConsumer | None = None
        self._is_closed = False
        self._is_asking = False

    def open(self) -> None:
        self._consumer = RepeatedConsumer(
            self._api, self._place.name, self._start, self._received, self._skipped
        )

    def close(self) -> None:
        self._is_closed = True
        if self._consumer is not None:
            self._consumer.close()

    def _start(self) -> dict[str, object]:
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": self._next_seq}

    def _received(self, seq: int, message: NatsMessage) -> bool:
        if message.subject != self._subject:
            self._leave_out("another stream has its name now")
            return False
        if seq < self._next_seq:
            return True
        if seq > self._next_seq:
            self._skipped(seq - 1)
            return False
        self._next_seq = seq + 1
        self._listener.received(seq, message.data)
        return True

    def _skipped(self, up_to_seq: int) -> None:
        """The consumer is past a message that was not told: it was purged, or the consumer is not
        to be trusted."""
        if up_to_seq >= self._next_seq and not self._is_asking:
            self._is_asking = True
            self._bounds(self._bounded)

    def _bounded(self, bounds: BoundsOutcome) -> None:
        self._is_asking = False
        if self._is_closed or self._consumer is None:
            return
        if (
            isinstance(bounds, Bounds)
            and bounds.identity == self._place.identity
            and bounds.first_seq > self._next_seq
        ):
            self.close()
            self._listener.purged(bounds.first_seq)
        else:
            self._leave_out("it left out messages that are still there")

    def _leave_out(self, reason: str) -> None:
        if self._consumer is not None:
            self._consumer.retry(reason)
