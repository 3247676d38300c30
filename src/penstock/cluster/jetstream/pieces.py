"""Staged pieces in a JetStream stream of their own, with a subject for each part.

A subject keeps its last message, so that putting a part again is harmless. Reads go to the stream's
leader, never to a replica. A leader that was cut off might still answer from what it knew; so the
list of parts is preceded by a message that a quorum has to store, and a list that lacks it is none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import (
    JetStreamApi,
    MessageAnswer,
    PublishAnswer,
    PurgeAnswer,
)
from penstock.cluster.jetstream.connection import REQUEST_TIMEOUT_S
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import (
    Found,
    Full,
    PartOutcome,
    PartsOutcome,
    PutOutcome,
    Stored,
    Unanswered,
)

MARK = "mark"
"""The subject of the message before a list."""
LIST_TIMEOUT_S = 10.0

_publish_answer = msgspec.json.Decoder(PublishAnswer)


class JetStreamPieces:
    """`prefix` is the beginning of all subjects, with a dot at its end."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        stream: str,
        prefix: str,
        max_message_bytes: int,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._api = stream_api
        self._stream = stream
        self._prefix = prefix
        self._timeout_s = timeout_s

    def put(self, number: int, part: int, data: bytes, done: Callable[[PutOutcome], None]) -> None:
        def answered(answer: PublishAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif answer.error is None:
                done(Stored())
            elif _is_full(answer.error):
                done(Full())
            else:
                done(Unanswered(str(answer.error)))

        self._publish(f"{number}.{part}", data, answered)

    def get(self, number: int, part: int, done: Callable[[PartOutcome], None]) -> None:
        def answered(answer: MessageAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif answer.message is not None:
                done(Found(answer.message.data))
            elif answer.error is not None and answer.error.err_code == api.MESSAGE_NOT_FOUND:
                done(None)
            else:
                done(Unanswered(str(answer.error)))

        body = {"last_by_subj": f"{self._prefix}{number}.{part}"}
        name = f"STREAM.MSG.GET.{self._stream}"
        self._api.call(MessageAnswer, name, body, answered, self._timeout_s)

    def parts(self, done: Callable[[PartsOutcome], None]) -> None:
        def marked(answer: PublishAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            elif answer.error is not None and not _is_full(answer.error):
                done(Unanswered(str(answer.error)))
            else:
                # A full stream takes no mark. Its leader refuses what it cannot store only while it
                # has a quorum to store with, as far as it knows.
                _Pages(self._api, self._stream, self._prefix, answer.seq, done).read()

        self._publish(MARK, b"", marked)

    def remove(self, number: int, done: Callable[[Unanswered | None], None]) -> None:
        def purged(answer: PurgeAnswer | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                done(answer)
            else:
                done(None if answer.success else Unanswered(str(answer.error)))

        body = {"filter": f"{self._prefix}{number}.*"}
        name = f"STREAM.PURGE.{self._stream}"
        self._api.call(PurgeAnswer, name, body, purged, self._timeout_s)

    def _publish(
        self, key: str, data: bytes, done: Callable[[PublishAnswer | Unanswered], None]
    ) -> None:
        def answered(message: NatsMessage | Unanswered) -> None:
            if isinstance(message, Unanswered):
                done(message)
                return
            try:
                answer = _publish_answer.decode(message.data)
            except msgspec.DecodeError as error:
                done(Unanswered(f"JetStream's answer cannot be read: {error}"))
            else:
                done(answer)

        subject = (self._prefix + key).encode()
        self._api.connection.request(subject, data, answered, timeout_s=self._timeout_s)


class _Pages:
    """Reads the list of subjects page by page, from a leader that has message `seq`."""

    def __init__(
        self,
        stream_api: JetStreamApi,
        stream: str,
        prefix: str,
        seq: int,
        done: Callable[[PartsOutcome], None],
    ) -> None:
        self._api = stream_api
        self._name = f"STREAM.INFO.{stream}"
        self._prefix = prefix
        self._seq = seq
        self._done = done
        self._subjects: set[str] = set()
        self._offset = 0
        self._first: tuple[int, int, int] | None = None
        """The state of the stream that the first page told."""

    def read(self) -> None:
        body = {"subjects_filter": f"{self._prefix}*.*", "offset": self._offset}
        self._api.call(SubjectsAnswer, self._name, body, self._got, LIST_TIMEOUT_S)

    def _got(self, answer: SubjectsAnswer | Unanswered) -> None:
        if isinstance(answer, Unanswered):
            self._done(answer)
        elif answer.error is not None:
            self._done(Unanswered(str(answer.error)))
        elif answer.state.last_seq < self._seq:
            self._done(Unanswered("a server answered that does not know the newest messages"))
        else:
            self._add(answer.state, answer.total)

    def _add(self, state: SubjectsState, total: int) -> None:
        now = state.last_seq, state.messages, total
        self._first = self._first or now
        if now != self._first:
            self._done(Unanswered("the list changed while it was read"))
            return
        page = state.subjects or {}
        self._subjects.update(page)
        self._offset += len(page)
        if page and self._offset < total:
            self.read()
        else:
            self._done(self._parts())

    def _parts(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for subject in self._subjects:
            number, _, part = subject[len(self._prefix) :].partition(".")
            if number.isdecimal() and part.isdecimal():
                found.setdefault(int(number), set()).add(int(part))
        return found


class SubjectsState(api.StreamState, frozen=True):
    subjects: dict[str, int] | None = None


class SubjectsAnswer(api.ApiAnswer, frozen=True):
    """`total` is the number of subjects on all pages."""

    total: int = 0
    state: SubjectsState = SubjectsState()


def _is_full(error: api.ApiError) -> bool:
    return "maximum bytes exceeded" in error.description or error.err_code in (
        api.STORAGE_EXCEEDED,
        api.INSUFFICIENT_RESOURCES,
    )
