"""An ordered, ephemeral push consumer: what a stream delivers, for as long as it delivers in order.

Its owner is told `lost` when a delivery is missing, when the server is silent, and when the
connection breaks; it then makes another one. A consumer lives in one server's memory and ends with
it. JetStream removes it when nobody listens to its inbox.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import JetStreamApi
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Unanswered

HEARTBEAT_S = 0.5
SILENT_TICKS = 5
"""A consumer that says nothing in so many heartbeats is gone: 2.5 s. They are counted, so that a
broker that was paused hears what has arrived before it counts on."""
CREATE_TIMEOUT_S = 2.0


class OrderedConsumer:
    """`received` gets each message with its stream's sequence. `skipped` is told that the stream's
    messages up to a sequence are not coming, `lost` that the consumer is at its end."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        stream: str,
        start: dict[str, object],
        received: Callable[[int, NatsMessage], None],
        skipped: Callable[[int], None],
        lost: Callable[[str], None],
    ) -> None:
        self._api = stream_api
        self._stream = stream
        self._start = start
        self._received = received
        self._skipped = skipped
        self._lost = lost
        self._name = "penstock-" + secrets.token_hex(8)
        self._delivered = 0
        self._silent_ticks = 0
        self._is_over = False
        self._stop_listening: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        connection = stream_api.connection
        self._subscription = connection.subscribe(connection.new_inbox(), self._take)

    def open(self) -> None:
        connection = self._api.connection
        self._stop_listening = connection.listen(self._connection_changed)
        config = {
            "name": self._name,
            "deliver_subject": self._subscription.subject.decode(),
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
            "num_replicas": 1,
            "mem_storage": True,
        } | self._start
        place = f"{self._stream}.{self._name}"
        if "filter_subject" in self._start:
            place += f".{self._start['filter_subject']}"
        self._api.call(
            api.ConsumerAnswer,
            f"CONSUMER.CREATE.{place}",
            {"stream_name": self._stream, "config": config, "action": "create"},
            self._created,
            CREATE_TIMEOUT_S,
        )
        self._wait()

    def close(self) -> None:
        """Its owner is told nothing more."""
        if self._is_over:
            return
        self._is_over = True
        self._subscription.close()
        if self._stop_listening is not None:
            self._stop_listening()
        if self._timer is not None:
            self._timer.cancel()
        # Without interest in its inbox JetStream removes it as well, some seconds later.
        name = f"{api.PREFIX}CONSUMER.DELETE.{self._stream}.{self._name}"
        self._api.connection.publish(name.encode(), b"")

    # -- inside -------------------------------------------------------------------------------

    def _created(self, answer: api.ConsumerAnswer | Unanswered) -> None:
        if self._is_over:
            return
        if isinstance(answer, Unanswered):
            self._end(answer.reason)
        elif answer.error is not None:
            self._end(str(answer.error))

    def _take(self, message: NatsMessage) -> None:
        self._silent_ticks = 0
        if message.is_control:
            self._take_control(message)
            return
        sequences = _sequences(message.reply)
        if sequences is None:
            return  # Somebody else's: nothing that JetStream delivers.
        stream_seq, consumer_seq = sequences
        if consumer_seq != self._delivered + 1:
            self._end(f"delivery {self._delivered + 1} is missing")
            return
        self._delivered = consumer_seq
        self._received(stream_seq, message)

    def _take_control(self, message: NatsMessage) -> None:
        # A question of flow control is answered once all before it is handled, which is now.
        waiting = message.reply or message.header(b"Nats-Consumer-Stalled")
        if waiting:
            self._api.connection.publish(waiting, b"")
        delivered = message.header(b"Nats-Last-Consumer")
        up_to = message.header(b"Nats-Last-Stream")
        if delivered is None or up_to is None:
            return
        if not (delivered.isdigit() and up_to.isdigit()):
            self._end("its heartbeat cannot be read")
        elif int(delivered) != self._delivered:
            self._end(f"deliveries {self._delivered + 1} to {int(delivered)} are missing")
        else:
            self._skipped(int(up_to))

    def _connection_changed(self, is_connected: bool) -> None:
        self._end("the connection to NATS was lost" if not is_connected else "connected again")

    def _wait(self) -> None:
        connection = self._api.connection
        self._timer = connection.loop.call_later(HEARTBEAT_S, self._tick)

    def _tick(self) -> None:
        # A large message may take longer to arrive than a heartbeat.
        self._silent_ticks += not self._api.connection.is_receiving
        if self._silent_ticks >= SILENT_TICKS:
            self._end("it is silent")
        else:
            self._wait()

    def _end(self, reason: str) -> None:
        if not self._is_over:
            self.close()
            self._lost(reason)


def _sequences(reply: bytes) -> tuple[int, int] | None:
    """Reads the stream's and the consumer's sequence of a delivery. The older form of the subject
    has nine parts; the newer one has the domain and the account before the stream."""
    parts = reply.split(b".")
    if parts[:2] != [b"$JS", b"ACK"]:
        return None
    at = 5 if len(parts) == 9 else 7
    try:
        return int(parts[at]), int(parts[at + 1])
    except (IndexError, ValueError):
        return None
