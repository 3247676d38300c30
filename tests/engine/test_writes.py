"""Writes by batch: staged, committed, stored once."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from penstock.api.outcomes import Done
from penstock.core import write_rules
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.engine import batch_storing
from penstock.engine.staging import FORGOTTEN_MS, LOOK_MS
from penstock.model.envelope import Envelope, RetryPolicy, Routing
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from penstock.model.limits import Limits
from penstock.model.writes import CommitReport, PartCommit, PieceReport, WriterReport
from tests.engine.harness import values
from tests.engine.write_harness import WriteBroker, numbered, write_broker

SECOND_MS = 1000


def refused(broker: WriteBroker, rows: int, **options: object) -> PenstockError:
    outcome = broker.try_commit(rows, **options)
    assert isinstance(outcome, PenstockError), outcome
    return outcome


def test_what_is_staged_is_stored_by_its_commit_and_not_before():
    broker = write_broker()
    report = broker.stage(numbered(3))
    assert report.rows == 3
    assert broker.contents() == []
    assert broker.commit_batch(3) == CommitReport("committed", 3)
    assert broker.contents() == numbered(3)
    check(broker.state)
    assert broker.staged_files() == []
    assert broker.engine.writes.staging.bytes == 0
    broker.close()


def test_a_batch_of_many_bursts_and_pieces_is_stored_in_order():
    broker = write_broker()
    for part in range(3):
        for piece in range(2):
            broker.stage(numbered(9_000, f"{part}/{piece}"), part=part, piece=piece)
    parts = [PartCommit(part, "a", 2, 18_000) for part in range(3)]
    assert broker.commit_batch(0, parts=parts) == CommitReport("committed", 54_000)
    expected = [
        row for part in range(3) for piece in range(2) for row in numbered(9_000, f"{part}/{piece}")
    ]
    assert broker.contents() == expected
    image = take_image(broker.state)
    broker.crash()
    assert take_image(broker.state) == image
    broker.close()


def test_a_commit_is_answered_when_its_rows_are_durable():
    broker = write_broker()
    broker.stage(numbered(3))
    broker.hold_writes()
    outcomes = broker.ask_commit(3)
    broker.scheduler.run_until(lambda: broker.disk.is_held)
    assert outcomes == []
    broker.disk.release()
    broker.settle()
    assert outcomes == [CommitReport("committed", 3)]
    broker.close()


def test_an_empty_batch_is_committed_too():
    broker = write_broker()
    assert broker.commit_batch(0, parts=[]) == CommitReport("committed", 0)
    broker.stage([], batch=1)
    assert broker.commit_batch(0, batch=1) == CommitReport("committed", 0)
    assert broker.commit_batch(0, batch=1) == CommitReport("already_committed", 0)
    assert broker.staged_files() == []
    broker.close()


# -- once -----------------------------------------------------------------------------------------


def test_a_batch_that_is_committed_again_stores_nothing():
    broker = write_broker()
    broker.write_batch(numbered(3), batch=7)
    for batch, rows in ((7, 3), (6, 0), (0, 0)):
        assert broker.commit_batch(3, batch=batch) == CommitReport("already_committed", rows)
        assert isinstance(broker.stage_in_vain(["x"], batch=batch), FailedPrecondition)
    assert broker.contents() == numbered(3)
    broker.write_batch(["next"], batch=8)
    assert broker.contents() == [*numbered(3), "next"]
    broker.close()


def test_producers_count_their_batches_each_for_itself():
    broker = write_broker()
    broker.write_batch(["one"], producer="p", batch=5)
    broker.write_batch(["two"], producer="q", batch=0)
    assert broker.contents() == ["one", "two"]
    broker.close()


def test_a_piece_that_is_sent_again_takes_the_place_of_the_first():
    broker = write_broker()
    broker.stage(["old", "old"])
    broker.stage(["new"])
    assert len(broker.staged_files()) == 1
    assert broker.commit_batch(1) == CommitReport("committed", 1)
    assert broker.contents() == ["new"]
    broker.close()


def test_of_several_attempts_only_that_of_the_commit_is_stored():
    broker = write_broker()
    broker.stage(["failed"], attempt="first", batch=1)
    broker.stage(["good"], attempt="second", batch=1)
    broker.stage(["of an earlier batch"], part=3)
    broker.commit_batch(1, attempt="second", batch=1)
    assert broker.contents() == ["good"]
    assert broker.staged_files() == []
    broker.close()


def test_commits_of_the_same_batch_at_once_share_one_outcome():
    broker = write_broker()
    broker.stage(numbered(5000))
    outcomes = [broker.ask_commit(5000) for _ in range(3)]
    broker.settle()
    assert outcomes == [[CommitReport("committed", 5000)]] * 3
    assert broker.contents() == numbered(5000)
    broker.close()


def test_a_batch_behind_one_that_is_being_stored_is_stored_after_it():
    broker = write_broker()
    broker.stage(numbered(5000, "first"), batch=0)
    broker.stage(numbered(10, "second"), batch=1)
    outcomes = [broker.ask_commit(5000, batch=0), broker.ask_commit(10, batch=1)]
    broker.settle()
    assert outcomes == [[CommitReport("committed", 5000)], [CommitReport("committed", 10)]]
    assert broker.contents() == [*numbered(5000, "first"), *numbered(10, "second")]
    broker.close()


def test_too_many_batches_behind_each_other_are_429():
    broker = write_broker()
    for batch in range(17):
        broker.stage(numbered(2), batch=batch)
    outcomes = [broker.ask_commit(2, batch=batch) for batch in range(17)]
    broker.settle()
    broker.pass_ms(100)
    error = outcomes[16][0]
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "storing_batches"
    assert [each[0].status for each in outcomes[:16]] == ["committed"] * 16
    assert broker.commit_batch(2, batch=16).status == "committed"
    assert broker.contents() == numbered(2) * 17
    broker.close()


def test_a_small_batch_is_not_held_up_by_a_large_one_of_another_producer():
    broker = write_broker()
    broker.stage(numbered(8000, "large"), producer="large")
    broker.stage(numbered(10, "small"), producer="small")
    broker.ask_commit(8000, producer="large")
    broker.ask_commit(10, producer="small")
    broker.settle()
    found = broker.contents()
    assert [row for row in found if row.startswith("large")] == numbered(8000, "large")
    assert [row for row in found if row.startswith("small")] == numbered(10, "small")
    assert found.index("small 9") < 3000
    broker.close()


# -- a commit that is not of what is staged --------------------------------------------------------


def test_a_commit_of_other_rows_than_are_staged_is_409_and_decides_nothing():
    broker = write_broker()
    broker.stage(numbered(3))
    assert "has 3 rows staged; the commit says 4" in refused(broker, 4).message
    missing = refused(broker, 3, pieces=2)
    assert isinstance(missing, FailedPrecondition)
    assert "piece 1 of part 0, attempt 'a', is not staged" in missing.message
    assert isinstance(refused(broker, 3, attempt="b"), FailedPrecondition)
    twice = [PartCommit(0, "a", 1, 3), PartCommit(0, "a", 1, 3)]
    assert isinstance(refused(broker, 0, parts=twice), InvalidArgument)
    many = [PartCommit(0, "a", 10_001, 3)]
    assert isinstance(refused(broker, 0, parts=many), TooLarge)
    assert broker.contents() == []
    assert broker.commit_batch(3) == CommitReport("committed", 3)
    broker.close()


def test_a_dropped_batch_is_not_there_to_be_committed():
    broker = write_broker()
    broker.stage(numbered(3))
    assert broker.call(broker.engine.writes.abort, "p", 0) is None
    assert broker.staged_files() == []
    assert isinstance(refused(broker, 3), FailedPrecondition)
    broker.write_batch(numbered(2))
    assert broker.call(broker.engine.writes.abort, "p", 0) is None
    assert broker.contents() == numbered(2)
    broker.close()


def test_dropping_a_batch_that_is_being_stored_takes_nothing_from_it():
    broker = write_broker()
    broker.stage(numbered(5000))
    outcomes = broker.ask_commit(5000)
    broker.engine.writes.abort("p", 0, lambda _: None)
    broker.settle()
    broker.pass_ms(100)
    assert outcomes == [CommitReport("committed", 5000)]
    assert broker.contents() == numbered(5000)
    broker.close()


def test_a_piece_that_comes_while_its_batch_is_committed_is_refused_and_leaves_nothing():
    broker = write_broker()
    broker.stage(["counts"])
    broker.scheduler.is_holding_reads = True
    late = broker.submit(_stage_zombie, broker)
    broker.scheduler.is_holding_reads = False
    commit = broker.ask_commit(1)
    broker.scheduler.release_reads()
    broker.settle()
    assert isinstance(late[0], FailedPrecondition)
    assert commit == [CommitReport("committed", 1)]
    assert broker.staged_files() == []
    assert broker.engine.writes.staging.pieces == 0
    broker.close()


def _stage_zombie(broker: WriteBroker, done: Done[PieceReport]) -> None:
    broker.start_stage(["zombie"], done, attempt="zombie")


# -- rows -----------------------------------------------------------------------------------------


def test_rows_carry_what_a_produce_carries():
    broker = write_broker()
    broker.topic("u", partitions=3)
    table = pa.table(
        {
            "value": ["a", "b", "c"],
            "key": ["k", None, "n"],
            "topic": [None, "u", "u"],
            "run_id": ["run", None, ""],
            "partition_override": pa.array([None, 2, None], pa.int32()),
            "retry_max_attempts": pa.array([3, None, 0]),
            "retry_backoff_ms": pa.array([10, None, None]),
            "routing_label": [None, "label", None],
            "deadline": ["2999-01-01T00:00:00+00:00", None, None],
        }
    )
    broker.stage(table)
    broker.commit_batch(3)
    [first] = broker.stored("t")
    assert (first.key, first.value) == ("k", "a")
    assert first.envelope == Envelope(
        run_id="run", deadline="2999-01-01T00:00:00Z", retry_policy=RetryPolicy(3, 10)
    )
    [second] = broker.stored("u", 2)[:1]
    assert second.envelope == Envelope(partition_override=2)
    assert second.routing == Routing("label")
    by_key = broker.produce("u", "beside", "n")
    assert [m.value for m in broker.stored("u", by_key.partition) if m.key == "n"] == [
        "c",
        "beside",
    ]
    broker.close()


def test_rows_of_a_topic_that_was_deleted_meanwhile_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
):
    broker = write_broker()
    broker.topic("gone")
    broker.stage(pa.table({"value": numbered(6), "topic": ["t", "gone"] * 3}))
    broker.must(broker.engine.delete_topic, "gone")
    with caplog.at_level(logging.WARNING):
        assert broker.commit_batch(6) == CommitReport("committed", 6)
    assert broker.contents() == numbered(6)[::2]
    assert broker.engine.writes.batches.skipped == 3
    assert "3 rows were left out" in caplog.text
    broker.close()


def test_rows_for_a_partition_that_is_gone_are_left_out_too():
    broker = write_broker()
    broker.topic("u", partitions=3)
    broker.stage(pa.table({"value": ["a", "b"], "partition_override": [2, 0]}), topic="u")
    broker.must(broker.engine.delete_topic, "u")
    broker.topic("u", partitions=1)
    broker.commit_batch(2)
    assert broker.contents("u") == ["b"]
    broker.close()


def test_a_deadline_of_a_row_is_compared_with_the_machines_clock():
    broker = write_broker()
    broker.clock.behind_ms = 1_000_000
    soon_ms = broker.clock.wall_ms() + 50
    deadline = pa.array([soon_ms * 1000] * 2).cast(pa.timestamp("us", "UTC"))
    table = pa.table({"value": numbered(2), "deadline": deadline})
    broker.stage(table)
    broker.pass_ms(100)
    assert "deadline has already passed" in broker.stage_in_vain(table, batch=1).message
    broker.close()


def test_a_deadline_that_passes_after_staging_does_not_matter():
    broker = write_broker()
    soon_ms = broker.clock.now_ms() + 50
    deadline = pa.array([soon_ms * 1000] * 2).cast(pa.timestamp("us", "UTC"))
    table = pa.table({"value": numbered(2), "deadline": deadline})
    broker.stage(table)
    broker.pass_ms(100)
    assert "deadline has already passed" in broker.stage_in_vain(table, batch=1).message
    assert broker.commit_batch(2).rows == 2
    assert broker.contents() == numbered(2)
    broker.close()


def test_idempotency_keys_hold_between_produces_and_batches():
    broker = write_broker()
    broker.produce("t", "produced", envelope=Envelope(idempotency_key="one", tenant_id="x"))
    keys = ["one", "two", "two", None]
    tenants = ["x", "x", "x", "x"]
    broker.stage(pa.table({"value": numbered(4), "idempotency_key": keys, "tenant_id": tenants}))
    assert broker.commit_batch(4) == CommitReport("committed", 4)
    assert broker.contents() == ["produced", "row 1", "row 3"]
    again = broker.try_produce(
        "t", "again", envelope=Envelope(idempotency_key="two", tenant_id="x")
    )
    assert again is None
    image = take_image(broker.state)
    broker.crash()
    assert take_image(broker.state) == image
    broker.close()


def test_those_who_consume_are_given_the_rows():
    broker = write_broker(limits=Limits(lease_ms=10**6, max_in_flight=10_000))
    reader = broker.consume()
    broker.write_batch(numbered(2000))
    broker.pass_ms(100)
    assert values(reader.items) == numbered(2000)
    broker.close()


# -- limits ----------------------------------------------------------------------------------------


def test_a_full_partition_refuses_a_commit_and_one_batch_may_pass_the_limit():
    broker = write_broker(limits=Limits(max_partition_msgs=10))
    broker.stage(numbered(25))
    assert broker.commit_batch(25).rows == 25
    broker.stage(["more"], batch=1)
    error = refused(broker, 1, batch=1)
    assert isinstance(error, ResourceExhausted)
    assert (error.limit, error.partition) == ("partition_msgs", 0)
    assert broker.contents() == numbered(25)
    reader = broker.consume(prefetch=25)
    for item in reader.take():
        broker.ack(reader, item)
    assert broker.commit_batch(1, batch=1).status == "committed"
    broker.close()


def test_a_full_partition_does_not_refuse_what_goes_elsewhere():
    broker = write_broker(limits=Limits(max_partition_msgs=1))
    broker.topic("u", partitions=2)
    broker.stage(pa.table({"value": ["a"], "partition_override": [0]}), topic="u")
    broker.commit_batch(1)
    broker.stage(pa.table({"value": ["b"], "partition_override": [1]}), topic="u", batch=1)
    assert broker.commit_batch(1, batch=1).status == "committed"
    broker.stage(pa.table({"value": ["c"], "partition_override": [1]}), topic="u", batch=2)
    assert isinstance(refused(broker, 1, batch=2), ResourceExhausted)
    broker.close()


def test_no_more_is_staged_than_max_staged_bytes():
    broker = write_broker(limits=Limits(max_staged_bytes=100_000))
    broker.stage(["x" * 60_000])
    error = broker.stage_in_vain(["x" * 60_000], piece=1)
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "staged_bytes"
    broker.commit_batch(1)
    broker.stage(["x" * 60_000], batch=1)
    broker.close()


def test_no_more_producers_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_rules, "MAX_PRODUCERS", 2)
    broker = write_broker()
    broker.stage(["staged before"], producer="third")
    broker.write_batch(["a"], producer="first")
    broker.write_batch(["b"], producer="second")
    for error in (
        broker.stage_in_vain(["c"], producer="fourth"),
        refused(broker, 1, producer="third"),
    ):
        assert isinstance(error, ResourceExhausted)
        assert error.limit == "producers"
    broker.write_batch(["d"], producer="first", batch=1)
    broker.close()


def test_pieces_that_nobody_commits_go_after_a_day():
    broker = write_broker()
    broker.stage(numbered(3))
    broker.pass_ms(SECOND_MS)
    broker.clock.advance(FORGOTTEN_MS - LOOK_MS)
    broker.pass_ms(SECOND_MS)
    assert len(broker.staged_files()) == 1
    broker.clock.advance(2 * LOOK_MS)
    broker.pass_ms(SECOND_MS)
    assert broker.staged_files() == []
    assert isinstance(refused(broker, 3), FailedPrecondition)
    broker.close()


def test_unknown_topics_are_refused_when_they_are_staged():
    broker = write_broker()
    error = broker.stage_in_vain(pa.table({"value": numbered(3), "topic": ["t", "t", "none"]}))
    assert isinstance(error, NotFound)
    assert error.message.startswith("row 2: unknown topic 'none'")
    override = pa.table({"value": numbered(2), "partition_override": [0, 1]})
    error = broker.stage_in_vain(override)
    assert "row 1: partition_override 1 is out of range" in error.message
    assert broker.staged_files() == []
    broker.close()


# -- looking ---------------------------------------------------------------------------------------


def test_a_producer_can_be_looked_at():
    broker = write_broker()
    assert isinstance(broker.call(broker.engine.writes.describe, "p"), NotFound)
    broker.write_batch(numbered(3), batch=4)
    at_ms = broker.clock.now_ms()
    report = broker.must(broker.engine.writes.describe, "p")
    assert report == WriterReport("p", 4, 3, at_ms, storing=False)
    broker.seal_and_crash()
    assert broker.must(broker.engine.writes.describe, "p") == report
    broker.close()


# -- beside others ---------------------------------------------------------------------------------


def test_while_others_are_busy_bursts_are_small_and_have_a_rest_between():
    broker = write_broker()
    broker.stage(numbered(3000))
    outcomes = broker.ask_commit(3000)
    stored = []
    while not outcomes:
        rows = broker.engine.writes.batches.rows
        for n in range(3):
            broker.produce("t", f"beside {n}")
        broker.pass_ms(1)
        stored.append(broker.engine.writes.batches.rows - rows)
        assert len(stored) < 1000
    assert max(stored) <= 2 * batch_storing.SHARED_ROWS
    assert [row for row in broker.contents() if row.startswith("row")] == numbered(3000)
    broker.close()


def test_what_takes_long_is_answered_with_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    broker = write_broker()
    broker.stage(numbered(10))
    monkeypatch.setattr(batch_storing.BatchStoring, "turn", lambda self: None)
    first, second = broker.ask_commit(10), broker.ask_commit(10)
    broker.pass_ms(19_000)
    assert first == second == []
    assert broker.must(broker.engine.writes.describe, "p").storing
    broker.pass_ms(1_000)
    assert first == second == [CommitReport("storing", 10, 0)]
    third = broker.ask_commit(10)
    monkeypatch.undo()
    broker.put("t", "beside")
    broker.pass_ms(SECOND_MS)
    assert third == [CommitReport("committed", 10)]
    assert broker.contents() == ["beside", *numbered(10)]
    broker.close()


def test_a_broker_that_stops_answers_those_who_wait_and_goes_on_after_its_start(
    monkeypatch: pytest.MonkeyPatch,
):
    broker = write_broker()
    broker.stage(numbered(10))
    monkeypatch.setattr(batch_storing.BatchStoring, "turn", lambda self: None)
    outcomes = broker.ask_commit(10)
    broker.settle()
    broker.engine.end_streams("the broker is stopping")
    assert outcomes == [CommitReport("storing", 10, 0)]
    broker.close()
    monkeypatch.undo()
    broker.open()
    assert broker.contents() == numbered(10)
    broker.close()


def test_a_log_that_fails_refuses_those_who_wait():
    broker = write_broker()
    broker.stage(numbered(10))
    broker.disk.fail_call(1, 5, only=["write", "sync"], path=broker.log.files.active.path)
    outcomes = broker.ask_commit(10)
    broker.settle()
    assert isinstance(outcomes[0], Unavailable)
    assert isinstance(broker.stage_in_vain(["x"], batch=1), Unavailable)
    assert isinstance(refused(broker, 10), Unavailable)
    broker.crash()
    assert broker.contents() in ([], numbered(10))
    assert broker.commit_batch(10).rows == 10
    assert broker.contents() == numbered(10)
    broker.close()


def test_a_memory_broker_takes_batches_within_its_memory():
    broker = WriteBroker(limits=Limits(memory_bytes=2_000_000))
    broker.topic()
    assert broker.write_batch(numbered(1000)).rows == 1000
    assert broker.contents() == numbered(1000)
    broker.stage(["x" * 900_000] * 2, batch=1)
    assert isinstance(broker.stage_in_vain(["x" * 900_000], batch=1, piece=1), ResourceExhausted)
    broker.commit_batch(2, batch=1)
    broker.stage(["x"] * 10, batch=2)
    error = refused(broker, 10, batch=2)
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "memory_bytes"
    broker.close()
