"""The SDK's WebSocket without IO: what it sends to which connection, and what it holds back."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client.calls import SocketForm
from penstock.client.feeds import ReceivedEvent
from penstock.client.socket_channels import MAX_UNREAD_EVENTS, SubscriptionChannel
from penstock.client.socket_event_channels import (
    PAUSE_EVENTS,
    DurableChannel,
    NamedEventsChannel,
    StartedChannel,
)
from penstock.client.socket_exchange import Outcome, Outgoing, SocketExchange
from penstock.model.errors import NotFound, OutcomeUnknown, OutOfRange, PenstockError, Unavailable

PATH = ("default", "default", "orders")
ACK = SocketForm("event_ack", {"offset": 0}, is_idempotent=True)
NACK = SocketForm("event_nack", {"offset": 0})


class Exchange:
    """An exchange whose broker is the test."""

    def __init__(self) -> None:
        self.reported: list[PenstockError] = []
        self.later: list[Callable[[], None]] = []
        self.real = SocketExchange(self.reported.append, lambda _, act: self.later.append(act))
        self.real.connected()

    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(item.frame) for item in self.real.leave(1 << 20)]

    def reconnect(self) -> None:
        self.real.lost("the connection broke")
        self.real.connected()

    def say(self, **frame: Any) -> None:
        self.real.receive_text(json.dumps(frame).encode())

    def open(self, channel: DurableChannel[Any] | SubscriptionChannel, **answer: Any) -> None:
        self.real.open_channel(channel)
        self.answer_opening(**answer)

    def answer_opening(self, **answer: Any) -> dict[str, Any]:
        (request,) = self.sent()
        self.say(type="subscribed", request_id=request["request_id"], **answer)
        return request

    def events(self, number: int, offset: int, count: int) -> None:
        body = b"".join(struct.pack("<I", 1) + b"x" for _ in range(count))
        self.real.receive_binary(struct.pack("<BIQI", 3, number, offset, count) + body)

    def settle(self, channel: NamedEventsChannel[Any], form: SocketForm) -> list[Outcome]:
        outcomes: list[Outcome] = []
        item: Outgoing = self.real.settle(channel, form)
        item.done = outcomes.append
        self.real.put(item)
        return outcomes


def started(start: str = "earliest") -> StartedChannel[ReceivedEvent]:
    return StartedChannel(PATH, start, lambda event: event, resumes=True)


def named() -> NamedEventsChannel[ReceivedEvent]:
    make: Callable[[ReceivedEvent], ReceivedEvent] = lambda event: event  # noqa: E731
    return NamedEventsChannel(PATH, "n", None, None, 1000, 0, make, resumes=True)


def offsets(channel: DurableChannel[ReceivedEvent]) -> list[int]:
    return [each.offset for each in channel.take() if isinstance(each, ReceivedEvent)]


def test_a_start_begins_again_behind_its_last_event() -> None:
    """felix-110: from the broker's confirmation on, before any event."""
    exchange, channel = Exchange(), started("latest")
    exchange.open(channel, subscription_id="s1", offset=7)
    exchange.reconnect()
    assert exchange.answer_opening(subscription_id="s1", offset=7)["start"] == 7
    exchange.events(1, 7, 3)
    exchange.reconnect()
    assert exchange.answer_opening(subscription_id="s2", offset=10)["start"] == 10
    exchange.events(2, 10, 1)
    assert offsets(channel) == [7, 8, 9, 10]


def test_events_that_came_before_are_left_out() -> None:
    exchange, channel = Exchange(), started()
    exchange.open(channel, subscription_id="s1", offset=0)
    exchange.events(1, 0, 3)
    exchange.events(1, 1, 4)
    assert offsets(channel) == [0, 1, 2, 3, 4]


def test_a_full_channel_pauses_the_broker_until_it_is_read() -> None:
    exchange, channel = Exchange(), started()
    exchange.open(channel, subscription_id="s1", offset=0)
    exchange.events(1, 0, PAUSE_EVENTS)
    exchange.events(1, PAUSE_EVENTS, 10)
    assert [each["type"] for each in exchange.sent()] == ["pause"]
    assert len(offsets(channel)) == PAUSE_EVENTS + 10
    exchange.real.taken(channel)
    assert [each["type"] for each in exchange.sent()] == ["resume"]


def test_what_a_channel_has_no_room_for_is_read_again() -> None:
    """Also if the broker does not heed the pause: the number kept is bounded, and none is lost."""
    exchange, channel = Exchange(), started()
    exchange.open(channel, subscription_id="s1", offset=0)
    for first in range(0, MAX_UNREAD_EVENTS + 3000, 1000):
        exchange.events(1, first, 1000)
    assert [each["type"] for each in exchange.sent()] == ["pause"]
    assert offsets(channel) == list(range(MAX_UNREAD_EVENTS))
    exchange.real.taken(channel)
    end, again = exchange.sent()
    assert (end["type"], end["subscription_id"]) == ("unsubscribe", "s1")
    assert (again["type"], again["start"]) == ("subscribe", MAX_UNREAD_EVENTS)
    exchange.events(1, MAX_UNREAD_EVENTS + 3000, 1)
    exchange.say(type="subscribed", request_id=again["request_id"], subscription_id="s2")
    exchange.events(2, MAX_UNREAD_EVENTS, 2)
    assert offsets(channel) == [MAX_UNREAD_EVENTS, MAX_UNREAD_EVENTS + 1]


