"""Producers that number their publishes to a stream: their next numbers and their last answers.

Invariant: `next` only rises, by one for each publish. The last answers of a producer are kept, so
that a repeat gets its answer again. A producer is forgotten some time after its last publish. The
time of later records decides, so a replay forgets the same producers. Must not know payloads.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.model.limits import MAX_PUBLISH_ANSWERS, PRODUCER_TTL_MS
from penstock.model.records import Published

StoredEvents = tuple[int, int, int]
"""The first offset of a publish, how many events it has, and the digest of their payloads."""


class Publisher:
    """`answers` has what was stored for the last numbers, oldest first."""

    __slots__ = ("answers", "last_ms", "next", "producer_id")

    def __init__(self, producer_id: str, next_sequence: int, last_ms: int) -> None:
        self.producer_id = producer_id
        self.next = next_sequence
        self.last_ms = last_ms
        self.answers: dict[int, StoredEvents] = {}


class Publishers:
    """The producers of one stream, in the order of their last publishes."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, Publisher] = {}

    def __iter__(self) -> Iterator[Publisher]:
        return iter(self._by_id.values())

    def find(self, producer_id: str, now_ms: int) -> Publisher | None:
        publisher = self._by_id.get(producer_id)
        return None if publisher is None or _is_over(publisher, now_ms) else publisher

    def has_room(self, limit: int, now_ms: int) -> bool:
        """Says whether another producer can be remembered: there is room, or one will be
        forgotten by then."""
        if len(self._by_id) < limit:
            return True
        return _is_over(next(iter(self._by_id.values())), now_ms)

    def remember(self, record: Published) -> None:
        self._forget(record.ts)
        publisher = self._by_id.pop(record.producer_id, None)
        if publisher is None:
            publisher = Publisher(record.producer_id, 0, record.ts)
        publisher.next = record.sequence + 1
        publisher.last_ms = record.ts
        answers = publisher.answers
        answers[record.sequence] = (record.offset, record.count, record.digest)
        if len(answers) > MAX_PUBLISH_ANSWERS:
            del answers[next(iter(answers))]
        self._by_id[record.producer_id] = publisher

    def restore(self, publisher: Publisher) -> None:
        self._by_id[publisher.producer_id] = publisher

    def _forget(self, now_ms: int) -> None:
        by_id = self._by_id
        while by_id:
            oldest = next(iter(by_id.values()))
            if not _is_over(oldest, now_ms):
                return
            del by_id[oldest.producer_id]


def _is_over(publisher: Publisher, now_ms: int) -> bool:
    return publisher.last_ms + PRODUCER_TTL_MS <= now_ms
