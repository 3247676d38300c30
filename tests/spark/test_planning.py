"""What is read next: limits are exact and shared fairly, losses are never silent."""

from __future__ import annotations

import pytest

from penstock.model.errors import NotFound, OutOfRange
from penstock.spark.logs import Span, TopicPartition
from penstock.spark.losses import Losses
from penstock.spark.planning import SMALL_ROWS, TaskSlice, shares, tasks

A, B, C = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


@pytest.mark.parametrize(
    ("limit", "has", "given"),
    [
        (10, {A: 30, B: 10}, {A: 8, B: 2}),
        (10, {A: 100, B: 100, C: 100}, {A: 4, B: 3, C: 3}),
        (1, {A: 1, B: 1000}, {A: 0, B: 1}),
        (7, {A: 8}, {A: 7}),
        (5, {A: 0, B: 6}, {A: 0, B: 5}),
    ],
)
def test_a_limit_is_shared_in_proportion_to_what_each_has(
    limit: int, has: dict[TopicPartition, int], given: dict[TopicPartition, int]
):
    assert shares(limit, has) == given


def test_shares_are_the_limit_together_and_no_more_than_each_has():
    has = {TopicPartition("t", partition): partition**3 % 97 for partition in range(50)}
    for limit in range(1, sum(has.values())):
        given = shares(limit, has)
        assert sum(given.values()) == limit
        assert all(given[place] <= has[place] for place in has)


def small(rows: int, place: TopicPartition = A) -> TaskSlice:
    return TaskSlice(place, 0, rows, rows)


def test_small_slices_share_a_task_and_large_ones_do_not():
    todo = [small(10), small(20), small(SMALL_ROWS), small(SMALL_ROWS * 3), small(5), small(6)]
    assert [[one.rows for one in task] for task in tasks(todo, 1)] == [
        [10, 20],
        [SMALL_ROWS],
        [SMALL_ROWS * 3],
        [5, 6],
    ]


def test_small_slices_stay_apart_where_so_many_tasks_are_wanted():
    assert len(tasks([small(10)] * 8, 8)) == 8
    assert len(tasks([small(10)] * 8, 4)) == 4
    assert tasks([], 4) == []


def test_what_retention_removed_fails_with_place_and_offsets():
    with pytest.raises(OutOfRange) as failure:
        Losses(fail=True).between(A, 5, 30, Span(20, 40))
    for said in ("'a'", "partition 0", "5 to 19", "oldest is 20", "failOnDataLoss"):
        assert said in failure.value.message


@pytest.mark.parametrize(
    ("start", "end", "left", "skipped"), [(5, 30, (20, 30), 15), (5, 10, (10, 10), 5)]
)
def test_what_retention_removed_is_skipped_on_request_and_counted(
    start: int, end: int, left: tuple[int, int], skipped: int, caplog: pytest.LogCaptureFixture
):
    assert Losses(fail=False).between(A, start, end, Span(20, 40)) == left
    assert f"{skipped} offsets are skipped" in caplog.text
    assert "'a'" in caplog.text


def test_a_loss_is_told_when_it_is_planned_and_not_when_it_is_looked_for(
    caplog: pytest.LogCaptureFixture,
):
    losses = Losses(fail=False)
    assert losses.between(A, 5, 30, Span(20, 40), is_looking=True) == (20, 30)
    assert caplog.text == ""
    with pytest.raises(OutOfRange):
        Losses(fail=True).between(A, 5, 30, Span(20, 40), is_looking=True)


def test_a_range_that_is_kept_is_left_alone(caplog: pytest.LogCaptureFixture):
    for fail in (True, False):
        assert Losses(fail=fail).between(A, 20, 40, Span(20, 40)) == (20, 40)
        assert Losses(fail=fail).between(A, 40, 40, Span(40, 40)) == (40, 40)
    assert caplog.text == ""


def test_a_topic_that_was_made_again_is_noticed(caplog: pytest.LogCaptureFixture):
    with pytest.raises(OutOfRange, match=r"ends at offset 3, and this query is at 12"):
        Losses(fail=True).between(A, 12, 12, Span(0, 3))
    assert Losses(fail=False).between(A, 12, 12, Span(1, 3)) == (1, 3)
    assert "from its beginning, offset 1" in caplog.text


def test_a_deleted_topic_is_named(caplog: pytest.LogCaptureFixture):
    with pytest.raises(NotFound, match="topic 'a' does not exist any more"):
        Losses(fail=True).deleted("topic 'a'")
    Losses(fail=False).deleted("topic 'a'")
    assert "topic 'a'" in caplog.text
