"""Decides a publish to a durable stream: its events, an earlier answer, or a refusal.

A producer that numbers its publishes sends each number once: the next one is stored, an earlier one
is a repeat, and one further ahead means that a publish got lost. Must not know subscriptions.
"""

from __future__ import annotations

import zlib

import msgspec

from penstock.core.produce import check_room
from penstock.core.publishers import Publisher
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock.model.limits import MAX_NAME_BYTES, MAX_STREAM_PRODUCERS
from penstock.model.options import check_number
from penstock.model.records import Published, StoredEvent
from penstock.model.tenancy import StreamConfig


class NewEvents(msgspec.Struct, gc=False):
    """Events to store, and the record of their number, if the producer has an id."""

    events: list[StoredEvent]
    published: Published | None = None


class Repeat(msgspec.Struct, gc=False):
    """A publish that was stored before. `offset` is None if it is too long ago to be known."""

    offset: int | None


def check_numbers(config: StreamConfig, producer_id: str, sequence: int | None) -> None:
    """Raises unless the publish has a number where the stream needs one, and none where it could
    not be kept."""
    if not config.durable:
        if producer_id or sequence is not None:
            raise InvalidArgument("producer_id and sequence need a durable stream")
        return
    if bool(producer_id) != (sequence is not None):
        raise InvalidArgument("producer_id and sequence belong together")
    if sequence is None:
        if config.delivery == "exactly_once":
            raise InvalidArgument(
                "a publish to an exactly_once stream needs producer_id and sequence, which counts "
                "the publishes of this producer from 0 on"
            )
    else:
        check_number("sequence", sequence)
    if len(producer_id.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"producer_id is longer than {MAX_NAME_BYTES} bytes")


def decide_event(state: BrokerState, topic: Topic, payload: bytes, now_ms: int) -> StoredEvent:
    """Decides a publish of one event without a number: the hot path."""
    partition = topic.partitions[0]
    backlog = partition.backlog
    if (
        backlog.stored_msgs >= backlog.safe_msgs
        or backlog.stored_bytes + len(payload) > backlog.safe_bytes
    ):
        check_room(state, partition, len(payload))
    return StoredEvent(topic.id, 0, topic.next_offset, now_ms, payload)


def decide_publish(
    state: BrokerState,
    topic: Topic,
    payloads: list[bytes],
    nbytes: int,
    producer_id: str,
    sequence: int | None,
    now_ms: int,
) -> NewEvents | Repeat:
    offset, count = topic.next_offset, len(payloads)
    published = None
    if sequence is not None:
        publisher = topic.publishers.find(producer_id, now_ms)
        expected = 0 if publisher is None else publisher.next
        if publisher is not None and sequence < expected:
            return _repeat(publisher, sequence, payloads)
        if sequence != expected:
            raise FailedPrecondition(_gap(producer_id, sequence, expected))
        if publisher is None and not topic.publishers.has_room(MAX_STREAM_PRODUCERS, now_ms):
            raise ResourceExhausted(
                f"the stream remembers {MAX_STREAM_PRODUCERS} producers; use fewer producer ids",
                limit="stream_producers",
            )
        digest = digest_of(payloads)
        published = Published(topic.id, now_ms, producer_id, sequence, offset, count, digest)
    partition = topic.partitions[0]
    backlog = partition.backlog
    if (
        backlog.stored_msgs + count > backlog.safe_msgs
        or backlog.stored_bytes + nbytes > backlog.safe_bytes
    ):
        check_room(state, partition, nbytes, count=count)
    topic_id = topic.id
    events = [
        StoredEvent(topic_id, 0, number, now_ms, payload)
        for number, payload in enumerate(payloads, offset)
    ]
    return NewEvents(events, published)


def digest_of(payloads: list[bytes]) -> int:
    """Returns a number that nearly always differs for other events."""
    digest = len(payloads)
    for payload in payloads:
        digest = zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(8), digest))
    return digest


def _repeat(publisher: Publisher, sequence: int, payloads: list[bytes]) -> Repeat:
    """Finds the answer to a repeat. Other events under a number that was used are refused: they
    would be lost, as when a producer starts again and begins with 0."""
    answer = publisher.answers.get(sequence)
    if answer is None:
        return Repeat(None)
    offset, count, digest = answer
    if (count, digest) != (len(payloads), digest_of(payloads)):
        raise FailedPrecondition(
            f"sequence {sequence} of producer {publisher.producer_id!r} was used for other events; "
            f"its next number is {publisher.next}"
        )
    return Repeat(offset)


def _gap(producer_id: str, sequence: int, expected: int) -> str:
    text = f"sequence {sequence} of producer {producer_id!r} leaves a gap: {expected} is expected"
    if expected:
        return text
    return (
        f"{text}; the producer is new here, or was forgotten because it published nothing for "
        "long: begin again with 0"
    )
