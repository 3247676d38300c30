"""Publishing that invalidates cache entries: both happen, in this order, or neither does."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.model.caching import Put
from penstock.model.errors import NotFound, ResourceExhausted, TooLarge, Unavailable
from penstock.model.limits import MAX_TXN_OPS
from penstock.model.streams import Publish
from tests.engine.stream_harness import Bank, Listener, S, numbers
from tests.storage.faulty_vfs import FaultyVfs

SESSIONS = ("acme", "prod", "sessions")
INVALIDATE = [("sessions", "user123")]


def with_entry(vfs: FaultyVfs | None = None, *, durable: bool = False, **config: Any) -> Bank:
    """A broker whose cache `sessions` has an entry `user123`."""
    bank = Bank(vfs, **config)
    bank.add_cache("sessions", durable=durable)
    bank.broker.must(bank.caches.put, Put(SESSIONS, "user123", b"old"))
    assert is_there(bank)
    return bank


def on_disk(**config: Any) -> Bank:
    """Each invalidation is a record in the log."""
    return with_entry(FaultyVfs(), durable=True, **config)


def is_there(bank: Bank) -> bool:
    """Is the entry still to be read?"""
    [outcome] = bank.broker.submit(bank.caches.get, SESSIONS, "user123")
    return outcome is not None


class Looking(Listener):
    """Looks into the cache whenever it is woken."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank = bank
        self.saw: list[bool] = []

    def wake(self) -> None:
        super().wake()
        self.saw.append(is_there(self.bank))


@pytest.mark.parametrize("durable", [False, True])
def test_the_entry_is_gone_before_the_ack_and_before_the_event(durable: bool):
    """felix-83."""
    bank = on_disk() if durable else with_entry()
    reader = Looking(bank)
    bank.subscribe(listener=reader)
    seen: list[bool] = []

    def answered(outcome: object) -> None:
        assert outcome is None
        seen.append(is_there(bank))

    bank.streams.publish(Publish(path=S, payloads=[b"1"], invalidate=INVALIDATE), answered)
    bank.settle()
    assert seen == [False]
    assert reader.saw == [False]


def test_a_bad_target_fails_the_whole_publish():
    """felix-84: no event, and no other target is touched."""
    bank = with_entry()
    reader = bank.subscribe()
    [refused] = bank.send(b"1", invalidate=[*INVALIDATE, ("nowhere", "key")])
    bank.settle()
    assert isinstance(refused, NotFound)
    assert reader.events == []
    assert is_there(bank)
    assert bank.counts().published == 0


def test_a_bad_target_is_refused_at_once_on_a_full_queue():
    """felix-84: it need not wait to be told."""
    bank = with_entry(pub_queue_depth=1)
    bank.streams.hold_fanout()
    bank.send(b"0")
    assert isinstance(bank.send(b"1", invalidate=[("nowhere", "key")])[0], NotFound)


def test_a_publish_that_waits_invalidates_when_it_is_accepted():
    """felix-82, 32: and one that times out never does."""
    bank = with_entry(pub_queue_depth=1)
    bank.subscribe()
    bank.streams.hold_fanout()
    bank.send(b"0")
    refused = bank.send(b"1", invalidate=INVALIDATE)
    bank.pass_ms(2000)
    assert isinstance(refused[0], ResourceExhausted)
    assert is_there(bank)
    accepted = bank.send(b"2", invalidate=INVALIDATE)
    assert is_there(bank)
    bank.streams.release_fanout()
    bank.settle()
    assert accepted == [None]
    assert not is_there(bank)


def test_a_target_that_goes_while_the_publish_waits_fails_it():
    """felix-84."""
    bank = with_entry(pub_queue_depth=1)
    reader = bank.subscribe()
    bank.streams.hold_fanout()
    bank.send(b"0")
    waiting = bank.send(b"lost", invalidate=INVALIDATE)
    behind = bank.send(b"1")
    bank.delete("cache", SESSIONS)
    bank.streams.release_fanout()
    bank.settle()
    assert isinstance(waiting[0], NotFound)
    assert behind == [None]
    assert reader.events == numbers(0, 2)


def test_a_durable_invalidation_holds_ack_and_event_back_until_it_is_on_disk():
    """felix-83: and what comes behind it, which keeps its place."""
    bank = on_disk()
    reader = bank.subscribe()
    bank.broker.hold_writes()
    invalidating = bank.send(*numbers(0, 300), invalidate=INVALIDATE)
    plain = bank.send(b"300")
    bank.broker.scheduler.run()
    assert invalidating == []
    assert plain == [None]
    assert reader.events == []
    assert bank.queued() == (301, 0)
    bank.broker.disk.release()
    bank.settle()
    assert invalidating == [None]
    assert reader.events == numbers(0, 301)
    assert bank.counts().published == 301


def test_a_durable_invalidation_of_one_stream_holds_no_other_up():
    """felix-16."""
    bank = on_disk()
    other = bank.subscribe(("acme", "prod", "second"))
    bank.broker.hold_writes()
    bank.send(b"1", invalidate=INVALIDATE)
    assert bank.send(b"2", path=("acme", "prod", "second")) == [None]
    bank.broker.scheduler.run()
    assert other.events == [b"2"]
    bank.broker.disk.release()
    bank.settle()


def test_an_invalidation_that_cannot_be_written_fails_the_publish():
    """felix-84: its event is dropped; those around it, which needed no disk, are not."""
    bank = on_disk(pub_queue_depth=4)
    reader = bank.subscribe()
    bank.publish(b"0")
    log = bank.broker.log.files.active.path
    bank.broker.disk.fail_call(1, errno.EIO, only=["write"], path=log)
    invalidating = bank.send(b"lost", b"lost too", b"and this", invalidate=INVALIDATE)
    plain, waiting = bank.send(b"1"), bank.send(b"2")
    assert waiting == []
    bank.settle()
    assert isinstance(invalidating[0], Unavailable)
    assert (plain, waiting) == ([None], [None])
    assert reader.events == numbers(0, 3)
    assert bank.queued() == (0, 0)
    assert bank.counts().published == 3


def test_a_failed_invalidation_makes_room_for_who_waits():
    """felix-36: though nothing fans out in its place."""
    bank = on_disk(pub_queue_depth=1)
    reader = bank.subscribe()
    log = bank.broker.log.files.active.path
    bank.broker.disk.fail_call(1, errno.EIO, only=["write"], path=log)
    bank.send(b"lost", invalidate=INVALIDATE)
    waiting = bank.send(b"1")
    assert waiting == []
    bank.settle()
    assert waiting == [None]
    assert reader.events == [b"1"]


def test_a_stream_deleted_while_its_invalidation_is_written_answers_all_the_same():
    """felix-82."""
    bank = on_disk()
    reader = bank.subscribe()
    bank.broker.hold_writes()
    invalidating = bank.send(b"1", invalidate=INVALIDATE)
    bank.broker.submit(bank.registry.delete, "stream", S, False)
    bank.broker.disk.release()
    bank.settle()
    assert invalidating == [None]
    assert reader.events == []
    assert isinstance(reader.errors[0], NotFound)


@pytest.mark.parametrize("count", [MAX_TXN_OPS, MAX_TXN_OPS + 1])
def test_the_targets_of_one_publish_are_bounded(count: int):
    """felix-84: all are removed in one step of the loop."""
    bank = with_entry()
    [outcome] = bank.send(b"1", invalidate=INVALIDATE * count)
    assert isinstance(outcome, TooLarge) == (count > MAX_TXN_OPS)
