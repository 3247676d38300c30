"""Decides a produce: a message in one partition, a duplicate, or a refusal.

The router goes before the producer's envelope, and that before the hash of the key. A refusal
stores nothing and leaves its idempotency key free.
"""

from __future__ import annotations

import msgspec

from penstock.api.messages import Produce
from penstock.core.idempotency import produce_identity
from penstock.core.partitioning import partition_of_key
from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.model.envelope import Envelope, Routing, RoutingDecision
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
)
from penstock.model.limits import MAX_OFFSET
from penstock.model.records import Message
from penstock.model.scopes import beside, is_plain, is_stream_log, noun_of, plain_name, quoted
from penstock.model.units import utf8_bytes


def find_topic(state: BrokerState, name: str, topic_id: int | None = None) -> Topic:
    """Returns the topic of this full name. With an id only that topic is meant, and none that was
    made later under the same name."""
    topic = state.topics.get(name)
    if topic is None and is_stream_log(name):
        raise NotFound(f"stream {quoted(name)} was deleted")
    if topic is None:
        raise NotFound(
            f"unknown topic {quoted(name)}; create it with POST /v1/topics or "
            "`penstock topic create`"
        )
    if topic_id is not None and topic_id != topic.id:
        raise NotFound(
            f"{noun_of(name)} {quoted(name)} has id {topic.id}; {topic_id} was deleted, or never "
            "was"
        )
    return topic


def decide_produce(state: BrokerState, command: Produce, now_ms: int) -> tuple[Message, int] | None:
    """Returns the message to store and its size, or None when its identity is already committed."""
    envelope, key, value = command.envelope, command.key, command.value
    if envelope is None:
        topic = find_topic(state, command.topic)
        index = partition_of_key(key, len(topic.partitions))
    else:
        topic = find_topic(state, destination(command))
        index = choose_partition(topic, key, envelope)
    if topic.is_reserved:
        raise reserved(topic.name)
    is_ascii = key.isascii() and value.isascii()
    size = len(key) + len(value) if is_ascii else utf8_bytes(key) + utf8_bytes(value)
    if size > state.limits.max_message_bytes:
        raise TooLarge(
            f"key and value are {size} bytes; max_message_bytes is {state.limits.max_message_bytes}"
        )
    if envelope is not None and envelope.idempotency_key:
        identity = produce_identity(envelope.tenant_id, topic.id, envelope.idempotency_key)
        if state.produced.is_committed(identity, now_ms):
            return None
        check_keys(state, now_ms)
    partition = topic.partitions[index]
    backlog = partition.backlog
    if backlog.stored_msgs >= backlog.safe_msgs or backlog.stored_bytes + size > backlog.safe_bytes:
        check_room(state, partition, size)
    offset = topic.next_offset
    return Message(topic.id, index, offset, now_ms, key, value, envelope, command.routing), size


def reserved(name: str) -> PermissionDenied:
    return PermissionDenied(
        f"topic {name!r} is the broker's own: it can be read, but not changed or consumed"
    )


def destination(command: Produce) -> str:
    """Returns the full name of the topic that the message goes to. The target topic of an envelope
    is a plain name, in the namespace of the topic that the client named."""
    envelope = command.envelope
    if envelope is None or not envelope.target_topic:
        return command.topic
    return beside(command.topic, envelope.target_topic)


def choose_partition(topic: Topic, key: str, envelope: Envelope) -> int:
    override = envelope.partition_override
    if override is None:
        return partition_of_key(key, len(topic.partitions))
    if not 0 <= override < len(topic.partitions):
        raise InvalidArgument(
            f"partition_override {override} is out of range: "
            f"{plain_name(topic.name)!r} has {len(topic.partitions)} partitions"
        )
    return override


def routed(state: BrokerState, command: Produce, decision: RoutingDecision) -> Produce:
    """Returns the command with the router's answer in it. Raises if the answer is nonsense."""
    envelope = command.envelope or Envelope()
    changes: dict[str, str | int] = {}
    if decision.target_topic:
        if not is_plain(decision.target_topic):
            raise InvalidArgument("the router's target_topic is no name of a topic")
        changes["target_topic"] = decision.target_topic
    if decision.partition_override is not None:
        changes["partition_override"] = decision.partition_override
    if changes:
        envelope = msgspec.structs.replace(envelope, **changes)
        target = find_topic(state, destination(msgspec.structs.replace(command, envelope=envelope)))
        choose_partition(target, command.key, envelope)
    routing = Routing(decision.label, decision.meta or {})
    return msgspec.structs.replace(
        command,
        envelope=envelope if changes else command.envelope,
        routing=routing if routing != Routing() else None,
    )


def check_room(
    state: BrokerState,
    partition: Partition,
    size: int,
    pending: tuple[int, int] = (0, 0),
    count: int = 1,
) -> None:
    """Raises if the partition's buffer has no room for `count` messages of `size` bytes together.
    `pending` are the messages, and their bytes, that are decided for the partition and not stored
    yet. Otherwise notes in the backlog how much can be stored before it has to be computed again:
    a cache, which says nothing about the state."""
    backlog, limits = partition.backlog, state.limits
    msgs, nbytes = backlog.buffered_msgs() + pending[0], backlog.buffered_bytes() + pending[1]
    if msgs + count > limits.max_partition_msgs:
        raise ResourceExhausted(
            f"{_holder(partition)} holds {msgs} unfinished {_contents(partition)}; "
            f"max_partition_msgs is {limits.max_partition_msgs}",
            limit="partition_msgs",
            partition=partition.index,
        )
    if nbytes + size > limits.max_partition_bytes:
        raise ResourceExhausted(
            f"{_holder(partition)} holds {nbytes} unfinished bytes and {size} more do "
            f"not fit; max_partition_bytes is {limits.max_partition_bytes}",
            limit="partition_bytes",
            partition=partition.index,
        )
    if partition.end_offset + count - 1 > MAX_OFFSET:
        holder = "stream" if backlog.is_stream else "topic"
        raise ResourceExhausted(f"the {holder} has used up its offsets", limit="offsets")
    if pending == (0, 0):
        backlog.safe_msgs = backlog.stored_msgs + limits.max_partition_msgs - msgs
        backlog.safe_bytes = backlog.stored_bytes + limits.max_partition_bytes - nbytes


def _holder(partition: Partition) -> str:
    return "the stream" if partition.backlog.is_stream else f"partition {partition.index}"


def _contents(partition: Partition) -> str:
    return "events" if partition.backlog.is_stream else "messages"


def check_keys(state: BrokerState, now_ms: int, pending: int = 0) -> None:
    """Raises if no other idempotency key can be remembered, beside `pending` that are decided and
    not stored yet. Drops expired keys first."""
    limit = state.limits.max_idempotency_keys
    if len(state.produced) + pending >= limit:
        state.produced.forget_expired(now_ms)
        if len(state.produced) + pending >= limit:
            raise ResourceExhausted(
                f"{limit} idempotency keys are remembered; none is forgotten before its time",
                limit="idempotency_keys",
            )
