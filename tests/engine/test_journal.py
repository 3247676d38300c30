"""The journal at the engine's seam: exact rows, as fresh as asked for, in ranges that hold."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.engine.sealing import MIN_REST_MS
from penstock.model.access import TopicPattern, VisibleTopics
from penstock.model.envelope import Envelope
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotYet,
    OutOfRange,
    PenstockError,
    Unavailable,
)
from penstock.model.journal import JournalReport, JournalRequest, JournalSelection
from penstock.model.limits import KIB, MAX_FRESH_WAIT_MS, Limits
from penstock.model.ranges import RangeFormat
from penstock.model.scopes import full_name
from penstock.model.splits import Split, Splits
from penstock.storage import journal_files
from penstock.storage.log import WalOptions
from penstock.storage.seal import SealJob
from tests.engine.durable_stream_harness import EARLIEST, Streams
from tests.engine.harness import LEASE_MS, LONG_MS, Broker, on_disk, policy
from tests.storage.old_journal import make_old

SEGMENTS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)


def fresh(broker: Broker, time_ms: int | None = None) -> JournalReport:
    """Where the journal ends, with all that is durable now in it."""
    outcomes = broker.submit(broker.engine.journal.offsets, True, time_ms)
    for _ in range(100):
        broker.scheduler.run_until(lambda: bool(outcomes) or is_resting(broker))
        if outcomes:
            assert isinstance(outcomes[0], JournalReport), outcomes[0]
            return outcomes[0]
        broker.pass_ms(100)
    raise AssertionError("never answered")


def is_resting(broker: Broker) -> bool:
    sealing = broker.engine.maintenance.sealing
    return sealing is not None and sealing.requests._alarm is not None


def read(broker: Broker, **wanted: Any) -> pa.Table:
    return pa.ipc.open_stream(bytes_of(broker, JournalRequest(**wanted))).read_all()


def bytes_of(broker: Broker, request: JournalRequest) -> bytes:
    found = broker.must(broker.engine.journal.open, request)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    return b"".join([*pieces, found.tail])


def events(table: pa.Table) -> list[tuple[Any, ...]]:
    names = ("kind", "offset", "group", "owner", "attempt", "reason", "run_id")
    return [tuple(row[name] for name in names) for row in table.to_pylist()]


def lively() -> Broker:
    """Some hundred events over several sealed segments, and some that are not sealed yet."""
    broker = on_disk(options=SEGMENTS)
    broker.topic()
    for n in range(150):
        broker.produce("t", f"{n} ".ljust(500, "."), envelope=Envelope(run_id=f"run {n % 3}"))
        broker.clock.advance(10)
    return broker


def positions(table: pa.Table) -> list[int]:
    found: list[int] = table.column("position").to_pylist()
    return found


def test_the_journal_has_the_life_of_a_message():
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=policy(2, run_id="r"))
    broker.produce("t", "b")
    reader = broker.consume(owner="ada")
    first, second = reader.take()
    assert broker.ack(reader, second) is None
    assert broker.nack(reader, first, "no memory") is None
    broker.settle()
    broker.pass_ms(LEASE_MS + 100)
    fresh(broker)
    assert events(read(broker, selection=JournalSelection(topic="t"))) == [
        ("produced", 0, None, None, None, None, "r"),
        ("produced", 1, None, None, None, None, None),
        ("delivered", 0, "g", "ada", 1, None, "r"),
        ("delivered", 1, "g", "ada", 1, None, None),
        ("acked", 1, "g", "ada", 1, None, None),
        ("nacked", 0, "g", "ada", 1, "no memory", "r"),
        ("delivered", 0, "g", "ada", 2, None, "r"),
        ("timed_out", 0, "g", "ada", 2, "ack_timeout", "r"),
        ("dead_lettered", 0, "g", "ada", 2, "ack_timeout", "r"),
    ]
    assert events(read(broker, selection=JournalSelection(topic="dlq.t"))) == [
        ("produced", 0, None, None, None, None, "r")
    ]
    broker.close()


def times(broker: Broker, **wanted: Any) -> list[tuple[Any, ...]]:
    """Of each row what it is, and when it, the storing and the delivery were."""
    names = ("timestamp", "produced_at", "delivered_at")
    rows = read(broker, selection=JournalSelection(**wanted)).to_pylist()
    return [(row["kind"], *(_milliseconds(row[name]) for name in names)) for row in rows]


def _milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def test_every_row_tells_when_its_message_was_stored_and_its_delivery_made():
    broker = on_disk()
    broker.topic()
    stored = broker.clock.now_ms()
    broker.produce("t", "a", envelope=policy(3))
    broker.pass_ms(70)
    reader = broker.consume(owner="ada")
    item, given = reader.one(), broker.clock.now_ms()
    broker.pass_ms(30)
    broker.nack(reader, item)
    broker.settle()
    again = broker.clock.now_ms()
    broker.pass_ms(LEASE_MS + 5)
    lapsed = broker.clock.now_ms()
    fresh(broker)
    told = times(broker, topic="t")
    assert told[:4] == [
        ("produced", stored, stored, None),
        ("delivered", given, stored, given),
        ("nacked", given + 30, stored, given),
        ("delivered", again, stored, again),
    ]
    kind, ended, produced_at, delivered_at = told[4]
    assert (kind, produced_at, delivered_at) == ("timed_out", stored, again)
    assert again + LEASE_MS <= ended <= lapsed
    third = told[5][1]
    broker.pass_ms(LEASE_MS + 5)
    fresh(broker)
    *_, timed_out, dead = times(broker, topic="t")
    assert (timed_out[0], *timed_out[2:]) == ("timed_out", stored, third)
    assert (dead[0], *dead[2:]) == ("dead_lettered", stored, third)
    [(_, at, copied, none)] = times(broker, topic="dlq.t")
    assert (copied, none) == (at, None)
    broker.close()


def test_a_delivery_that_was_sealed_before_a_restart_ends_with_its_time():
    broker = on_disk()
    broker.topic()
    stored = broker.clock.now_ms()
    broker.put("t", "a", "b")
    broker.pass_ms(50)
    reader = broker.consume(owner="ada", lease_ms=LONG_MS)
    given = broker.clock.now_ms()
    first, second = reader.take()
    broker.seal()
    broker.pass_ms(20)
    broker.restart()
    assert broker.ack(reader, first) is None
    broker.seal_and_crash()
    broker.pass_ms(10)
    assert broker.nack(reader, second) is None
    fresh(broker)
    for kind, count in (("acked", 1), ("nacked", 1)):
        ended = times(broker, kind=kind)
        assert [(row[2], row[3]) for row in ended] == [(stored, given)] * count
    broker.close()


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
def test_a_journal_of_before_there_were_these_times_is_read_in_every_form(form: RangeFormat):
    broker = lively()
    report = fresh(broker)
    before = read(broker).to_pylist()
    broker.close()
    assert make_old(broker.disk, broker.directory) > 1
    broker.open()
    last = broker.produce("t", "later").ts
    fresh(broker)

    def told(**wanted: Any) -> list[tuple[int, bool]]:
        """Position of each row, and whether it says when its message was stored."""
        if form == "arrow":
            rows = read(broker, **wanted).to_pylist()
        else:
            lines = bytes_of(broker, JournalRequest(format=form, **wanted)).splitlines()
            rows = [msgspec.json.decode(line) for line in lines]
        return [(row["position"], row.get("produced_at") is not None) for row in rows]

    old = [(row["position"], False) for row in before]
    assert told(end=report.next) == old
    *rest, newest = told()
    assert (rest, newest[1]) == (old, True)
    assert times(broker)[-1] == ("produced", last, last, None)
    assert told(start=old[40][0], end=old[111][0]) == old[40:111]
    assert told(end=report.next, selection=JournalSelection(run_id="run 1")) == old[1::3]
    assert read(broker, end=report.next).to_pylist() == [
        row | {"produced_at": None} for row in before
    ]
    splits: Splits = broker.must(broker.engine.journal.splits, None, None, 40, 10**6)
    assert sum(split.rows for split in splits.splits) == 151
    broker.close()


def test_the_journal_has_deliveries_that_were_returned_unwritten():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.give_unwritten(reader, "a")
    reader.live.close()
    broker.settle()
    fresh(broker)
    assert [event[:5] for event in events(read(broker))] == [
        ("produced", 0, None, None, None),
        ("delivered", 0, "g", "o", 1),
        ("returned", 0, "g", "o", 1),
    ]
    broker.close()


def test_the_journal_is_the_same_after_a_restart_and_goes_on():
    broker = lively()
    report = fresh(broker)
    before = read(broker).to_pylist()
    assert len(before) == 150
    broker.restart()
    assert read(broker).to_pylist() == before
    assert broker.must(broker.engine.journal.offsets, False, None) == report
    broker.produce("t", "later")
    later = fresh(broker)
    rows = read(broker).to_pylist()
    assert rows[:150] == before
    assert len(rows) == 151
    assert read(broker, start=report.next).num_rows == 1
    assert later.earliest == report.earliest
    broker.close()


def test_nothing_is_lost_or_told_twice_when_the_broker_dies_at_any_point_of_a_fresh_look():
    for turns in range(12):
        broker = lively()
        expected = read_after(broker, None)
        broker.produce("t", "x")
        broker.submit(broker.engine.journal.offsets, True, None)
        for _ in range(turns):
            if broker.scheduler._turns:
                broker.scheduler._turns.popleft()()
        broker.crash()
        assert read_after(broker, None)[: len(expected)] == expected
        told = read(broker).to_pylist()
        assert [row["offset"] for row in told] == list(range(151))
        broker.close()


def read_after(broker: Broker, start: int | None) -> list[Any]:
    fresh(broker)
    rows: list[Any] = read(broker, start=start).to_pylist()
    return rows


# Durable streams


@pytest.fixture
def streams() -> Iterator[Streams]:
    """A durable stream and a topic of the same name, with the same partition and offsets."""
    streams = Streams()
    topic = full_name(("acme", "prod"), "orders")
    streams.topic(topic)
    streams.put(topic, "message")
    reader = streams.named("billing", "ada", EARLIEST)
    streams.publish(b"one", b"two")
    first, second = reader.take()
    assert streams.ack_item(reader, second) is None
    assert streams.nack(reader, first.offset, "no memory", delay_ms=0) is None
    streams.pass_ms(5)
    assert streams.ack_item(reader, reader.one()) is None
    fresh(streams)
    yield streams
    streams.close()


def test_the_journal_tells_the_events_of_a_stream_from_messages_of_a_topic(streams: Streams):
    columns = ("kind", "offset", "group", "owner", "attempt", "reason", "run_id")
    of_stream = JournalSelection(topic="orders", resource_kind="stream", columns=columns)
    assert events(read(streams, selection=of_stream)) == [
        ("produced", 0, None, None, None, None, None),
        ("produced", 1, None, None, None, None, None),
        ("delivered", 0, "billing", "ada", 1, None, None),
        ("delivered", 1, "billing", "ada", 1, None, None),
        ("acked", 1, "billing", "ada", 1, None, None),
        ("nacked", 0, "billing", "ada", 1, "no memory", None),
        ("delivered", 0, "billing", "ada", 2, None, None),
        ("acked", 0, "billing", "ada", 2, None, None),
    ]
    of_topic = read(streams, selection=JournalSelection(topic="orders", resource_kind="topic"))
    assert events(of_topic) == [("produced", 0, None, None, None, None, None)]
    kinds = read(streams).column("resource_kind").to_pylist()
    assert (kinds.count("topic"), kinds.count("stream"), len(kinds)) == (1, 8, 9)
    places = {(row["tenant"], row["namespace"], row["topic"]) for row in read(streams).to_pylist()}
    assert places == {("acme", "prod", "orders")}


@pytest.mark.parametrize(("kind", "rows"), [("topic", 1), ("stream", 8), ("cache", 0), ("*", 9)])
def test_who_may_see_a_topic_does_not_see_the_stream_of_the_same_name(
    streams: Streams, kind: str, rows: int
):
    visible = VisibleTopics((TopicPattern("acme", "prod", kind, "orders"),))
    assert read(streams, selection=JournalSelection(visible=visible)).num_rows == rows


def test_a_journal_of_before_there_were_kinds_of_resources_has_rows_of_topics(streams: Streams):
    streams.close()
    assert make_old(streams.disk, streams.directory)
    streams.open()
    assert set(read(streams).column("resource_kind").to_pylist()) == {"topic"}
    streams.publish(b"three")
    fresh(streams)
    assert read(streams).column("resource_kind").to_pylist()[-1] == "stream"


# Freshness


def test_without_fresh_only_what_was_sealed_is_there():
    broker = lively()
    report = broker.must(broker.engine.journal.offsets, False, None)
    assert 0 < read(broker).num_rows < 150
    assert report.next == broker.log.first_position
    assert fresh(broker).next > report.next
    assert read(broker).num_rows == 150
    broker.close()


def test_fresh_is_answered_at_once_when_nothing_was_recorded_since():
    broker = lively()
    fresh(broker)
    segment = broker.log.segment_of_open_frame
    outcomes = broker.submit(broker.engine.journal.offsets, True, None)
    assert isinstance(outcomes[0], JournalReport)
    assert broker.log.segment_of_open_frame == segment
    broker.close()


def test_all_who_wait_share_a_run_and_the_next_one_waits_its_time():
    broker = lively()
    fresh(broker)
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    broker.pass_ms(MIN_REST_MS)
    runs = sealing.runs
    broker.produce("t", "x")
    waiting = [broker.submit(broker.engine.journal.offsets, True, None) for _ in range(5)]
    broker.scheduler.run_until(lambda: all(waiting))
    assert sealing.runs == runs + 1
    broker.produce("t", "y")
    late = broker.submit(broker.engine.journal.offsets, True, None)
    broker.pass_ms(MIN_REST_MS - 10)
    assert not late
    assert sealing.runs == runs + 1
    broker.pass_ms(10)
    broker.scheduler.run_until(lambda: bool(late))
    assert sealing.runs == runs + 2
    assert read(broker).num_rows == 152
    broker.close()


def test_a_run_that_takes_long_makes_the_next_one_wait_longer():
    broker = lively()
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    sealer: Any = sealing._sealer
    run = sealer._run

    def run_slowly(job: SealJob) -> None:
        broker.clock.advance(2_000)
        run(job)

    sealer._run = run_slowly
    outcomes = broker.submit(broker.engine.journal.offsets, True, None)
    broker.scheduler.run_until(lambda: bool(outcomes))
    broker.produce("t", "y")
    late = broker.submit(broker.engine.journal.offsets, True, None)
    broker.pass_ms(9_900)
    assert not late
    broker.pass_ms(100)
    broker.scheduler.run_until(lambda: bool(late))
    broker.close()


def test_a_run_that_fails_refuses_those_who_wait():
    broker = lively()
    outcomes = broker.submit(broker.engine.journal.offsets, True, None)
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    sealing._failed("the disk is full")
    assert isinstance(outcomes[0], Unavailable)
    broker.close()


def test_nobody_waits_for_ever_and_nobody_is_left_waiting():
    broker = lively()
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    sealer: Any = sealing._sealer
    sealer.is_held = True
    outcomes = broker.submit(broker.engine.journal.offsets, True, None)
    broker.pass_ms(MAX_FRESH_WAIT_MS)
    assert not outcomes
    broker.pass_ms(2_000)
    assert isinstance(outcomes[0], Unavailable)
    last = broker.submit(broker.engine.journal.offsets, True, None)
    broker.close()
    assert isinstance(last[0], Unavailable)


# Ranges


def test_what_is_sealed_and_merged_while_it_is_read_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(journal_files, "MERGED_FILES", 3)
    broker = lively()
    fresh(broker)
    found = broker.must(broker.engine.journal.open, JournalRequest())
    pieces = [found.head, broker.must(found.next)]
    for n in range(4):
        broker.produce("t", f"later {n}")
        fresh(broker)
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    table = pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()
    assert [row["offset"] for row in table.to_pylist()] == list(range(150))
    assert [row["offset"] for row in read(broker).to_pylist()] == list(range(154))
    broker.close()


def test_a_file_that_goes_between_the_look_up_and_the_read_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(journal_files, "MERGED_FILES", 2)
    broker = lively()
    report = fresh(broker)
    found = broker.must(broker.engine.journal.open, JournalRequest())
    broker.scheduler.is_holding_reads = True
    piece = broker.submit(found.next)
    for n in range(3):
        broker.produce("t", f"later {n}")
        fresh(broker)
    # What is removed goes before it is read.
    broker.scheduler.held_reads.reverse()
    broker.scheduler.release_reads()
    broker.settle()
    pieces = [found.head, *piece]
    while (more := broker.must(found.next)) is not None:
        pieces.append(more)
    table = pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()
    assert positions(table) == positions(read(broker, end=report.next))
    broker.close()


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 120), (57, 58), (100, 100), (0, 150)])
def test_a_range_is_exact_wherever_it_begins_and_ends(first: int, last: int):
    broker = lively()
    report = fresh(broker)
    found = [*positions(read(broker)), report.next]
    table = read(broker, start=found[first], end=found[last])
    assert positions(table) == found[first:last]
    broker.close()


def test_rows_and_columns_can_be_chosen():
    broker = lively()
    reader = broker.consume(owner="ada", prefetch=2)
    broker.ack(reader, reader.items[0])
    fresh(broker)
    chosen = JournalSelection(columns=("kind", "offset"), run_id="run 1")
    table = read(broker, selection=chosen)
    assert table.column_names == ["kind", "offset"]
    assert {row["offset"] % 3 for row in table.to_pylist()} == {1}
    assert read(broker, selection=JournalSelection(kind="acked")).num_rows == 1
    assert read(broker, selection=JournalSelection(group="g", kind="produced")).num_rows == 0
    assert read(broker, selection=JournalSelection(topic="other")).num_rows == 0
    times = [row["timestamp"].timestamp() * 1000 for row in read(broker).to_pylist()]
    window = JournalSelection(from_ms=round(times[30]), to_ms=round(times[60]))
    assert [row["offset"] for row in read(broker, selection=window).to_pylist()] == list(
        range(30, 60)
    )
    broker.close()


def test_lines_say_the_same_as_columns():
    broker = lively()
    fresh(broker)
    lines = bytes_of(broker, JournalRequest(format="ndjson")).splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert [row["position"] for row in rows] == positions(read(broker))
    assert rows[0].keys() == {
        "position", "timestamp", "kind", "topic", "partition", "offset", "run_id", "produced_at",
        "resource_kind",
    }  # fmt: skip
    broker.close()


def test_the_position_of_a_time_is_the_first_of_that_time_or_later():
    broker = lively()
    fresh(broker)
    rows = read(broker).to_pylist()
    for wanted in (0, 1, 77, 149):
        at = round(rows[wanted]["timestamp"].timestamp() * 1000)
        for time_ms in (at, at - 9):
            report = broker.must(broker.engine.journal.offsets, False, time_ms)
            assert report.at_time == rows[wanted]["position"]
    report = broker.must(broker.engine.journal.offsets, False, at + 1)
    assert report.at_time == report.next
    broker.close()


def test_splits_share_out_every_row():
    broker = lively()
    report = fresh(broker)
    found: Splits = broker.must(broker.engine.journal.splits, None, None, 40, 10**6)
    assert all(0 < split.rows <= 40 for split in found.splits)
    assert sum(split.rows for split in found.splits) == 150
    assert found.splits[0].start == report.earliest
    assert found.next == found.splits[-1].end == report.next
    rows = [positions(read(broker, start=s.start, end=s.end)) for s in found.splits]
    assert [len(part) for part in rows] == [split.rows for split in found.splits]
    assert list(chain(*rows)) == positions(read(broker))
    some: Splits = broker.must(broker.engine.journal.splits, None, None, 40, 7)
    assert some.splits == [Split(report.earliest, some.next, 7)]
    assert positions(read(broker))[7] == some.next
    broker.close()


def test_what_cannot_be_read_is_refused():
    broker = lively()
    report = fresh(broker)
    journal = broker.engine.journal
    for request, error in [
        (JournalRequest(start=report.earliest - 1), OutOfRange),
        (JournalRequest(end=report.next + 1), NotYet),
        (JournalRequest(start=report.next, end=report.earliest), InvalidArgument),
        (JournalRequest(selection=JournalSelection(columns=("colour",))), InvalidArgument),
    ]:
        assert type(broker.call(journal.open, request)) is error
    assert type(broker.call(journal.splits, 0, None, 10, 10)) is OutOfRange
    broker.close()


@pytest.mark.parametrize("on_a_disk", [False, True])
def test_without_a_journal_every_question_is_refused_with_the_reason(on_a_disk: bool):
    broker = on_disk(limits=Limits(journal_retention_ms=0)) if on_a_disk else Broker()
    journal = broker.engine.journal
    for outcome in (
        broker.call(journal.open, JournalRequest()),
        broker.call(journal.offsets, True, None),
        broker.call(journal.splits, None, None, 10, 10),
        broker.call(journal.set_archived, 0),
    ):
        assert type(outcome) is FailedPrecondition
        assert ("journal_retention_ms" in outcome.message) == on_a_disk
    broker.close()


def test_what_retention_removed_is_refused_and_a_read_that_meets_it_fails():
    broker = on_disk(limits=Limits(journal_retention_ms=60_000), options=SEGMENTS)
    broker.topic()
    broker.put("t", "a", "b")
    before = fresh(broker)
    found = broker.must(broker.engine.journal.open, JournalRequest())
    broker.pass_ms(61_000)
    broker.put("t", "c")
    after = fresh(broker)
    assert after.earliest > before.earliest
    assert [row["offset"] for row in read(broker).to_pylist()] == [2]
    assert isinstance(broker.call(found.next), OutOfRange)
    outcome = broker.call(broker.engine.journal.open, JournalRequest(start=before.earliest))
    assert type(outcome) is OutOfRange
    assert not [path for path in broker.disk.paths() if "journal" in path][1:]
    broker.restart()
    assert broker.must(broker.engine.journal.offsets, False, None) == after
    broker.close()


def test_who_has_read_to_the_end_may_go_on_from_there_after_all_of_it_is_gone():
    broker = on_disk(limits=Limits(journal_retention_ms=1_000), options=SEGMENTS)
    broker.topic()
    broker.put("t", "a")
    end = fresh(broker).next
    broker.pass_ms(5_000)
    broker.put("t", "b")
    fresh(broker)
    assert [row["offset"] for row in read(broker, start=end).to_pylist()] == [1]
    broker.close()


def test_a_damaged_batch_fails_the_read_and_is_never_sent():
    broker = lively()
    fresh(broker)
    journal = broker.engine.journal
    ref = journal._index.refs[0]
    journal._index.refs[0] = msgspec.structs.replace(ref, crc=ref.crc ^ 1)
    found = broker.must(journal.open, JournalRequest())
    assert isinstance(broker.call(found.next), PenstockError)
    broker.close()
