"""A shared stream that is a JetStream stream: appends by compare-and-set, look-ups at its leader.

An append says after which sequence it belongs; the leader refuses it anywhere else, so that
sending it again is harmless. Nothing here repeats an append. The subject has the stream's random id
in it: an append cannot land in a stream that somebody made anew under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import JetStreamApi, PublishAnswer, StreamInfo
from penstock.cluster.jetstream.connection import REQUEST_TIMEOUT_S
from penstock.cluster.jetstream.tail import StreamPlace, StreamTail
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import (
    AppendOutcome,
    Bounds,
    BoundsOutcome,
    Found,
    LookUpOutcome,
    Missing,
    Refused,
    Stored,
    Tail,
    TailListener,
    Unanswered,
)

ANOTHER = (
    "somebody deleted it and made another one under its name. Nothing is written to that one; "
    "restore the cluster's stream, or stop all brokers and give the cluster another name"
)
HEADER_BYTES = 256
"""Room in a payload for the headers of an append, and of JetStream's own."""

BYTES_PER_S = 2 * 1024 * 1024
"""The least that a slow network carries. A large message may take so much longer than a small one
before it counts as unanswered: otherwise it would be asked for again and again."""

_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")
_publish_answer = msgspec.json.Decoder(PublishAnswer)


class JetStreamStream:
    """One shard's log. `max_message_bytes` was checked against every server that could be asked;
    a server that takes less answers nothing."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        place: StreamPlace,
        max_message_bytes: int,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.place = place
        self._api = stream_api
        self._connection = stream_api.connection
        self._subject = place.subject.encode()
        self._timeout_s = timeout_s
        # An answer has the message in base64.
        self._longest_timeout_s = timeout_s + max_message_bytes * 4 / 3 / BYTES_PER_S
        self._look_up_timeout_s = timeout_s

    def append(self, seq: int, data: bytes, done: Callable[[AppendOutcome], None]) -> None:
        def answered(answer: NatsMessage | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            else:
                done(_append_outcome(answer, self.place.name, seq))

        self._connection.request(
            self._subject,
            data,
            answered,
            headers=b"Nats-Expected-Last-Sequence: %d\r\n" % (seq - 1),
            timeout_s=self._timeout_s + len(data) / BYTES_PER_S,
        )

    def look_up(self, seq: int, done: Callable[[LookUpOutcome], None]) -> None:
        def answered(answer: api.MessageAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                # Nobody knows how large the message is until it is there.
                longer_s = 2 * self._look_up_timeout_s
                self._look_up_timeout_s = min(longer_s, self._longest_timeout_s)
                done(answer)
                return
            self._look_up_timeout_s = self._timeout_s
            if answer.message is not None:
                is_ours = answer.message.subject == self.place.subject
                done(Found(answer.message.data) if is_ours else self._unanswered(ANOTHER))
            elif answer.error is not None and answer.error.err_code == api.MESSAGE_NOT_FOUND:
                self._explain_missing(seq, done)
            else:
                done(self._unanswered(str(answer.error)))

        # Not a "direct get", which any replica answers from what it has.
        name = f"STREAM.MSG.GET.{self.place.name}"
        self._api.call(api.MessageAnswer, name, {"seq": seq}, answered, self._look_up_timeout_s)

    def bounds(self, done: Callable[[BoundsOutcome], None]) -> None:
        def answered(answer: StreamInfo | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif answer.error is not None:
                done(self._unanswered(str(answer.error)))
            else:
                done(answer.bounds())

        name = f"STREAM.INFO.{self.place.name}"
        self._api.call(StreamInfo, name, None, answered, self._timeout_s)

    def follow(self, seq: int, listener: TailListener) -> Tail:
        tail = StreamTail(self._api, self.place, seq, listener, self.bounds)
        tail.open()
        return tail

    def purge(self, up_to_seq: int, done: Callable[[Unanswered | None], None]) -> None:
        def purged(answer: api.PurgeAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif not answer.success:
                done(Unanswered(str(answer.error)))
            else:
                done(None)

        def bounded(bounds: BoundsOutcome) -> None:
            if isinstance(bounds, Unanswered):
                done(bounds)
                return
            if bounds.identity != self.place.identity:
                done(self._unanswered(ANOTHER))
                return
            # A purge past its end would make a stream count on from there.
            seq = min(up_to_seq, bounds.last_seq) + 1
            if seq <= bounds.first_seq:
                done(None)
                return
            name = f"STREAM.PURGE.{self.place.name}"
            self._api.call(api.PurgeAnswer, name, {"seq": seq}, purged, self._timeout_s)

        self.bounds(bounded)

    def _explain_missing(self, seq: int, done: Callable[[LookUpOutcome], None]) -> None:
        def bounded(bounds: BoundsOutcome) -> None:
            if isinstance(bounds, Bounds) and bounds.identity != self.place.identity:
                done(self._unanswered(ANOTHER))
            elif isinstance(bounds, Bounds) and bounds.first_seq <= seq <= bounds.last_seq:
                # It came meanwhile: the caller asks again.
                done(Unanswered("the message arrived while it was looked up"))
            elif isinstance(bounds, Bounds):
                done(Missing(bounds.first_seq, bounds.last_seq))
            else:
                done(bounds)

        self.bounds(bounded)

    def _unanswered(self, reason: str) -> Unanswered:
        """Says in the log what is wrong with the stream, once a connection."""
        text = f"the stream {self.place.name} cannot be read: {reason}"
        self._connection.say(text, of=text)
        return Unanswered(reason)


def _append_outcome(message: NatsMessage, stream: str, seq: int) -> AppendOutcome:
    try:
        answer = _publish_answer.decode(message.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unanswered(f"JetStream's answer cannot be read: {error}")
    if answer.error is None:
        if answer.seq == seq and answer.stream == stream:
            return Stored()
        return Unanswered(f"stored as message {answer.seq} of {answer.stream}, not as {seq}")
    if answer.error.err_code == api.WRONG_LAST_SEQUENCE:
        found = _LAST_SEQUENCE.search(answer.error.description)
        if found is not None:
            return Refused(int(found.group(1)))
    return Unanswered(str(answer.error))
