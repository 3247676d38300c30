"""A store of keys that is a JetStream key-value bucket: leases, and what all brokers know.

A bucket is a stream that keeps the last message of each subject, so that tools for buckets can read
it. Reads go to the stream's leader. Written without a client library's own notion of a bucket,
because that reads from any replica.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import JetStreamApi, MessageAnswer, PublishAnswer
from penstock.cluster.jetstream.connection import REQUEST_TIMEOUT_S
from penstock.cluster.jetstream.tail import RepeatedConsumer
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Conflict, StoredKey, Tail, Unanswered

REMOVED = (b"KV-Operation: DEL", b"KV-Operation: PURGE")
"""Headers of a message that says that a key has no value. Tools write them, Penstock does not."""

_PLAIN = re.compile(rb"[A-Za-z0-9_/-]")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")
_WRONG_LAST = re.compile(r"wrong last sequence: (\d+)")
_publish_answer = msgspec.json.Decoder(PublishAnswer)

PutOutcome = int | Conflict | Unanswered


class JetStreamKeys:
    """The keys of one bucket. A key may be any text: what a subject cannot hold is escaped."""

    def __init__(
        self, stream_api: JetStreamApi, bucket: str, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self._api = stream_api
        self._connection = stream_api.connection
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._timeout_s = timeout_s

    def get(self, key: str, done: Callable[[StoredKey | Unanswered | None], None]) -> None:
        def answered(found: StoredKey | int | Unanswered) -> None:
            done(None if isinstance(found, int) else found)

        self._read(key, answered)

    def put(
        self, key: str, value: bytes, revision: int, done: Callable[[PutOutcome], None]
    ) -> None:
        def answered(outcome: PutOutcome) -> None:
            if isinstance(outcome, Conflict) and revision == 0:
                self._read(key, unset)
            else:
                done(outcome)

        def unset(found: StoredKey | int | Unanswered) -> None:
            """A key without a value may have had one: then the message about that comes first."""
            if isinstance(found, int) and found:
                self._write(key, value, found, done)
            else:
                done(found if isinstance(found, Unanswered) else Conflict())

        self._write(key, value, revision, answered)

    def watch(self, prefix: str, changed: Callable[[str, StoredKey | None], None]) -> Tail:
        return KeyWatch(self._api, self._stream, self._prefix, prefix, changed)

    # -- inside -------------------------------------------------------------------------------

    def _read(self, key: str, done: Callable[[StoredKey | int | Unanswered], None]) -> None:
        """Gives the entry, or the revision at which the key lost its value (0: it never had)."""

        def answered(answer: MessageAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif answer.message is not None:
                seq = answer.message.seq
                is_removed = any(each in answer.message.hdrs for each in REMOVED)
                done(seq if is_removed else StoredKey(answer.message.data, seq))
            elif answer.error is not None and answer.error.err_code == api.MESSAGE_NOT_FOUND:
                done(0)
            else:
                done(Unanswered(str(answer.error)))

        body = {"last_by_subj": self._prefix + escape_key(key)}
        name = f"STREAM.MSG.GET.{self._stream}"
        self._api.call(MessageAnswer, name, body, answered, self._timeout_s)

    def _write(
        self, key: str, value: bytes, revision: int, done: Callable[[PutOutcome], None]
    ) -> None:
        def answered(answer: NatsMessage | Unanswered) -> None:
            done(answer if isinstance(answer, Unanswered) else _put_outcome(answer))

        self._connection.request(
            (self._prefix + escape_key(key)).encode(),
            value,
            answered,
            headers=b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % revision,
            timeout_s=self._timeout_s,
        )


class KeyWatch:
    """Tells of the keys that begin with `prefix`. Reads the last value of every key each time that
    it begins again, and tells of those that are newer than what was told."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        stream: str,
        subjects: str,
        prefix: str,
        changed: Callable[[str, StoredKey | None], None],
    ) -> None:
        self._subjects = subjects
        self._key_prefix = prefix
        self._changed = changed
        self._told: dict[str, int] = {}
        self._consumer = RepeatedConsumer(
            stream_api, stream, self._start, self._received, lambda up_to_seq: None
        )

    def close(self) -> None:
        self._consumer.close()

    def _start(self) -> dict[str, object]:
        return {"deliver_policy": "last_per_subject", "filter_subject": self._subjects + ">"}

    def _received(self, seq: int, message: NatsMessage) -> bool:
        key = unescape_key(message.subject.decode("utf-8", "replace")[len(self._subjects) :])
        # A consumer may be on a replica that lags behind the one before it.
        if not key.startswith(self._key_prefix) or seq <= self._told.get(key, 0):
            return True
        self._told[key] = seq
        is_removed = any(each in message.headers for each in REMOVED)
        self._changed(key, None if is_removed else StoredKey(message.data, seq))
        return True


def escape_key(key: str) -> str:
    """Writes a key with the characters that a bucket allows. Dots stay where they are between
    other characters, so that tools show the keys as they are."""
    data = key.encode()
    out = bytearray()
    for at in range(len(data)):
        byte = data[at : at + 1]
        is_inner_dot = byte == b"." and 0 < at < len(data) - 1 and data[at - 1 : at] != b"."
        out += byte if _PLAIN.match(byte) or is_inner_dot else b"=%02X" % byte[0]
    return out.decode()


def unescape_key(text: str) -> str:
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), text.encode()).decode(
        "utf-8", "replace"
    )


def _put_outcome(message: NatsMessage) -> PutOutcome:
    try:
        answer = _publish_answer.decode(message.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unanswered(f"JetStream's answer cannot be read: {error}")
    if answer.error is None:
        return answer.seq
    is_wrong = answer.error.err_code == api.WRONG_LAST_SEQUENCE
    if is_wrong and _WRONG_LAST.search(answer.error.description) is not None:
        return Conflict()
    return Unanswered(str(answer.error))
