"""The contract of `SharedStream`, on the simulation and on JetStream streams of real servers."""

from __future__ import annotations

import pytest

from penstock.cluster.shared import (
    Bounds,
    Found,
    Missing,
    Refused,
    SharedStream,
    Stored,
    Unanswered,
)
from tests.cluster.contract_world import ContractWorld
from tests.cluster.service_world import Heard


@pytest.fixture
def world(both_worlds: ContractWorld) -> ContractWorld:
    return both_worlds


def ends(world: ContractWorld, stream: SharedStream) -> tuple[int, int]:
    bounds = world.call(stream.bounds)
    assert isinstance(bounds, Bounds)
    return bounds.first_seq, bounds.last_seq


def store(world: ContractWorld, stream: SharedStream, *messages: bytes) -> None:
    _, last_seq = ends(world, stream)
    for seq, data in enumerate(messages, start=last_seq + 1):
        assert world.call(stream.append, seq, data) == Stored()


def test_an_append_at_the_end_is_stored_and_found(world: ContractWorld) -> None:
    stream = world.broker().stream
    assert ends(world, stream) == (1, 0)
    assert world.call(stream.look_up, 1) == Missing(1, 0)
    store(world, stream, b"one", b"two")
    assert world.call(stream.look_up, 1) == Found(b"one")
    assert world.call(stream.look_up, 3) == Missing(1, 2)
    assert ends(world, stream) == (1, 2)


@pytest.mark.parametrize(
    "data", [b"", b"\r\n", b"PING\r\nMSG x 1 3\r\nabc", bytes(range(256)) * 5], ids=len
)
def test_any_bytes_are_stored_found_and_told_as_they_are(world: ContractWorld, data: bytes) -> None:
    stream = world.broker().stream
    heard = Heard()
    stream.follow(1, heard)
    store(world, stream, data)
    assert world.call(stream.look_up, 1) == Found(data)
    world.until(lambda: bool(heard.messages))
    assert heard.messages == [(1, data)]


def test_an_append_elsewhere_is_refused_with_the_end(world: ContractWorld) -> None:
    stream = world.broker().stream
    assert world.call(stream.append, 2, b"x") == Refused(0)
    store(world, stream, b"one")
    assert world.call(stream.append, 1, b"x") == Refused(1)
    assert world.call(stream.append, 3, b"x") == Refused(1)
    assert ends(world, stream) == (1, 1)
    assert world.call(stream.look_up, 1) == Found(b"one")


def test_of_two_brokers_that_append_the_same_number_one_is_refused(world: ContractWorld) -> None:
    one, other = world.broker(), world.broker()
    assert world.call(one.stream.append, 1, b"one") == Stored()
    assert world.call(other.stream.append, 1, b"other") == Refused(1)
    assert world.call(other.stream.look_up, 1) == Found(b"one")
    identities = {world.call(each.stream.bounds).identity for each in (one, other)}
    assert len(identities) == 1


def test_the_largest_message_is_stored_found_and_told(world: ContractWorld) -> None:
    stream = world.broker().stream
    data = b"x" * stream.max_message_bytes
    heard = Heard()
    stream.follow(1, heard)
    store(world, stream, data, b"next")
    assert world.call(stream.look_up, 1) == Found(data)
    world.until(lambda: len(heard.messages) == 2)
    assert heard.messages == [(1, data), (2, b"next")]


def test_a_tail_tells_of_earlier_and_later_messages_in_order(world: ContractWorld) -> None:
    stream = world.broker().stream
    store(world, stream, b"one", b"two")
    heard = Heard()
    tail = stream.follow(2, heard)
    assert heard.messages == [], "told within the call"
    world.until(lambda: len(heard.messages) == 1)
    store(world, stream, b"three")
    world.until(lambda: len(heard.messages) == 2)
    assert heard.messages == [(2, b"two"), (3, b"three")]
    tail.close()
    store(world, stream, b"four")
    world.quiet()
    assert len(heard.messages) == 2


def test_a_tail_may_begin_behind_the_end(world: ContractWorld) -> None:
    stream = world.broker().stream
    store(world, stream, b"1")
    heard = Heard()
    stream.follow(4, heard)
    world.quiet()
    store(world, stream, b"2", b"3", b"4", b"5")
    world.until(lambda: len(heard.messages) == 2)
    assert heard.messages == [(4, b"4"), (5, b"5")]


def test_a_tail_behind_a_purge_is_told_once_and_ends(world: ContractWorld) -> None:
    stream = world.broker().stream
    store(world, stream, b"1", b"2", b"3", b"4")
    assert world.call(stream.purge, 2) is None
    heard = Heard()
    stream.follow(2, heard)
    world.until(lambda: bool(heard.purges))
    store(world, stream, b"more")
    world.quiet()
    assert (heard.messages, heard.purges) == ([], [3])
    assert ends(world, stream) == (3, 5)
    assert world.call(stream.look_up, 2) == Missing(3, 5)


