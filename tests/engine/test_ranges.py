"""Ranges: the same rows every time, from wherever they are, and never a silent hole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.model.envelope import Envelope
from penstock.model.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
)
from penstock.model.limits import KIB, Limits
from penstock.model.ranges import RangeRequest, Selection
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, on_disk

TIGHT = Limits(memory_bytes=20 * KIB, max_partition_msgs=10**6)
SEGMENTS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
COUNT = 210


def produce_some(broker: Broker, first: int, last: int, partitions: int) -> None:
    for n in range(first, last):
        envelope = Envelope(
            partition_override=n % partitions, run_id=f"run {n % 5}", tenant_id=f"tenant {n % 2}"
        )
        broker.produce("t", f"{n} ".ljust(500, "."), key=f"k{n}", envelope=envelope)
        broker.clock.advance(10)


def filled(partitions: int = 1) -> Broker:
    """Rows in history, in the log and in memory."""
    broker = on_disk(limits=TIGHT, options=SEGMENTS)
    broker.topic("t", partitions)
    produce_some(broker, 0, COUNT, partitions)
    log = broker.engine.parts.window.log(broker.state.topics["t"].id, 0)
    assert log.refs, "nothing is sealed: the test is void"
    assert log.chunks[-1].messages, "nothing is in memory: the test is void"
    return broker


def read(broker: Broker, **wanted: Any) -> pa.Table:
    return pa.ipc.open_stream(bytes_of(broker, asked(wanted))).read_all()


def asked(wanted: dict[str, Any]) -> RangeRequest:
    whole: dict[str, Any] = {"topic": "t", "partition": 0}
    return RangeRequest(**whole | wanted)


def bytes_of(broker: Broker, request: RangeRequest) -> bytes:
    found = broker.must(broker.engine.ranges.open, request)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    return b"".join([*pieces, found.tail])


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("offset").to_pylist()
    return found


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_range_has_every_row_once_from_history_log_and_memory(partitions: int):
    broker = filled(partitions)
    for partition in range(partitions):
        table = read(broker, partition=partition)
        assert offsets(table) == list(range(partition, COUNT, partitions))
        assert [value.split()[0] for value in table.column("value").to_pylist()] == [
            str(offset) for offset in offsets(table)
        ]
    broker.close()


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 150), (57, 58), (190, 200), (100, 100)])
def test_a_range_is_exact_wherever_it_begins_and_ends(start: int, end: int):
    broker = filled()
    assert offsets(read(broker, start=start, end=end)) == list(range(start, end))
    broker.close()


def test_a_range_is_the_same_before_and_after_it_is_sealed_and_after_a_restart():
    broker = filled()
    before = read(broker).to_pylist()
    broker.seal()
    assert read(broker).to_pylist() == before
    broker.restart()
    assert read(broker).to_pylist() == before
    broker.close()


def test_what_is_sealed_while_a_range_is_read_is_read_all_the_same():
    broker = filled()
    found = broker.must(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    pieces = [found.head, broker.must(found.next)]
    broker.seal()
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    table = pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()
    assert offsets(table) == list(range(COUNT))
    broker.close()


def test_a_sealed_batch_that_is_wanted_whole_is_copied_as_it_is_on_disk():
    broker = filled()
    ref = broker.engine.parts.window.log(broker.state.topics["t"].id, 0).refs[0]
    assert broker.engine.parts.sealed is not None
    request = RangeRequest(topic="t", partition=0, start=ref.first, end=ref.last + 1)
    found = broker.must(broker.engine.ranges.open, request)
    assert broker.must(found.next) == broker.engine.parts.sealed.history.raw(ref)
    assert broker.must(found.next) is None
    broker.close()


def test_a_range_ends_at_what_was_durable_when_it_was_opened():
    broker = filled()
    found = broker.must(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    produce_some(broker, COUNT, COUNT + 5, 1)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    table = pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()
    assert offsets(table) == list(range(COUNT))
    broker.close()


def test_a_range_is_not_opened_before_what_is_in_it_is_durable():
    broker = on_disk()
    broker.topic()
    broker.submit(broker.engine.produce, broker.command("t", "a"))
    opened = broker.submit(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    assert not opened
    broker.settle()
    assert opened[0].end == 1
    broker.close()


def test_columns_and_rows_can_be_chosen():
    broker = filled()
    table = read(broker, selection=Selection(columns=("run_id", "offset"), run_id="run 3"))
    assert table.column_names == ["offset", "run_id"]
    assert offsets(table) == list(range(3, COUNT, 5))
    both = read(broker, selection=Selection(tenant_id="tenant 1", run_id="run 2"))
    assert offsets(both) == [n for n in range(COUNT) if n % 2 == 1 and n % 5 == 2]
    broker.close()


def test_rows_can_be_chosen_by_time():
    broker = filled()
    times = [time.timestamp() * 1000 for time in read(broker).column("timestamp").to_pylist()]
    chosen = Selection(from_ms=round(times[30]), to_ms=round(times[60]))
    assert offsets(read(broker, selection=chosen)) == list(range(30, 60))
    broker.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_the_offset_of_a_time_is_the_first_of_that_time_or_later(sealed: bool):
    broker = filled()
    times = [time.timestamp() * 1000 for time in read(broker).column("timestamp").to_pylist()]
    if sealed:
        broker.seal()
    for wanted in (0, 1, 77, 150, COUNT - 1):
        at = round(times[wanted])
        (report,) = broker.must(broker.engine.ranges.offsets, "t", at).partitions
        assert report.at_time == wanted
        (report,) = broker.must(broker.engine.ranges.offsets, "t", at - 1).partitions
        assert report.at_time == wanted
    (report,) = broker.must(broker.engine.ranges.offsets, "t", round(times[-1]) + 1).partitions
    assert (report.earliest, report.next, report.at_time) == (0, COUNT, COUNT)
    (report,) = broker.must(broker.engine.ranges.offsets, "t", None).partitions
    assert report.at_time is None
    broker.close()


def test_lines_say_the_same_as_columns():
    broker = filled()
    lines = bytes_of(broker, RangeRequest(topic="t", partition=0, format="ndjson"))
    rows = [msgspec.json.decode(line) for line in lines.splitlines()]
    assert [row["offset"] for row in rows] == list(range(COUNT))
    assert rows[7]["key"] == "k7"
    assert rows[7]["run_id"] == "run 2"
    assert rows[7]["timestamp"].endswith("Z")
    assert "dlq_group" not in rows[7]
    broker.close()


def test_a_broker_in_memory_has_ranges_too():
    broker = Broker()
    broker.topic()
    broker.put("t", "a", "b")
    assert read(broker).column("value").to_pylist() == ["a", "b"]
    broker.close()


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"topic": "nobody"}, NotFound),
        ({"partition": 1}, InvalidArgument),
        ({"start": 5, "end": 4}, InvalidArgument),
        ({"end": COUNT + 1}, NotYet),
        ({"selection": Selection(columns=("colour",))}, InvalidArgument),
    ],
)
def test_a_range_that_cannot_be_is_refused(wanted: dict[str, Any], error: type[PenstockError]):
    broker = filled()
    outcome = broker.call(broker.engine.ranges.open, asked(wanted))
    assert type(outcome) is error
    broker.close()


def test_what_retention_removed_is_refused_and_a_read_that_meets_it_fails():
    broker = filled()
    reader = broker.consume(lease_ms=LONG_MS)
    found = broker.must(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    while reader.items:
        for item in reader.take():
            assert broker.ack(reader, item) is None
    broker.must(broker.engine.configure_topic, "t", 1, None)
    broker.pass_ms(3000)
    assert broker.state.topics["t"].partitions[0].first_offset > 0
    assert isinstance(broker.call(found.next), OutOfRange)
    request = RangeRequest(topic="t", partition=0, start=0)
    assert isinstance(broker.call(broker.engine.ranges.open, request), OutOfRange)
    broker.close()


def test_a_topic_that_is_deleted_while_it_is_read_ends_the_read():
    broker = filled()
    found = broker.must(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    broker.must(broker.engine.delete_topic, "t")
    assert isinstance(broker.call(found.next), NotFound)
    broker.close()


def test_a_damaged_batch_fails_the_read_and_is_never_sent():
    broker = filled()
    history = broker.engine.parts.sealed
    assert history is not None
    ref = broker.engine.parts.window.log(broker.state.topics["t"].id, 0).refs[0]
    damaged = msgspec.structs.replace(ref, crc=ref.crc ^ 1)
    broker.engine.parts.window.log(broker.state.topics["t"].id, 0).refs[0] = damaged
    found = broker.must(broker.engine.ranges.open, RangeRequest(topic="t", partition=0))
    assert isinstance(broker.call(found.next), PenstockError)
    broker.close()


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every read of history fails as no damaged file makes it fail."""

    def fail(*_: object) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr(HistoryReader, "batch", fail)
    monkeypatch.setattr(HistoryReader, "raw", fail)
    yield
    texts = [text for record in caplog.get_records("call") if (text := record.exc_text)]
    assert any("TypeError: a defect" in text for text in texts)


def test_a_defect_while_a_range_is_read_is_told_to_the_reader(defect: None) -> None:
    """Nobody waits for ever, and no thread is kept."""
    broker = filled()
    found = broker.must(broker.engine.ranges.open, asked({}))
    assert isinstance(broker.call(found.next), Internal)


def test_a_defect_while_a_time_is_looked_up_is_told_to_the_caller(defect: None) -> None:
    broker = filled()
    assert isinstance(broker.call(broker.engine.ranges.offsets, "t", 1), Internal)
