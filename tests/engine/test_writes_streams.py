"""Batches that are published to a durable stream."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.image import take_image
from penstock.engine import batch_storing
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
)
from penstock.model.limits import Limits
from penstock.model.writes import CommitReport
from penstock.storage import staging
from tests.engine.durable_stream_harness import EARLIEST, Streams
from tests.engine.write_harness import EVERY_APPEND_A_FRAME, ROOMY, Photographer, WriteBroker
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs


class Both(WriteBroker, Streams):
    """A broker with words for durable streams and for batches."""

    def write_events(self, *payloads: bytes, batch: int = 0) -> CommitReport:
        self.stage(events(*payloads), stream=self.path, batch=batch)
        return self.commit_batch(len(payloads), batch=batch)

    def kept(self) -> list[bytes]:
        """The payloads in the log, whose offsets have no gaps."""
        found: list[Any] = list(self.stored(self.log_name))
        assert [each.offset for each in found] == list(range(len(found)))
        return [each.value for each in found]


def events(*payloads: bytes) -> pa.Table:
    return pa.table({"payload": pa.array(payloads, pa.binary())})


def numbered(count: int, text: str = "event") -> list[bytes]:
    return [b"%s %d" % (text.encode(), n) for n in range(count)]


ODD = [b"", b"\xff\xfe\x00", b"plain"]


def test_rows_become_events_once_and_in_order():
    """felix-122: an event is stored once, also if the batch is committed again after a crash."""
    broker = Both(options=ROOMY)
    broker.publish(b"before")
    assert broker.write_events(*ODD) == CommitReport("committed", 3)
    broker.publish(b"after")
    expected = [b"before", *ODD, b"after"]
    assert broker.kept() == expected
    image = take_image(broker.state)
    broker.crash()
    assert take_image(broker.state) == image
    assert broker.commit_batch(3) == CommitReport("already_committed", 3)
    assert broker.kept() == expected
    broker.close()


def test_subscribers_get_the_events_of_a_batch_like_published_ones():
    broker = Both(options=ROOMY)
    live, replay = broker.listen(), broker.listen(EARLIEST)
    billing = broker.named(prefetch=0)
    broker.publish(b"published")
    broker.write_events(*numbered(2500))
    broker.publish(b"and more")
    expected = [b"published", *numbered(2500), b"and more"]
    broker.settle()
    for listener in (live, replay):
        listener.read()
        assert listener.events == expected
        assert listener.offsets == list(range(2502))
    assert broker.ack_all(billing) == expected
    (metrics,) = broker.engine.streams.metrics()
    assert metrics.counts.published == 2502
    broker.close()


def test_a_named_subscription_gets_a_batch_without_a_later_publish():
    broker = Both(options=ROOMY)
    billing = broker.named()
    broker.write_events(*ODD)
    assert broker.ack_all(billing) == ODD
    broker.close()


def test_an_exactly_once_stream_takes_a_batch_beside_numbered_publishes():
    """felix-122: the batch has no sequence; it is stored once by its own number."""
    broker = Both(delivery="exactly_once", options=ROOMY)
    assert broker.publish(b"first", producer_id="p", sequence=0) == 0
    broker.write_events(b"of the batch")
    assert broker.publish(b"second", producer_id="p", sequence=1) == 2
    assert broker.commit_batch(1) == CommitReport("already_committed", 1)
    assert broker.publish(b"second", producer_id="p", sequence=1) == 2
    assert broker.kept() == [b"first", b"of the batch", b"second"]
    broker.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_stream_has_each_event_of_a_batch_once_after_any_crash(
    flavour: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_storing, "BURST_ROWS", 3)
    monkeypatch.setattr(staging, "SLICE_ROWS", 5)
    vfs = Photographer(flavour)
    broker = Both(vfs=vfs, options=EVERY_APPEND_A_FRAME)
    vfs.is_watching = True
    broker.stage(events(*numbered(16)), stream=broker.path)
    vfs.answered = broker.ask_commit(16)
    broker.settle()
    assert vfs.answered == [CommitReport("committed", 16)]
    vfs.is_watching = False
    broker.close()
    resumed = 0
    for number, (survivor, is_answered) in enumerate(vfs.photographs):
        after = Again(survivor, options=EVERY_APPEND_A_FRAME)
        after.settle()
        found = after.kept()
        assert found in ([], numbered(16)), number
        assert found or not is_answered, number
        resumed += bool(found)
        after.close()
    assert resumed


class Again(Both):
    """The same broker on a disk that has its stream."""

    def __init__(self, vfs: FaultyVfs, **options: Any) -> None:
        WriteBroker.__init__(self, vfs, **options)
        self.path = ("acme", "prod", "orders")


def test_a_batch_waits_while_the_publish_queue_is_full():
    """Otherwise a large batch would be in memory as a whole, for as long as fan-out takes."""
    broker = Both(options=ROOMY)
    listener = broker.listen()
    broker.engine.streams.hold_fanout()
    broker.stage(events(*numbered(9000)), stream=broker.path)
    outcomes = broker.ask_commit(9000)
    for _ in range(20):
        broker.pass_ms(10)
    assert not outcomes
    (metrics,) = broker.engine.streams.metrics()
    assert 1024 <= metrics.queued < 1024 + batch_storing.BURST_ROWS
    broker.engine.streams.release_fanout()
    while not outcomes:
        broker.pass_ms(10)
    listener.read()
    assert listener.events == numbered(9000)
    broker.close()


def test_a_named_subscription_that_is_too_far_behind_refuses_the_commit():
    broker = Both(options=ROOMY, limits=Limits(max_partition_msgs=5))
    broker.named(start=EARLIEST)
    broker.write_events(*numbered(5))
    broker.stage(events(b"one more"), stream=broker.path, batch=1)
    refused = broker.try_commit(1, batch=1)
    assert isinstance(refused, ResourceExhausted)
    broker.must(broker.engine.streams.advance, broker.path, "billing", 5)
    assert broker.commit_batch(1, batch=1).rows == 1
    broker.close()


def test_rows_of_a_deleted_stream_are_left_out(caplog: pytest.LogCaptureFixture):
    broker = Both(options=ROOMY)
    broker.stage(events(*ODD), stream=broker.path)
    broker.must(broker.engine.registry.delete, "stream", broker.path, False)
    with caplog.at_level(logging.WARNING):
        assert broker.commit_batch(3).rows == 3
    assert "3 rows were left out, their target has gone" in caplog.text
    broker.close()


@pytest.mark.parametrize(
    ("table", "kind", "text"),
    [
        (pa.table({"payload": pa.array([b"a", None])}), InvalidArgument, "row 1: payload is null"),
        (pa.table({"payload": pa.nulls(3)}), InvalidArgument, "has the column 'payload'"),
        (pa.table({"payload": [1, 2]}), InvalidArgument, "not text or bytes"),
        (pa.table({"value": ["a"]}), InvalidArgument, "there are payload"),
        (pa.table({"payload": [b"x" * 101]}), PenstockError, "row 0: payload is 101 bytes"),
    ],
)
def test_a_row_that_cannot_be_an_event_is_refused(
    table: pa.Table, kind: type[PenstockError], text: str
):
    broker = Both(options=ROOMY, limits=Limits(max_message_bytes=100))
    refused = broker.stage_in_vain(table, stream=broker.path)
    assert isinstance(refused, kind)
    assert text in refused.message
    broker.close()


def test_only_a_durable_stream_takes_batches():
    broker = Both(options=ROOMY)
    plain = broker.create("plain", "at_most_once", durable=False)
    with pytest.raises(FailedPrecondition, match="only a durable stream"):
        broker.stage(events(b"x"), stream=plain)
    with pytest.raises(NotFound):
        broker.stage(events(b"x"), stream=("acme", "prod", "nowhere"))
    broker.close()
