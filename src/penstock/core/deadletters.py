"""Burial: the copy of a message in `dlq.<topic>` and its end in the group, as one decision.

The records returned belong into one frame, so that a crash keeps both or neither.
"""

from __future__ import annotations

from penstock.core.groups import Unfinished
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.envelope import DeadLetter, Envelope
from penstock.model.names import dead_letter_topic
from penstock.model.records import DEAD_LETTERED, Finished, Message, Record, TopicCreated


def decide_burial(
    state: BrokerState, entry: Unfinished, body: Message, last_error: str, now_ms: int
) -> tuple[list[Record], Message]:
    """All records of the burial, and the copy among them."""
    group = entry.progress.group
    source = group.topic
    name = dead_letter_topic(source.name)
    records: list[Record] = []
    graveyard = state.topics.get(name)
    if graveyard is None:
        partitions = len(source.partitions)
        created = TopicCreated(state.next_id, now_ms, name, partitions)
        records.append(created)
        copy = _copy(created.topic_id, partitions, 0, entry, body, last_error, now_ms)
    else:
        copy = _copy(
            graveyard.id,
            len(graveyard.partitions),
            graveyard.next_offset,
            entry,
            body,
            last_error,
            now_ms,
        )
    progress = entry.progress
    finished = Finished(
        source.id, group.id, progress.partition, now_ms, entry.offset, DEAD_LETTERED
    )
    return [*records, copy, finished], copy


def _copy(
    topic_id: int,
    partitions: int,
    offset: int,
    entry: Unfinished,
    body: Message,
    last_error: str,
    now_ms: int,
) -> Message:
    source = entry.progress.group.topic
    envelope = _envelope(source, entry, body.envelope or Envelope(), last_error, now_ms)
    # The graveyard has the source's partition count unless someone made it otherwise.
    partition = entry.progress.partition % partitions
    return Message(
        topic_id, partition, offset, now_ms, body.key, body.value, envelope, body.routing
    )


def _envelope(
    source: Topic, entry: Unfinished, original: Envelope, last_error: str, now_ms: int
) -> Envelope:
    """Identity and lineage stay; routing controls have done their work. The retry policy must not
    act in the dead-letter topic: it is kept aside."""
    return Envelope(
        run_id=original.run_id,
        step_id=original.step_id,
        parent_step_id=original.parent_step_id,
        tenant_id=original.tenant_id,
        idempotency_key=original.idempotency_key,
        deadline=original.deadline,
        dlq=DeadLetter(
            original_topic=source.name,
            original_partition=entry.progress.partition,
            original_offset=entry.offset,
            group=entry.progress.group.name,
            attempts=entry.attempts,
            last_error=last_error,
            routed_at_ms=now_ms,
            retry_policy=original.retry_policy,
        ),
    )