def test_a_plain_subscription_notices_events_that_the_broker_dropped() -> None:
    exchange = Exchange()
    channel = SubscriptionChannel(PATH, None, resumes=True)
    exchange.open(channel, subscription_id="s1", offset=0)
    exchange.events(1, 0, 1)
    exchange.events(1, 5, 1)
    assert [each == b"x" for each in channel.take()] == [True, False, True]


def test_a_message_about_a_channel_never_reaches_another_connection() -> None:
    """After a restart of the broker, its id may be that of another subscription."""
    exchange, closed, other = Exchange(), started(), started()
    exchange.open(closed, subscription_id="s1", offset=0)
    exchange.real.close_channel(closed)
    exchange.real.open_channel(other)
    assert [each["type"] for each in exchange.sent()] == ["unsubscribe", "subscribe"]
    exchange.reconnect()
    assert [each["type"] for each in exchange.sent()] == ["subscribe"]


def test_an_ack_without_an_answer_goes_to_the_next_channel_of_the_name() -> None:
    exchange, channel = Exchange(), named()
    exchange.open(channel, subscription_id="n1", name="n", owner=channel.owner)
    acked, nacked = exchange.settle(channel, ACK), exchange.settle(channel, NACK)
    assert [each["subscription_id"] for each in exchange.sent()] == ["n1", "n1"]
    exchange.reconnect()
    late = exchange.settle(channel, NACK)
    assert isinstance(nacked[0], OutcomeUnknown)
    request = exchange.answer_opening(subscription_id="n8")
    assert (request["name"], request["owner"]) == ("n", channel.owner)
    ack, nack = exchange.sent()
    assert (ack["type"], ack["subscription_id"]) == ("event_ack", "n8")
    assert (nack["type"], nack["subscription_id"]) == ("event_nack", "n8")
    for each in (ack, nack):
        exchange.say(type="ok", request_id=each["request_id"])
    assert isinstance(acked[0], bytes)
    assert isinstance(late[0], bytes)


def test_an_ack_that_meets_an_ended_channel_is_sent_again() -> None:
    """The broker is stopping: it has ended the channel, and knows its id no more."""
    exchange, channel = Exchange(), named()
    exchange.open(channel, subscription_id="n1")
    acked = exchange.settle(channel, ACK)
    (ack,) = exchange.sent()
    exchange.say(type="error", error="UNAVAILABLE", message="stopping", subscription_id="n1")
    exchange.say(type="error", error="NOT_FOUND", message="no id", request_id=ack["request_id"])
    assert acked == []
    exchange.reconnect()
    exchange.answer_opening(subscription_id="n2")
    (ack,) = exchange.sent()
    exchange.say(type="ok", request_id=ack["request_id"])
    assert isinstance(acked[0], bytes)


def test_acks_that_wait_end_with_their_channel() -> None:
    exchange, channel = Exchange(), named()
    exchange.open(channel, subscription_id="n1")
    sent = exchange.settle(channel, ACK)
    exchange.sent()
    exchange.real.lost("the connection broke")
    unsent = exchange.settle(channel, ACK)
    exchange.real.close_channel(channel)
    assert isinstance(sent[0], OutcomeUnknown)
    assert type(unsent[0]) is Unavailable
    again = named()
    exchange.real.connected()
    exchange.open(again, subscription_id="n2")
    exchange.real.lost("the connection broke")
    waiting = exchange.settle(again, ACK)
    exchange.real.connected()
    (request,) = exchange.sent()
    gone = {"error": "NOT_FOUND", "message": "deleted", "request_id": request["request_id"]}
    exchange.say(type="error", **gone)
    assert isinstance(waiting[0], NotFound)


def test_a_position_that_is_gone_ends_the_channel() -> None:
    """felix-126"""
    exchange, channel = Exchange(), started()
    exchange.open(channel, subscription_id="s1", offset=0)
    gone = {"error": "OUT_OF_RANGE", "message": "no longer kept", "code": 410}
    exchange.say(type="subscribe_cursor_error", subscription_id="s1", **gone)
    with pytest.raises(OutOfRange, match="no longer kept"):
        channel.take()


def test_a_numbered_publish_is_sent_again_in_its_order() -> None:
    """felix-122: with the same numbers, before what had not left."""
    exchange = Exchange()
    form = SocketForm("publish_batch", {"producer_id": "p"}, is_idempotent=True)
    for sequence in range(3):
        item = exchange.real.message(form, b'{"sequence":%d}' % sequence, lambda _: None)
        exchange.real.put(item)
        if sequence == 1:
            exchange.sent()
    exchange.reconnect()
    assert [each["sequence"] for each in exchange.sent()] == [0, 1, 2]
