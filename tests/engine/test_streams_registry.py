"""Streams that come, change and go while they are used, and the broker's own end."""

from __future__ import annotations

import errno

from penstock.engine.publish_queue import PendingPublish
from penstock.model.errors import NotFound, Unavailable
from tests.engine.stream_harness import SECOND, Bank, Listener, S, numbers
from tests.storage.faulty_vfs import FaultyVfs


def test_a_deleted_stream_ends_its_subscriptions_and_refuses_its_publishes():
    """felix-88, 92: also those that wait; what was queued is dropped."""
    bank = Bank(pub_queue_depth=1, disconnect_slow_ms=1000, event_queue_depth=1)
    reader, slow, other = bank.subscribe(), bank.stalled(), bank.subscribe(SECOND)
    bank.publish_each(*numbers(0, 2))
    bank.streams.hold_fanout()
    assert bank.send(b"dropped") == [None]
    waiting = [bank.send(b"w") for _ in range(2)]
    bank.delete()
    bank.streams.release_fanout()
    bank.pass_ms(10_000)
    for listener in (reader, slow):
        [error] = listener.errors
        assert isinstance(error, NotFound)
        assert listener.live.is_closed
    assert [type(outcome) for [outcome] in waiting] == [NotFound, NotFound]
    assert reader.events == numbers(0, 2)
    assert isinstance(bank.send(b"late")[0], NotFound)
    assert [report.path for report in bank.streams.metrics()] == [SECOND]
    bank.publish(b"1", path=SECOND)
    assert (other.events, other.errors) == ([b"1"], [])


def test_a_deleted_tenant_ends_the_streams_in_it():
    """felix-87."""
    bank = Bank()
    elsewhere = bank.add(("other", "prod", "s"))
    gone, there = [bank.subscribe(S), bank.subscribe(SECOND)], bank.subscribe(elsewhere)
    bank.delete("tenant", ("acme", "", ""), cascade=True)
    assert all(isinstance(listener.errors[0], NotFound) for listener in gone)
    [refused] = bank.send(b"1")
    assert refused.message == "unknown tenant 'acme'"
    bank.publish(b"1", path=elsewhere)
    assert there.events == [b"1"]


def test_a_stream_that_is_created_again_is_a_new_one():
    """felix-7, 10: nothing of the old one is in it."""
    bank = Bank(event_queue_depth=2)
    old = bank.subscribe()
    bank.streams.hold_fanout()
    bank.send(b"old")
    bank.delete()
    bank.add(S)
    new = bank.stalled()
    bank.streams.release_fanout()
    bank.publish(*numbers(0, 5))
    assert new.read() == numbers(0, 5)
    assert old.events == []
    assert bank.counts().published == 5


def test_a_reader_may_have_the_stream_deleted_that_it_is_told_of():
    """felix-92: in the middle of its fan-out."""
    bank = Bank(lag_alert_events=1)

    class Deleting(Listener):
        def lagging(self, lag: object) -> None:
            bank.broker.submit(bank.registry.delete, "stream", S, False)

    deleting, after = Deleting(stalled=True), Listener()
    bank.subscribe(listener=deleting, wants_lag=True)
    bank.subscribe(listener=after)
    bank.send(*numbers(0, 2))
    bank.settle()
    assert after.events == numbers(0, 2)
    assert [type(listener.errors[0]) for listener in (deleting, after)] == [NotFound, NotFound]
    assert bank.streams.metrics() == []
    assert not bank.streams._busy


def test_a_deletion_is_told_when_it_is_durable():
    """felix-92: until then nobody hears that the stream is gone."""
    bank = Bank(FaultyVfs())
    reader = bank.subscribe()
    bank.broker.hold_writes()
    bank.broker.submit(bank.registry.delete, "stream", S, False)
    refused = bank.send(b"late")
    bank.broker.scheduler.run()
    assert (reader.errors, refused) == ([], [])
    bank.broker.disk.release()
    bank.settle()
    assert isinstance(reader.errors[0], NotFound)
    assert isinstance(refused[0], NotFound)


