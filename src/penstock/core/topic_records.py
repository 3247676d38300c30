"""Applies the records of topics and groups to the state.

Invariant: as in state.py, a record says everything; no clock and no message body is read. Must not
know messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.groups import Group, Progress
from penstock.core.topics import Topic
from penstock.model.records import (
    GroupCreated,
    GroupDeleted,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
)

if TYPE_CHECKING:
    from penstock.core.state import BrokerState


def topic_created(state: BrokerState, record: TopicCreated) -> None:
    topic = Topic(record.topic_id, record.name, record.partitions, record.ts, state.effect_totals)
    topic.after_archive = record.after_archive
    _set_retries(topic, record)
    state.topics[record.name] = topic
    state.topics_by_id[record.topic_id] = topic
    state.next_id = max(state.next_id, record.topic_id + 1)


def topic_deleted(state: BrokerState, record: TopicDeleted) -> None:
    topic = state.topics_by_id.pop(record.topic_id)
    del state.topics[topic.name]
    topic.effects.forget_all()
    for group in list(topic.groups.values()):
        _forget_group(state, topic, group)


def topic_configured(state: BrokerState, record: TopicConfigured) -> None:
    topic = state.topics_by_id[record.topic_id]
    topic.retention_ms = record.retention_ms
    topic.retention_bytes = record.retention_bytes
    topic.after_archive = record.after_archive
    _set_retries(topic, record)


def _set_retries(topic: Topic, record: TopicCreated | TopicConfigured) -> None:
    topic.max_attempts = record.max_attempts
    topic.retry_backoff_ms = record.retry_backoff_ms
    topic.retry_max_backoff_ms = record.retry_max_backoff_ms


def group_created(state: BrokerState, record: GroupCreated) -> None:
    topic = state.topics_by_id[record.topic_id]
    group = Group(record.group_id, record.name, topic, record.ts)
    for partition in topic.partitions:
        progress = Progress(group, partition.index, partition.first_offset)
        partition.backlog.admit(progress)
        group.progress.append(progress)
    topic.groups[record.name] = group
    state.groups[record.group_id] = group
    state.next_id = max(state.next_id, record.group_id + 1)


def group_deleted(state: BrokerState, record: GroupDeleted) -> None:
    topic = state.topics_by_id[record.topic_id]
    _forget_group(state, topic, state.groups[record.group_id])


def _forget_group(state: BrokerState, topic: Topic, group: Group) -> None:
    del state.groups[group.id]
    del topic.groups[group.name]
    topic.effects.forget_group(group.name)
    for progress in group.progress:
        topic.partitions[progress.partition].backlog.remove(progress)
        # Entries point back at their progress and are not seen by the collector.
        progress.unfinished.clear()
        progress.ready.clear()
