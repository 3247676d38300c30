"""The logs of durable streams: topics with one partition, which come and go with their streams.

Invariant: a durable stream has a log from the frame that creates it to the frame that deletes it,
and the log's retention is the stream's. Must not know the events.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.state import BrokerState
from penstock.core.tenancy import find
from penstock.core.topics import Topic
from penstock.model.errors import FailedPrecondition, OutOfRange
from penstock.model.records import (
    Record,
    RegistryChanged,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
)
from penstock.model.scopes import quoted, stream_log_name
from penstock.model.tenancy import Path, StreamConfig


def with_logs(state: BrokerState, steps: Iterable[RegistryChanged]) -> list[Record]:
    """Returns the steps with the records that create, change and delete the logs of streams."""
    records: list[Record] = []
    ids: dict[str, int] = {}
    next_id = state.next_id
    for step in steps:
        records.append(step)
        config = step.entry.stream
        if config is None or not config.durable:
            continue
        name = stream_log_name(step.entry.path)
        topic = state.topics.get(name)
        topic_id = ids.get(name, 0 if topic is None else topic.id)
        if step.deleted:
            records.append(TopicDeleted(topic_id, step.ts))
            ids[name] = 0
            continue
        if not topic_id:
            topic_id, next_id = next_id, next_id + 1
            records.append(TopicCreated(topic_id, step.ts, name, 1))
            ids[name] = topic_id
        records += _configured(topic_id, topic, config, step.ts)
    return records


def _configured(
    topic_id: int, topic: Topic | None, config: StreamConfig, ts: int
) -> list[TopicConfigured]:
    """Returns the record that sets the log's retention, if it has another one."""
    known = (0, 0)
    if topic is not None and topic.id == topic_id:
        known = (topic.retention_ms, topic.retention_bytes)
    if (config.retention_ms, config.retention_bytes) == known:
        return []
    return [TopicConfigured(topic_id, ts, config.retention_ms, config.retention_bytes)]


def no_subscription(log_name: str, name: str) -> str:
    """Returns the text of a refusal: no subscription of the stream has this name."""
    return f"no subscription {name!r} of stream {quoted(log_name)}"


def find_log(state: BrokerState, path: Path, stream_id: int | None = None) -> Topic:
    """Returns the log of a stream, whose id is the stream's. Raises if there is no such stream, if
    it is not durable, or if it does not have the id that is given."""
    config = find(state.registry, "stream", path).stream
    if config is None or not config.durable:
        raise FailedPrecondition(
            f"stream {'/'.join(path)!r} keeps no events; only a durable stream has positions, "
            "and takes batches"
        )
    topic = state.topics[stream_log_name(path)]
    if stream_id is not None and stream_id != topic.id:
        raise OutOfRange(
            f"stream {'/'.join(path)!r} has the id {topic.id}, not {stream_id}: it was deleted and "
            "created again. Offsets of the old stream mean other events in this one: discard the "
            "position that you have kept, and begin again without it"
        )
    return topic