def test_a_deletion_that_cannot_be_written_is_not_called_one():
    """felix-92: the stream may be there again after a restart."""
    bank = Bank(FaultyVfs())
    reader = bank.subscribe()
    log = bank.broker.log.files.active.path
    bank.broker.disk.fail_call(1, errno.EIO, only=["write"], path=log)
    bank.broker.submit(bank.registry.delete, "stream", S, False)
    bank.settle()
    assert isinstance(reader.errors[0], Unavailable)


def test_streams_need_no_disk():
    """felix-127: they go on when the log cannot be written any more."""
    bank = Bank(FaultyVfs())
    reader = bank.subscribe()
    log = bank.broker.log.files.active.path
    bank.broker.disk.fail_call(1, errno.EIO, only=["write"], path=log)
    assert isinstance(bank.broker.call(bank.broker.engine.create_topic, "t", 1), Unavailable)
    bank.publish_each(*numbers(0, 3))
    late = bank.subscribe()
    bank.publish(b"3")
    assert (reader.events, late.events) == (numbers(0, 4), [b"3"])


def test_a_restart_leaves_nothing_of_what_was_published():
    """felix-8, 48, 50: the streams are there, and numbered from the beginning."""
    bank = Bank(FaultyVfs())
    bank.stalled()
    bank.publish_each(*numbers(0, 3))
    bank.broker.restart()
    bank.streams = bank.broker.engine.streams
    reader = bank.subscribe()
    bank.publish(b"new")
    assert reader.events == [b"new"]
    assert bank.counts().published == 1


def test_a_changed_depth_holds_at_once():
    """felix-23: for who has no own; what is buffered already stays."""
    bank = Bank(event_queue_depth=4)
    plain, own = bank.stalled(), bank.stalled(event_queue_depth=3)
    bank.publish_each(*numbers(0, 4))
    bank.change(event_queue_depth=2)
    bank.publish(b"lost")
    assert (plain.behind, plain.live.lag().event_queue_depth) == (4, 2)
    bank.change(event_queue_depth=6)
    bank.publish_each(*numbers(4, 8))
    assert plain.read() == numbers(0, 6)
    assert own.read() == numbers(0, 3)


def test_a_stop_ends_everything():
    """felix-49: subscriptions and waiting publishes are told why."""
    bank = Bank(pub_queue_depth=1, event_queue_depth=1, disconnect_slow_ms=1000)
    listeners = [bank.stalled(), bank.subscribe(SECOND), *[bank.stalled() for _ in range(3)]]
    bank.publish(*numbers(0, 2))
    bank.streams.hold_fanout()
    bank.send(b"1")
    waiting = bank.send(b"2")
    bank.streams.end_all("the broker is stopping")
    assert isinstance(waiting[0], Unavailable)
    for listener in listeners:
        [error] = listener.errors
        assert isinstance(error, Unavailable)
        assert error.message == "the broker is stopping"
    assert (bank.counts().subscribers, bank.counts(SECOND).subscribers) == (0, 0)
    assert bank.queued() == (0, 0)
    bank.pass_ms(10_000)
    assert len(waiting) == 1


def test_the_engines_end_is_that_of_its_subscriptions():
    """felix-49."""
    bank = Bank()
    reader = bank.subscribe()
    bank.broker.close()
    assert isinstance(reader.errors[0], Unavailable)


def test_a_publisher_that_tries_again_when_it_is_refused_does_not_stop_the_stop():
    """felix-49."""
    bank = Bank(pub_queue_depth=1)
    bank.streams.hold_fanout()
    bank.send(b"1")
    stream = bank.streams._streams[S]

    def again(outcome: object) -> None:
        if isinstance(outcome, Unavailable):
            stream.queue.put(PendingPublish([b"x"], 1, [], again))

    for _ in range(3):
        stream.queue.put(PendingPublish([b"x"], 1, [], again))
    bank.streams.end_all("the broker is stopping")
    assert bank.queued() == (1, 2)