def test_a_tail_at_the_first_message_that_is_left_goes_on(world: ContractWorld) -> None:
    stream = world.broker().stream
    store(world, stream, b"1", b"2", b"3")
    assert world.call(stream.purge, 2) is None
    heard = Heard()
    stream.follow(3, heard)
    world.until(lambda: bool(heard.messages))
    assert (heard.messages, heard.purges) == ([(3, b"3")], [])


def test_a_purge_behind_a_tail_does_not_disturb_it(world: ContractWorld) -> None:
    stream = world.broker().stream
    heard = Heard()
    stream.follow(1, heard)
    store(world, stream, b"1", b"2")
    world.until(lambda: len(heard.messages) == 2)
    assert world.call(stream.purge, 2) is None
    store(world, stream, b"3")
    world.until(lambda: len(heard.messages) == 3)
    assert heard.purges == []


def test_an_empty_stream_keeps_its_end(world: ContractWorld) -> None:
    stream = world.broker().stream
    store(world, stream, b"one")
    assert world.call(stream.purge, 9) is None
    assert ends(world, stream) == (2, 1)
    assert world.call(stream.look_up, 1) == Missing(2, 1)
    assert world.call(stream.append, 1, b"again") == Refused(1)
    assert world.call(stream.append, 2, b"two") == Stored()
    assert ends(world, stream) == (2, 2)


def test_a_purge_of_what_is_gone_changes_nothing(world: ContractWorld) -> None:
    stream = world.broker().stream
    assert world.call(stream.purge, 5) is None
    assert ends(world, stream) == (1, 0)
    store(world, stream, b"1", b"2", b"3")
    assert world.call(stream.purge, 2) is None
    assert world.call(stream.purge, 1) is None
    assert world.call(stream.purge, 0) is None
    assert ends(world, stream) == (3, 3)


def test_an_append_whose_answer_is_lost_is_stored_and_refuses_itself(world: ContractWorld) -> None:
    broker = world.broker()
    stream = broker.stream
    outcome = world.call_losing_answer(broker, stream.append, 1, b"one")
    assert isinstance(outcome, Unanswered)
    assert world.call(stream.append, 1, b"one") == Refused(1)
    assert world.call(stream.look_up, 1) == Found(b"one")


def test_an_append_whose_request_is_lost_is_not_stored(world: ContractWorld) -> None:
    broker = world.broker()
    stream = broker.stream
    outcome = world.call_losing_request(broker, stream.append, 1, b"one")
    assert isinstance(outcome, Unanswered)
    assert ends(world, stream) == (1, 0)
    assert world.call(stream.append, 1, b"one") == Stored()


def test_a_purge_whose_answer_is_lost_is_done(world: ContractWorld) -> None:
    broker = world.broker()
    store(world, broker.stream, b"1", b"2")
    outcome = world.call_losing_answer(broker, broker.stream.purge, 1)
    assert isinstance(outcome, Unanswered)
    assert world.call(broker.stream.purge, 1) is None


def test_while_the_service_is_away_requests_are_unanswered_and_a_tail_waits(
    world: ContractWorld,
) -> None:
    broker, other = world.broker(), world.broker()
    heard = Heard()
    broker.stream.follow(1, heard)
    store(world, other.stream, b"1")
    world.until(lambda: len(heard.messages) == 1)
    world.away(broker)
    assert isinstance(world.call(broker.stream.append, 2, b"x"), Unanswered)
    assert isinstance(world.call(broker.stream.look_up, 1), Unanswered)
    assert isinstance(world.call(broker.stream.bounds), Unanswered)
    assert isinstance(world.call(broker.stream.purge, 1), Unanswered)
    store(world, other.stream, b"2", b"3")
    assert len(heard.messages) == 1
    world.back(broker)
    world.until(lambda: len(heard.messages) == 3)
    assert heard.messages == [(1, b"1"), (2, b"2"), (3, b"3")]
    store(world, broker.stream, b"4")


def test_a_tail_that_is_opened_while_the_service_is_away_begins_later(world: ContractWorld) -> None:
    broker, other = world.broker(), world.broker()
    store(world, other.stream, b"1")
    world.away(broker)
    heard, closed = Heard(), Heard()
    broker.stream.follow(1, heard)
    broker.stream.follow(1, closed).close()
    world.back(broker)
    world.until(lambda: bool(heard.messages))
    world.quiet()
    assert heard.messages == [(1, b"1")]
    assert closed.messages == []
