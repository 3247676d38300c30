"""Splits of a partition: they agree with what a range read gives, wherever the rows are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.model.envelope import Envelope
from penstock.model.errors import InvalidArgument, NotFound, NotYet, OutOfRange, PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.ranges import RangeRequest
from penstock.model.splits import SplitRequest, Splits
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, on_disk

TIGHT = Limits(memory_bytes=12 * KIB, max_partition_msgs=10**6)
SEGMENTS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
COUNT = 185


def filled(partitions: int = 3) -> Broker:
    """Rows in history, in the log and in memory."""
    broker = on_disk(limits=TIGHT, options=SEGMENTS)
    broker.topic("t", partitions)
    for n in range(COUNT):
        broker.produce("t", "." * 500, envelope=Envelope(partition_override=n % partitions))
    log = broker.engine.parts.window.log(broker.state.topics["t"].id, 0)
    edge = log.chunks[0]
    assert edge.messages is None, "nothing is evicted: the test is void"
    assert edge.first < log.sealed_end() <= edge.last, "no chunk is sealed in part"
    assert log.chunks[-1].messages, "nothing is in memory"
    return broker


def asked(wanted: dict[str, Any]) -> SplitRequest:
    whole: dict[str, Any] = {"topic": "t", "partition": 0}
    return SplitRequest(**whole | wanted)


def splits(broker: Broker, **wanted: Any) -> Splits:
    found = broker.must(broker.engine.ranges.splits, asked(wanted))
    assert isinstance(found, Splits)
    return found


def rows(broker: Broker, start: int, end: int, partition: int = 0) -> list[int]:
    request = RangeRequest(topic="t", partition=partition, start=start, end=end)
    found = broker.must(broker.engine.ranges.open, request)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    table = pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()
    offsets: list[int] = table.column("offset").to_pylist()
    return offsets


@pytest.mark.parametrize("size", [1, 3, 7, 20, 1000])
def test_the_splits_of_a_partition_have_all_its_rows(size: int):
    broker = filled()
    for partition in range(3):
        found = splits(broker, partition=partition, rows=size)
        read = []
        for each in found.splits:
            part = rows(broker, each.start, each.end, partition)
            assert len(part) == each.rows <= size
            read += part
        assert read == list(range(partition, COUNT, 3))
        assert found.next == broker.state.topics["t"].partitions[partition].end_offset
    broker.close()


def test_a_range_of_any_ends_is_split_exactly():
    broker = filled()
    for start in range(0, COUNT, 11):
        for end in range(start, COUNT - 3, 13):
            found = splits(broker, start=start, end=end, rows=5)
            expected = len(range(start + -start % 3, end, 3))
            assert sum(each.rows for each in found.splits) == expected
            assert found.next == end
            if found.splits:
                assert (found.splits[0].start, found.splits[-1].end) == (start, end)
    broker.close()


def test_max_rows_is_exact_and_the_rest_follows_from_next():
    broker = filled()
    at, total, end = 0, 0, broker.state.topics["t"].partitions[0].end_offset
    while at < end:
        found = splits(broker, start=at, max_rows=17, rows=5)
        taken = sum(each.rows for each in found.splits)
        assert taken == min(17, 62 - total)
        at, total = found.next, total + taken
    assert total == 62
    broker.close()


def test_whole_batches_of_history_are_not_cut():
    broker = filled(1)
    refs = broker.engine.parts.window.log(broker.state.topics["t"].id, 0).refs
    largest = max(ref.msgs for ref in refs)
    found = splits(broker, rows=largest)
    for ref in refs:
        homes = [e for e in found.splits if e.start <= ref.first and ref.last < e.end]
        assert len(homes) == 1, "a batch is in no one split"
    broker.close()


def test_splits_are_the_same_before_and_after_a_restart_and_agree_after_sealing():
    broker = filled()
    before = splits(broker, max_rows=40, rows=9)
    broker.restart()
    assert sum(e.rows for e in splits(broker, max_rows=40, rows=9).splits) == 40
    broker.seal()
    after = splits(broker, end=before.next, rows=9)
    assert sum(each.rows for each in after.splits) == 40
    broker.close()


def test_what_is_sealed_while_it_is_split_is_looked_at_again():
    broker = filled()
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.ranges.splits, asked({"rows": 1}))
    broker.seal()
    broker.scheduler.release_reads()
    broker.settle()
    assert [each.rows for each in outcomes[0].splits] == [1] * 62
    broker.close()


def test_splits_are_answered_when_what_is_in_them_is_durable():
    broker = on_disk()
    broker.topic()
    broker.hold_writes()
    broker.submit(broker.engine.produce, broker.command("t", "a"))
    outcomes = broker.submit(broker.engine.ranges.splits, asked({}))
    broker.scheduler.run()
    assert not outcomes
    broker.disk.release()
    broker.settle()
    assert outcomes[0].next == 1
    broker.close()


def test_offsets_at_a_time_are_answered_when_they_are_durable():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    broker.scheduler.is_holding_reads = True
    outcomes = broker.submit(broker.engine.ranges.offsets, "t", 0)
    broker.hold_writes()
    broker.submit(broker.engine.produce, broker.command("t", "b"))
    broker.scheduler.release_reads()
    broker.scheduler.run()
    assert not outcomes
    broker.disk.release()
    broker.settle()
    assert len(outcomes) == 1
    broker.close()


def test_what_retention_has_trimmed_in_part_is_split_from_there():
    broker = filled(1)
    broker.must(broker.engine.configure_topic, "t", None, 40_000)
    broker.pass_ms(3000)
    first = broker.state.topics["t"].partitions[0].first_offset
    assert first > 0
    found = splits(broker, rows=1000)
    assert found.splits[0].start == first
    assert sum(each.rows for each in found.splits) == COUNT - first
    outcome = broker.call(broker.engine.ranges.splits, asked({"start": first - 1}))
    assert type(outcome) is OutOfRange
    broker.close()


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"topic": "nobody"}, NotFound),
        ({"partition": 3}, InvalidArgument),
        ({"start": 5, "end": 4}, InvalidArgument),
        ({"end": COUNT + 1}, NotYet),
    ],
)
def test_what_cannot_be_split_is_refused(wanted: dict[str, Any], kind: type[PenstockError]):
    broker = filled()
    assert type(broker.call(broker.engine.ranges.splits, asked(wanted))) is kind
    broker.close()


def test_an_empty_partition_has_no_splits():
    broker = Broker()
    broker.topic()
    assert splits(broker) == Splits([], 0)
    broker.close()


def test_splits_work_in_memory():
    broker = Broker()
    broker.topic()
    broker.put("t", *"abcde")
    assert [each.rows for each in splits(broker, rows=2).splits] == [2, 2, 1]
    broker.close()
