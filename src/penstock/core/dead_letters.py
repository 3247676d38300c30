"""Dead-lettering: copies a message to `dlq.<topic>` and finishes it in its group, as one decision.

Invariant: the records returned belong into one frame, so that a crash keeps both or neither. Must
not know where the message body comes from.
"""

from __future__ import annotations

from penstock.core.groups import Unfinished
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.envelope import DeadLetter, Envelope
from penstock.model.names import dead_letter_topic
from penstock.model.records import DEAD_LETTERED, Finished, Message, Record, TopicCreated
from penstock.model.scopes import plain_name


def decide_dead_letter(
    state: BrokerState, entry: Unfinished, body: Message, last_error: str, now_ms: int
) -> tuple[list[Record], Message]:
    """Returns all records of the move, and the copy among them."""
    group = entry.progress.group
    source = group.topic
    name = dead_letter_topic(source.name)
    records: list[Record] = []
    target = state.topics.get(name)
    if target is None:
        topic_id, partitions, offset = state.next_id, len(source.partitions), 0
        records.append(TopicCreated(topic_id, now_ms, name, partitions))
    else:
        topic_id, partitions, offset = target.id, len(target.partitions), target.next_offset
    envelope = _envelope(source, entry, body.envelope or Envelope(), last_error, now_ms)
    # The dead-letter topic has the source's number of partitions unless a user created it.
    partition = entry.progress.partition % partitions
    copy = Message(
        topic_id, partition, offset, now_ms, body.key, body.value, envelope, body.routing
    )
    finished = Finished(
        source.id, group.id, entry.progress.partition, now_ms, entry.offset, DEAD_LETTERED
    )
    return [*records, copy, finished], copy


def _envelope(
    source: Topic, entry: Unfinished, original: Envelope, last_error: str, now_ms: int
) -> Envelope:
    """Keeps the ids, and drops the routing controls, which have done their work. The retry policy
    must not apply in the dead-letter topic, so it is kept in `dlq`."""
    return Envelope(
        run_id=original.run_id,
        step_id=original.step_id,
        parent_step_id=original.parent_step_id,
        tenant_id=original.tenant_id,
        idempotency_key=original.idempotency_key,
        deadline=original.deadline,
        dlq=DeadLetter(
            original_topic=plain_name(source.name),
            original_partition=entry.progress.partition,
            original_offset=entry.offset,
            group=entry.progress.group.name,
            attempts=entry.attempts,
            last_error=last_error,
            routed_at_ms=now_ms,
            retry_policy=original.retry_policy,
        ),
    )
