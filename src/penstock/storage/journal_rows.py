"""Converts records of the log to rows of the journal: the schema, and the event of each record.

Invariant: rows come in the order of the log. A row's position is its record's position plus its
place among the record's rows, so positions are unique and rise. A record is noted before it is
applied, so that attempt and owner are those of the delivery that it ends. The envelope's ids and
the time a message was stored are joined in later (message_lookup.py), because most records do not
have them. Must not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.groups import IN_FLIGHT, Group, Unfinished
from penstock.core.settle import LAPSED
from penstock.core.state import BrokerState
from penstock.model import journal
from penstock.model.envelope import DeadLetter
from penstock.model.records import (
    ACKED,
    DEAD,
    DEAD_LETTERED,
    Delivered,
    Finished,
    Message,
    Released,
    Returned,
    Skipped,
    Stored,
    StoredEvent,
)
from penstock.model.scopes import DEFAULT_SCOPE, is_stream_log, plain_name, split_name
from penstock.storage.history import PartitionKey
from penstock.storage.message_lookup import ID_COLUMNS, MessageLookup

_TEXT = pa.string()
_INT = pa.int64()
_TIME = pa.timestamp("us", "UTC")

JOURNAL_SCHEMA = pa.schema(
    [
        ("position", _INT),
        ("timestamp", _TIME),
        ("kind", _TEXT),
        ("topic", _TEXT),
        ("partition", pa.int32()),
        ("offset", _INT),
        ("group", _TEXT),
        ("owner", _TEXT),
        ("attempt", pa.int32()),
        ("reason", _TEXT),
        *((name, _TEXT) for name in ID_COLUMNS),
        ("retry_at", _TIME),
        ("produced_at", _TIME),
        ("delivered_at", _TIME),
        ("tenant", _TEXT),
        ("namespace", _TEXT),
        ("resource_kind", _TEXT),
    ]
)
"""Columns are only ever added at the end. In the default namespace, tenant and namespace are null:
nearly all rows of most brokers are there, and so are those of files without these columns. A topic
and a durable stream may have the same name: only `resource_kind` tells their rows apart."""

_PRODUCED, _DELIVERED, _ACKED = journal.PRODUCED, journal.DELIVERED, journal.ACKED
_WITH_REASON = frozenset({journal.NACKED, journal.TIMED_OUT, journal.DEAD_LETTERED})


RecordHandlers = dict[type[Any], Callable[[int, Any], None]]
"""The function that notes a record of each type. It is given the position and the record."""


class _Context(NamedTuple):
    """Values that many rows have in common. They are kept once, and rows refer to them."""

    kind: str
    resource_kind: str
    topic: str
    scope: tuple[str, str] | tuple[None, None]
    place: PartitionKey
    group: str | None


class JournalRows:
    """Collects rows until `take` returns them as a batch.

    Every row has a position, a time, a context and an offset. Rows of a group also have an owner,
    an attempt and the time of the delivery. Rows of a failure also have a reason and the time of
    the retry. `notes` has the function for each record type that is an event of a message; call it
    before the record is applied.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.notes: RecordHandlers = {
            Message: self._produced,
            StoredEvent: self._produced,
            Delivered: self._delivered,
            Returned: self._returned,
            Finished: self._finished,
            Skipped: self._skipped,
            Released: self._released,
        }
        # Dead-lettering writes the record of the copy, then that of the original's end. Only the
        # copy has the reason.
        self._letter: DeadLetter | None = None
        self._begin()

    def _begin(self) -> None:
        # Flat lists: one call that adds several values costs less than several calls.
        self._events: list[int] = []
        self._holders: list[Any] = []
        self._failures: list[Any] = []
        self._add = self._events.extend
        self._add_holder = self._holders.extend
        self._contexts: list[_Context] = []
        self._known: dict[tuple[int, int, str], int] = {}

    def __len__(self) -> int:
        return len(self._events) // 4

    def take(self, lookup: MessageLookup) -> pa.RecordBatch:
        """Returns all rows since the last call as a batch."""
        positions, times, context_of, offsets = (
            pa.array(self._events[n::4], _INT) for n in range(4)
        )
        of_group = _per_row(context_of, [c.group is not None for c in self._contexts], pa.bool_())
        of_failure = _per_row(
            context_of, [c.kind in _WITH_REASON for c in self._contexts], pa.bool_()
        )
        places = [context.place for context in self._contexts]
        delivered_from = {context.place for context in self._contexts if context.group is not None}
        timestamps = _as_time(times)
        of_message = lookup.columns(places, context_of, offsets, delivered_from)
        columns = {
            "position": positions,
            "timestamp": timestamps,
            "kind": _per_row(context_of, [c.kind for c in self._contexts], _TEXT),
            "topic": _per_row(context_of, [c.topic for c in self._contexts], _TEXT),
            "tenant": _per_row(context_of, [c.scope[0] for c in self._contexts], _TEXT),
            "namespace": _per_row(context_of, [c.scope[1] for c in self._contexts], _TEXT),
            "resource_kind": _per_row(context_of, [c.resource_kind for c in self._contexts], _TEXT),
            "partition": _per_row(context_of, [place[1] for place in places], pa.int32()),
            "offset": offsets,
            "group": _per_row(context_of, [c.group for c in self._contexts], _TEXT),
            "owner": _spread(pa.array(self._holders[0::3], _TEXT), of_group),
            "attempt": _spread(pa.array(self._holders[1::3], pa.int32()), of_group),
            "delivered_at": _spread(_as_time(pa.array(self._holders[2::3], _INT)), of_group),
            "reason": _spread(pa.array(self._failures[0::2], _TEXT), of_failure),
            "retry_at": _spread(_as_time(pa.array(self._failures[1::2], _INT)), of_failure),
            **of_message,
            # A row without a group is the event of storing the message.
            "produced_at": pc.if_else(of_group, of_message["produced_at"], timestamps),
        }
        self._begin()
        return pa.record_batch(
            [columns[name] for name in JOURNAL_SCHEMA.names], schema=JOURNAL_SCHEMA
        )

    # The rows of each record type

    def _produced(self, position: int, record: Stored) -> None:
        context = self._known.get((record.topic_id, record.partition, _PRODUCED))
        if context is None:
            topic = self._state.topics_by_id[record.topic_id]
            place = (record.topic_id, record.partition)
            context = self._new_context(topic.id, _PRODUCED, topic.name, place, None)
        self._add((position, record.ts, context, record.offset))
        envelope = record.envelope
        if envelope is not None and envelope.dlq is not None:
            self._letter = envelope.dlq

    def _delivered(self, position: int, record: Delivered) -> None:
        group = self._state.groups[record.group_id]
        unfinished = group.progress[record.partition].unfinished
        context = self._context(group, record.partition, _DELIVERED)
        for place, item in enumerate(record.items):
            entry = unfinished.get(item.offset)
            attempt = 1 if entry is None else entry.attempts + 1
            self._add((position + place, record.ts, context, item.offset))
            self._add_holder((record.owner, attempt, record.ts))

    def _returned(self, position: int, record: Returned) -> None:
        group = self._state.groups[record.group_id]
        unfinished = group.progress[record.partition].unfinished
        context = self._context(group, record.partition, journal.RETURNED)
        for place, offset in enumerate(record.offsets):
            self._settled(position + place, record.ts, context, unfinished[offset])

    def _finished(self, position: int, record: Finished) -> None:
        group = self._state.groups[record.group_id]
        entry = group.progress[record.partition].unfinished[record.offset]
        if record.how == DEAD_LETTERED:
            self._dead_lettered(position, record.ts, group, entry)
            return
        kind = _ACKED if record.how == ACKED else journal.SKIPPED
        context = self._context(group, record.partition, kind)
        self._settled(position, record.ts, context, entry)

    def _dead_lettered(self, position: int, ts: int, group: Group, entry: Unfinished) -> None:
        """Adds the end of the last lease too if it has no record, as in logs of older releases: the
        entry is in flight then."""
        letter = self._letter
        reason = entry.last_error
        if letter is not None and _is_copy_of(letter, group, entry):
            reason = letter.last_error
        if entry.state == IN_FLIGHT:
            self._failed(position, ts, group, journal.TIMED_OUT, entry, reason, None)
            position += 1
        self._failed(position, ts, group, journal.DEAD_LETTERED, entry, reason, None)

    def _skipped(self, position: int, record: Skipped) -> None:
        group = self._state.groups[record.group_id]
        context = self._context(group, record.partition, journal.SKIPPED)
        self._add((position, record.ts, context, record.offset))
        self._add_holder((None, None, None))

    def _released(self, position: int, record: Released) -> None:
        group = self._state.groups[record.group_id]
        entry = group.progress[record.partition].unfinished[record.offset]
        is_lapse = record.reason == LAPSED and entry.state == IN_FLIGHT
        kind = journal.TIMED_OUT if is_lapse else journal.NACKED
        retry_at = None if record.retry_at == DEAD else record.retry_at
        self._failed(position, record.ts, group, kind, entry, record.reason, retry_at)

    # Adding rows

    def _failed(
        self,
        position: int,
        ts: int,
        group: Group,
        kind: str,
        entry: Unfinished,
        reason: str,
        retry_at: int | None,
    ) -> None:
        context = self._context(group, entry.progress.partition, kind)
        self._settled(position, ts, context, entry)
        self._failures.extend((reason or None, retry_at))

    def _settled(self, position: int, ts: int, context: int, entry: Unfinished) -> None:
        self._add((position, ts, context, entry.offset))
        self._add_holder((entry.owner or None, entry.attempts, entry.delivered_at or None))

    def _context(self, group: Group, partition: int, kind: str) -> int:
        context = self._known.get((group.id, partition, kind))
        if context is None:
            topic, place = group.topic, (group.topic.id, partition)
            context = self._new_context(group.id, kind, topic.name, place, group.name)
        return context

    def _new_context(
        self, number: int, kind: str, topic: str, place: PartitionKey, group: str | None
    ) -> int:
        """`number` is the id of the topic or group. Both share one sequence of ids, and none is
        used again. `topic` is a full name."""
        index = len(self._contexts)
        scope, name = split_name(topic)
        shown = (None, None) if scope == DEFAULT_SCOPE else scope
        source = journal.STREAM if is_stream_log(topic) else journal.TOPIC
        self._contexts.append(_Context(kind, source, name, shown, place, group))
        self._known[number, place[1], kind] = index
        return index


def _is_copy_of(letter: DeadLetter, group: Group, entry: Unfinished) -> bool:
    return (
        letter.original_offset == entry.offset
        and letter.original_topic == plain_name(group.topic.name)
        and letter.group == group.name
    )


def _as_time(milliseconds: pa.Array) -> pa.Array:
    return pc.multiply(milliseconds, 1000).view(_TIME)


def _per_row(context_of: pa.Array, values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind).take(context_of)


def _spread(values: pa.Array, mask: pa.Array) -> pa.Array:
    """Places the values, in order, where the mask is true. The other rows are null."""
    if len(values) == len(mask):
        return values
    places = pc.subtract(pc.cumulative_sum(mask.cast(pa.int32())), 1)
    return values.take(pc.if_else(mask, places, pa.scalar(None, pa.int32())))
