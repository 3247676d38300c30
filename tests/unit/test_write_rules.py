"""The rules of writes by batch, as decisions on a state, without IO."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import write_rules
from penstock.core.image import decode_image, encode_image, restore_image, take_image
from penstock.core.invariants import check
from penstock.core.state import BrokerState, apply
from penstock.core.write_rules import (
    AlreadyCommitted,
    NamedPartition,
    PieceKey,
    RowColumns,
    StagedPiece,
    check_stage,
    decide_commit,
    decide_rows,
    describe_writer,
)
from penstock.core.writers import LASTING_MS, ONCE_MS
from penstock.model.envelope import Envelope
from penstock.model.errors import FailedPrecondition, NotFound, ResourceExhausted
from penstock.model.limits import Limits
from penstock.model.records import StagedRows, TopicCreated, WriteCommitted, WriteStored
from penstock.model.writes import CommitBatch, PartCommit, PieceName


def state_with_topic(partitions: int = 1, **limits: Any) -> BrokerState:
    state = BrokerState(Limits(**limits))
    apply(state, TopicCreated(1, 0, "t", partitions))
    return state


def staged(
    *rows: int, places: list[NamedPartition] | None = None, is_keyed: bool = False
) -> dict[PieceKey, StagedPiece]:
    """One part with pieces of so many rows."""
    places = places or [("t", 0)]
    return {
        (0, "a", n): StagedPiece(
            PieceName("p", 0, 0, "a", n), n + 1, count, 10, 0, places, is_keyed
        )
        for n, count in enumerate(rows)
    }


def commit_of(*rows: int, batch: int = 0, once: bool = False, producer: str = "p") -> CommitBatch:
    return CommitBatch(producer, batch, [PartCommit(0, "a", len(rows), sum(rows))], once)


def commit(state: BrokerState, *rows: int, now_ms: int = 0, **options: Any) -> None:
    record = decide_commit(state, commit_of(*rows, **options), staged(*rows), now_ms)
    assert isinstance(record, WriteCommitted)
    apply(state, record)
    if record.rows:
        apply(state, WriteStored(now_ms, record.producer, record.batch, record.rows))
    check(state)


def test_a_commit_is_a_record_of_its_pieces_in_order_without_the_empty_ones():
    record = decide_commit(state_with_topic(), commit_of(3, 0, 2), staged(3, 0, 2), 7)
    assert record == WriteCommitted(7, "p", 0, 5, [StagedRows(1, 3), StagedRows(3, 2)], False)


@pytest.mark.parametrize("batch", [0, 4, 5])
def test_a_batch_up_to_the_last_is_already_committed(batch: int):
    state = state_with_topic()
    commit(state, 3, batch=5)
    decided = decide_commit(state, commit_of(1, batch=batch), {}, 0)
    assert decided == AlreadyCommitted(3 if batch == 5 else 0, is_storing=False)
    with pytest.raises(FailedPrecondition, match="already committed"):
        check_stage(state, PieceName("p", batch, 0, "a", 0), 0)


def test_the_batch_after_the_last_is_new():
    state = state_with_topic()
    commit(state, 3, batch=5)
    check_stage(state, PieceName("p", 6, 0, "a", 0), 0)
    commit(state, 1, batch=6)
    assert describe_writer(state, "p", 0).last_batch == 6


def test_a_batch_is_being_stored_until_its_last_row_is():
    state = state_with_topic()
    apply(state, decide_commit(state, commit_of(3), staged(3), 0))  # type: ignore[arg-type]
    for done, is_storing in ((0, True), (2, True), (3, False)):
        apply(state, WriteStored(0, "p", 0, done))
        assert describe_writer(state, "p", 0).storing == is_storing
        assert decide_commit(state, commit_of(3), {}, 0) == AlreadyCommitted(3, is_storing)
        check(state)


def test_a_full_partition_refuses_a_commit_and_a_deleted_topic_does_not():
    state = state_with_topic(max_partition_msgs=0)
    with pytest.raises(ResourceExhausted) as caught:
        decide_commit(state, commit_of(1), staged(1), 0)
    assert caught.value.limit == "partition_msgs"
    elsewhere = staged(1, places=[("gone", 0), ("t", 7)])
    assert isinstance(decide_commit(state, commit_of(1), elsewhere, 0), WriteCommitted)


def test_keys_need_room_only_where_rows_have_some():
    state = state_with_topic(max_idempotency_keys=0)
    with pytest.raises(ResourceExhausted) as caught:
        decide_commit(state, commit_of(1), staged(1, is_keyed=True), 0)
    assert caught.value.limit == "idempotency_keys"
    decide_commit(state, commit_of(1), staged(1), 0)


# -- forgetting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("once", "kept_ms"), [(True, ONCE_MS), (False, LASTING_MS)])
def test_a_producer_is_forgotten_some_time_after_its_last_commit(once: bool, kept_ms: int):
    state = state_with_topic()
    commit(state, 1, once=once)
    assert describe_writer(state, "p", kept_ms - 1).last_batch == 0
    with pytest.raises(NotFound):
        describe_writer(state, "p", kept_ms)
    commit(state, 1, now_ms=kept_ms, producer="q")
    assert [writer.producer for writer in state.writers] == ["q"]


def test_a_producer_that_commits_again_is_remembered_from_then_on():
    state = state_with_topic()
    commit(state, 1, once=True)
    commit(state, 1, batch=1, now_ms=ONCE_MS - 1)
    assert describe_writer(state, "p", ONCE_MS + 1).last_batch == 1
    assert describe_writer(state, "p", ONCE_MS - 2 + LASTING_MS).last_batch == 1


def test_a_producer_is_not_forgotten_while_a_batch_is_being_stored():
    state = state_with_topic()
    apply(state, decide_commit(state, commit_of(3), staged(3), 0))  # type: ignore[arg-type]
    commit(state, 1, now_ms=LASTING_MS, producer="q")
    assert describe_writer(state, "p", LASTING_MS).storing


def test_forgotten_producers_make_room_for_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_rules, "MAX_PRODUCERS", 2)
    state = state_with_topic()
    commit(state, 1, producer="a", once=True)
    commit(state, 1, producer="b")
    with pytest.raises(ResourceExhausted):
        commit(state, 1, producer="c", now_ms=ONCE_MS - 1)
    commit(state, 1, producer="c", now_ms=ONCE_MS)
    assert [writer.producer for writer in state.writers] == ["b", "c"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 40)), max_size=30))
def test_an_image_keeps_the_producers(steps: list[tuple[int, bool, int]]):
    """And goes on to forget the same ones."""
    state = state_with_topic()
    now_ms = 0
    for number, (producer, once, days) in enumerate(steps):
        now_ms += days * 24 * 3600 * 1000
        record = WriteCommitted(now_ms, f"p{producer}", number, 2, [StagedRows(number, 2)], once)
        apply(state, record)
        if number % 3:
            apply(state, WriteStored(now_ms, record.producer, number, number % 3))
        other = restore_image(decode_image(encode_image(take_image(state))), state.limits)
        check(other)
        assert take_image(other) == take_image(state)
        state = other


# -- rows ------------------------------------------------------------------------------------------

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(st.lists(st.tuples(_texts, _texts.filter(bool)), min_size=1), st.integers(1, 5))
def test_rows_decided_by_column_equal_rows_decided_one_by_one(
    pairs: list[tuple[str, str]], partitions: int
):
    state = state_with_topic(partitions)
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    sizes = [len((key + value).encode()) for key, value in pairs]
    plain = RowColumns("t", None, keys, values, sizes, None, None)
    each = RowColumns("elsewhere", ["t"] * len(pairs), keys, values, sizes, None, None)
    assert decide_rows(state, plain, 5) == decide_rows(state, each, 5)


def test_rows_take_the_offsets_that_come_next_in_each_topic():
    state = state_with_topic()
    apply(state, TopicCreated(2, 0, "u", 1))
    rows = RowColumns("t", ["u", "t", "u", "none"], [""] * 4, list("abcd"), [1] * 4, None, None)
    decided = decide_rows(state, rows, 5)
    assert [(m.topic_id, m.offset, m.value) for m in decided.messages] == [
        (2, 0, "a"),
        (1, 0, "b"),
        (2, 1, "c"),
    ]
    assert (decided.skipped, decided.duplicates) == (1, 0)


def test_an_override_beyond_the_topic_leaves_the_row_out():
    envelopes = [Envelope(partition_override=0), Envelope(partition_override=1)]
    rows = RowColumns("t", None, ["", ""], ["a", "b"], [1, 1], list(envelopes), None)
    decided = decide_rows(state_with_topic(), rows, 5)
    assert [message.value for message in decided.messages] == ["a"]
    assert decided.skipped == 1
