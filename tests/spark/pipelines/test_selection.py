"""Which messages a replay takes, where they go, and in which order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.pipelines.replays import MAX_CHUNK_ROWS, Pace
from penstock.spark.pipelines.selection import Criteria, chosen, in_chunks, marked, without
from penstock.spark.pipelines.targets import as_sent
from tests.spark.pipelines.messages import NOON, message, records

LETTER = {"topic": "dlq.orders", "dlq_original_topic": "orders"}


@pytest.fixture(scope="module")
def stored(spark: SparkSession) -> DataFrame:
    return records(
        spark,
        message(0, run_id="run-1", tenant_id="ada", idempotency_key="once"),
        message(1, run_id="run-1", tenant_id="bob"),
        message(2, run_id="run-2", tenant_id="ada", **LETTER, dlq_last_error="no memory at 0x1f"),
        message(3, **LETTER, dlq_last_error="no memory at 0x2e"),
        message(4, **LETTER, dlq_last_error="timeout"),
        message(5, topic="dlq.orders"),
    ).cache()


@pytest.mark.parametrize(
    ("criteria", "offsets"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"since": NOON + timedelta(minutes=1), "until": NOON + timedelta(minutes=3)}, [1, 2]),
        ({"run": "run-1", "tenant": "ada"}, [0]),
        ({"reason": "memory"}, [2, 3]),
        ({"reason": "no memory at <hex>"}, [2, 3]),
        ({"where": "offset % 2 = 0 and key <> 'key 0'"}, [2, 4]),
    ],
)
def test_messages_are_taken_by_every_criterion(
    stored: DataFrame, criteria: dict[str, Any], offsets: list[int]
):
    rows = chosen(stored, Criteria(**criteria)).select("source_offset").collect()
    assert sorted(row.source_offset for row in rows) == offsets


@pytest.mark.parametrize("where", ["colour = 'red'", "offset +", "value", "sum(offset) > 1"])
def test_a_predicate_that_is_none_is_refused_with_the_columns(stored: DataFrame, where: str):
    with pytest.raises(InvalidArgument, match=r"option where: .* The columns are topic, partition"):
        chosen(stored, Criteria(where=where))


def test_a_dead_letter_goes_where_it_is_from_unless_it_is_said(stored: DataFrame):
    rows = chosen(stored, Criteria(since=NOON + timedelta(minutes=4))).collect()
    assert [(row.source_offset, row.target) for row in rows] == [(4, "orders"), (5, None)]
    (row, _) = chosen(stored, Criteria(to="else", run="run-1")).orderBy("source_offset").collect()
    assert (row.target, row.idempotency_key) == ("else", None)
    (kept,) = chosen(
        stored, Criteria(to="else", tenant="ada", run="run-1", keep_keys=True)
    ).collect()
    assert kept.idempotency_key == "once"


def test_what_is_done_is_left_out_by_place_time_and_target(stored: DataFrame):
    rows = chosen(stored, Criteria(to="else")).filter("source_offset < 3")
    done = chosen(stored, Criteria(to="else")).filter("source_offset = 0")
    another_target = chosen(stored, Criteria(to="other")).filter("source_offset = 1")
    another_time = done.selectExpr(
        "* except (source_offset, source_timestamp)",
        "1L as source_offset",
        "timestamp'2020-01-01' as source_timestamp",
    )
    known = done.unionByName(another_target).unionByName(another_time).unionByName(done)
    found = without(rows, known).select("source_offset").collect()
    assert sorted(row.source_offset for row in found) == [1, 2]
    both = {row.source_offset: row.is_done for row in marked(rows, known).collect()}
    assert both == {0: True, 1: False, 2: False}


def test_chunks_follow_offsets_in_a_topic_and_time_between_topics(spark: SparkSession):
    back = NOON - timedelta(hours=1)  # the broker's clock was set back between 1 and 2
    rows = records(
        spark,
        message(3, topic="a"),
        message(2, topic="a", timestamp=back, partition=1),
        message(1, topic="a"),
        message(0, topic="b"),
        message(7, topic="b", timestamp=NOON + timedelta(minutes=2)),
    )
    picked = in_chunks(chosen(rows, Criteria(to="t")), 2, "txn-1").orderBy("number").collect()
    assert [(row.source_topic, row.source_offset) for row in picked] == [
        ("b", 0), ("a", 1), ("a", 2), ("b", 7), ("a", 3),
    ]  # fmt: skip
    assert [(row.number, row.chunk) for row in picked] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert {row.txn for row in picked} == {"txn-1"}
    first = in_chunks(chosen(rows, Criteria(to="t")), 9, "txn-1", limit=2).collect()
    assert sorted((row.source_topic, row.source_offset) for row in first) == [("a", 1), ("b", 0)]


def test_what_the_broker_would_refuse_does_not_travel(spark: SparkSession):
    soon = (NOON + timedelta(seconds=30)).isoformat()
    later = (NOON + timedelta(hours=1)).isoformat()
    rows = records(
        spark,
        message(0, deadline="2026-01-01T00:00:00Z", partition_override=1, target_topic="elsewhere"),
        message(1, deadline=soon, partition_override=2),
        message(2, deadline=later, partition_override=0, routing_meta={"a": "b"}, run_id="run-1"),
    )
    picked = chosen(rows, Criteria(to="t"))
    sent = as_sent(picked, "target", {"t": 2, "u": 9}, NOON).orderBy("value").collect()
    assert [row.deadline for row in sent] == [None, None, later]
    assert [row.partition_override for row in sent] == [1, None, 0]
    assert (sent[2].topic, sent[2].run_id, sent[2].routing_meta) == ("t", "run-1", {"a": "b"})
    assert "target_topic" not in sent[0]
    assert "dlq_last_error" not in sent[0]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_chunks_are_sent_at_the_rate_and_lost_time_is_not_made_up_for():
    clock = Clock()
    pace = Pace(20, clock.time, clock.sleep)
    assert pace.chunk_rows == 20
    ended = []
    for takes in (0.25, 0.25, 3.0, 0.25):
        pace.await_pause()
        clock.now += takes
        pace.written(20)
        ended.append(clock.now)
    pace.await_pause()
    assert ended == [100.25, 101.5, 105.5, 106.75]
    assert (clock.slept, clock.now) == ([1.0] * 4, 107.75)


@given(
    st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=2, max_size=20),
)
def test_no_span_of_time_has_more_rows_than_the_rate_and_one_chunk(
    rate: float, chunks: list[tuple[float, float]]
):
    """However long writes take, and whenever within its write a chunk becomes visible."""
    clock = Clock()
    pace = Pace(rate, clock.time, clock.sleep)
    seen: list[tuple[float, float]] = []
    for takes, idle in chunks:
        clock.now += idle
        pace.await_pause()
        began = clock.now
        clock.now += takes
        pace.written(pace.chunk_rows)
        seen.append((began, clock.now))
    for first, (_, start) in enumerate(seen):
        for last in range(first + 1, len(seen)):
            span = seen[last][0] - start
            rows = (last - first) * pace.chunk_rows
            assert rows <= rate * span * (1 + 1e-9) + 1e-6


def test_less_than_a_message_a_second_is_one_at_a_time_and_no_rate_is_no_wait():
    clock = Clock()
    slow = Pace(0.5, clock.time, clock.sleep)
    assert slow.chunk_rows == 1
    slow.await_pause()
    slow.written(1)
    slow.await_pause()
    assert clock.slept == [2.0]
    free = Pace(None, clock.time, clock.sleep)
    free.await_pause()
    free.written(10**9)
    free.await_pause()
    assert (clock.slept, free.chunk_rows) == ([2.0], MAX_CHUNK_ROWS)
