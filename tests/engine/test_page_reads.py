"""Commands on messages that are no longer in memory: one read of a page serves many of them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from penstock.model.errors import FailedPrecondition
from penstock.model.limits import KIB, MIB, Limits
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, on_disk

LARGE = WalOptions(segment_bytes=16 * MIB, reserve_bytes=0)


def paged(limit_bytes: int, options: WalOptions, partitions: int = 1) -> Broker:
    """A broker whose first messages are out of memory."""
    broker = on_disk(limits=Limits(memory_bytes=limit_bytes), options=options)
    broker.topic("t", partitions)
    for n in range(10):
        commands = [broker.command("t", "v" * 2000, str(n)) for n in range(100 * n, 100 * n + 100)]
        broker.must(broker.engine.produce_many, commands)
    return broker


def test_nacked_messages_that_are_out_of_memory_are_redelivered_with_few_reads() -> None:
    """driftq-32: a page serves all messages that it covers."""
    broker = paged(MIB, LARGE)
    reader = broker.consume(lease_ms=LONG_MS)
    given = reader.take()
    assert len(given) == 256
    pages = broker.engine.parts.pages
    before = pages.reads
    nack = partial(broker.engine.nack, delay_ms=0)
    for item in given:
        broker.submit(nack, broker.naming(reader, item), "again")
    broker.pass_ms(10)
    assert sorted(reader.offsets()) == [item.offset for item in given]
    assert set(reader.attempts()) == {2}
    assert pages.reads - before <= 8
    broker.close()


def test_a_page_that_cannot_be_read_is_tried_and_logged_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file stays damaged: its error must not fill the log."""
    broker = paged(MIB, LARGE)
    read, is_damaged = broker.engine.parts.log.read, True

    def read_damaged(positions: Sequence[int]) -> list[bytes]:
        if is_damaged:
            raise OSError(errno.EIO, "damaged")
        return read(positions)

    monkeypatch.setattr(broker.engine.parts.log, "read", read_damaged)
    reader = broker.consume(lease_ms=LONG_MS)
    for _ in range(600):
        broker.pass_ms(1000)
    assert 8 <= caplog.text.count("cannot read topic") <= 20
    assert reader.take() == []
    is_damaged = False
    broker.pass_ms(60_000)
    assert len(reader.take()) == 256
    broker.close()


def test_messages_out_of_attempts_are_dead_lettered_with_few_reads() -> None:
    """driftq-39: a page serves all messages that it covers."""
    broker = paged(MIB, LARGE)
    reader = broker.consume(lease_ms=LONG_MS)
    given = reader.take()
    pages = broker.engine.parts.pages
    nack = partial(broker.engine.nack, dead=True)
    for item in given:
        broker.submit(nack, broker.naming(reader, item), "dead")
    reader.live.close()
    before = pages.reads
    broker.pass_ms(100)
    assert len(broker.engine.parts.dead_letters) == 0
    assert broker.state.topics["dlq.t"].partitions[0].end_offset == len(given)
    assert pages.reads - before <= 8
    broker.close()


def test_repeated_acks_of_sealed_messages_read_no_page() -> None:
    """driftq-29: offsets are looked up without their messages."""
    broker = paged(MIB, WalOptions(segment_bytes=256 * KIB, reserve_bytes=0), partitions=2)
    reader = broker.consume(lease_ms=LONG_MS)
    acked: list[Any] = []
    while items := reader.take():
        names = [broker.naming(reader, item) for item in items]
        broker.must(broker.engine.ack_many, names)
        acked += names
    broker.pass_ms(3000)
    topic_id = broker.state.topics["t"].id
    ends = [broker.engine.parts.window.log(topic_id, n).sealed_end() for n in range(2)]
    sealed = [name for name in acked if name.offset < ends[name.partition]]
    assert len(sealed) > 300
    pages = broker.engine.parts.pages
    before = pages.reads
    assert broker.must(broker.engine.ack_many, sealed) == [None] * len(sealed)
    assert pages.reads == before
    elsewhere = [broker.naming(reader, n.offset, partition=1 - n.partition) for n in sealed[:50]]
    outcomes = broker.must(broker.engine.ack_many, elsewhere)
    assert all(isinstance(outcome, FailedPrecondition) for outcome in outcomes)
    broker.close()
