"""A batch that does not fit a subscriber's buffer: its beginning is kept, and nothing behind it."""

from __future__ import annotations

from tests.engine.stream_harness import Bank, numbers


def one_turn(bank: Bank) -> None:
    bank.broker.scheduler._turns.popleft()()


def test_a_reader_that_makes_room_too_late_gets_no_more_of_the_batch():
    """felix-20: a batch larger than the buffer is offered in bursts, and has no hole in it."""
    bank = Bank(event_queue_depth=4)
    slow = bank.stalled()
    bank.send(*numbers(0, 12))
    one_turn(bank)
    one_turn(bank)
    assert slow.read() == numbers(0, 4)
    bank.settle()
    assert slow.read() == []
    assert slow.live.lag().dropped == 8


def test_a_reader_that_makes_room_in_time_gets_more_of_the_batch():
    """felix-20, 22: nothing was lost before, so nothing is held against it."""
    bank = Bank(event_queue_depth=4)
    slow = bank.stalled()
    bank.send(*numbers(0, 12))
    one_turn(bank)
    assert slow.read() == numbers(0, 4)
    one_turn(bank)
    one_turn(bank)
    assert slow.read() == numbers(4, 8)
    bank.settle()
    assert slow.read() == []


def test_the_next_batch_is_offered_anew():
    """felix-24: what was lost of one batch costs it nothing of the next."""
    bank = Bank(event_queue_depth=4)
    slow = bank.stalled()
    bank.publish(*numbers(0, 12))
    assert slow.read() == numbers(0, 4)
    bank.publish(*numbers(12, 15))
    assert slow.read() == numbers(12, 15)


def test_what_one_reader_loses_of_a_batch_another_does_not():
    """felix-22."""
    bank = Bank(event_queue_depth=4)
    slow, fast, roomy = bank.stalled(), bank.subscribe(), bank.stalled(event_queue_depth=100)
    bank.publish(*numbers(0, 12))
    assert fast.events == roomy.read() == numbers(0, 12)
    assert slow.read() == numbers(0, 4)
