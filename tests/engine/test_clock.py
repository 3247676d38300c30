"""Broker time: never back, never carried away by a clock that jumps and returns."""

from __future__ import annotations

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.api.messages import Produce
from penstock.engine.clock import MAX_STEP_MS, TRUST_MS, SystemClock
from penstock.model.envelope import Envelope
from penstock.model.errors import InvalidArgument
from tests.engine.harness import on_disk

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


class Machine:
    """A machine whose clock can be set, beside the time that really passes."""

    def __init__(self) -> None:
        self.elapsed_ms = 5_000.0
        self.set_by_ms = 0.0

    def clock(self) -> SystemClock:
        return SystemClock(lambda: self.wall_ms() / 1000, lambda: self.elapsed_ms / 1000)

    def wall_ms(self) -> float:
        return START_MS + self.elapsed_ms + self.set_by_ms

    def true_ms(self) -> float:
        return START_MS + self.elapsed_ms


def test_a_jump_ahead_and_back_leaves_no_trace():
    machine = Machine()
    clock = machine.clock()
    machine.set_by_ms = YEAR_MS
    assert abs(clock.now_ms() - machine.true_ms()) < 2
    machine.elapsed_ms += TRUST_MS - 1
    assert abs(clock.now_ms() - machine.true_ms()) < 2
    machine.set_by_ms = 0
    machine.elapsed_ms += TRUST_MS
    assert abs(clock.now_ms() - machine.true_ms()) < 2
    assert abs(clock.ahead_ms()) < 2


def test_a_jump_ahead_that_lasts_is_followed():
    machine = Machine()
    clock = machine.clock()
    machine.set_by_ms = YEAR_MS
    clock.now_ms()
    machine.elapsed_ms += TRUST_MS
    assert abs(clock.now_ms() - machine.wall_ms()) < 2


def test_a_second_jump_starts_the_wait_again():
    machine = Machine()
    clock = machine.clock()
    machine.set_by_ms = HOUR_MS
    clock.now_ms()
    machine.elapsed_ms += TRUST_MS - 1
    clock.now_ms()
    machine.set_by_ms = YEAR_MS
    machine.elapsed_ms += 1
    assert abs(clock.now_ms() - machine.true_ms()) < 2
    machine.elapsed_ms += TRUST_MS
    assert abs(clock.now_ms() - machine.wall_ms()) < 2


def test_a_small_step_ahead_is_followed_at_once():
    machine = Machine()
    clock = machine.clock()
    machine.set_by_ms = MAX_STEP_MS
    assert abs(clock.now_ms() - machine.wall_ms()) < 2


def test_a_clock_set_back_does_not_set_broker_time_back():
    machine = Machine()
    clock = machine.clock()
    before = clock.now_ms()
    machine.set_by_ms = -YEAR_MS
    machine.elapsed_ms += 1_000
    assert clock.now_ms() in (before + 999, before + 1_000, before + 1_001)
    assert clock.wall_ms() == int(machine.wall_ms())
    assert abs(clock.ahead_ms() - YEAR_MS) < 2


def test_time_goes_on_from_the_last_record_of_an_earlier_process():
    machine = Machine()
    clock = machine.clock()
    clock.start_at(START_MS + YEAR_MS)
    assert clock.now_ms() >= START_MS + YEAR_MS
    assert clock.wall_ms() == int(machine.wall_ms())


def test_time_does_not_leap_when_a_process_goes_on_from_a_record_late():
    """A standby serves hours after its start, behind a record of a moment ago."""
    machine = Machine()
    clock = machine.clock()
    machine.elapsed_ms += 3 * HOUR_MS
    last_ts = int(machine.wall_ms()) + 40
    clock.start_at(last_ts)
    assert last_ts <= clock.now_ms() <= last_ts + 1
    machine.elapsed_ms += 1_000
    assert clock.ahead_ms() <= 41


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture):
    machine = Machine()
    clock = machine.clock()
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        for set_by_ms in (YEAR_MS, 0, -YEAR_MS, 0):
            machine.set_by_ms = set_by_ms
            for _ in range(50):
                machine.elapsed_ms += 10
                clock.now_ms()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0].split(";")[0] for text in said] == [
        "the machine's clock jumped ahead by 31536000 s",
        "the machine's clock came back from its jump ahead",
        "the broker's time is 31536000 s ahead of the machine's clock and goes on from there",
    ]


steps = st.tuples(
    st.integers(0, TRUST_MS // 3),
    st.sampled_from([0, 0, 1, MAX_STEP_MS, MAX_STEP_MS + 1, -MAX_STEP_MS, HOUR_MS, -HOUR_MS])
    | st.integers(-YEAR_MS, YEAR_MS),
)


@given(st.lists(steps, max_size=60))
def test_broker_time_never_goes_back_and_always_goes_on(moves: list[tuple[int, int]]):
    machine = Machine()
    clock = machine.clock()
    last = clock.now_ms()
    for elapsed_ms, set_by_ms in moves:
        machine.elapsed_ms += elapsed_ms
        machine.set_by_ms = set_by_ms
        now = clock.now_ms()
        assert now >= last + elapsed_ms - 2
        assert clock.wall_ms() <= machine.wall_ms()
        last = now


@example([(0, MAX_STEP_MS), (0, 2 * MAX_STEP_MS), (0, 3 * MAX_STEP_MS)])
@given(st.lists(steps, max_size=60))
def test_jumps_that_never_last_do_not_move_broker_time(moves: list[tuple[int, int]]):
    """Whatever the clock did for less than TRUST_MS at a time, the lead it left is a small step."""
    machine = Machine()
    clock = machine.clock()
    for elapsed_ms, set_by_ms in moves:
        machine.set_by_ms = set_by_ms
        clock.now_ms()
        machine.elapsed_ms += elapsed_ms
        clock.now_ms()
        machine.set_by_ms = 0
        assert clock.now_ms() - machine.true_ms() <= MAX_STEP_MS + 10


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_deadline_is_compared_with_the_machines_clock(in_batch: bool):
    """driftq-11, after an earlier process ran with a clock that was a year ahead."""
    broker = on_disk()
    broker.topic()
    broker.clock.behind_ms = YEAR_MS

    def outcome(deadline_ms: int) -> object:
        command = Produce("t", "", "a", Envelope(run_id="r"), None, deadline_ms)
        if in_batch:
            return broker.call(broker.engine.produce_many, [command])[0]
        return broker.call(broker.engine.produce, command)

    wall_ms = broker.clock.wall_ms()
    assert not isinstance(outcome(wall_ms + HOUR_MS), Exception)
    assert isinstance(outcome(wall_ms), InvalidArgument)
    broker.close()
