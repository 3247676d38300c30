"""The simulated stream's faults do what they name. Its contract is in test_shared_stream.py."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cluster.shared import Bounds, Found, Missing, Refused, Stored, Unanswered
from tests.cluster.service_world import Heard, World
from tests.cluster.simulated_service import Fate, Faults
from tests.cluster.simulated_stream import SimulatedStream, StreamHandle
from tests.cluster.simulation import Simulation
from tests.cluster.trouble import Trouble


@pytest.fixture
def world() -> World:
    return World()


def ends(world: World, stream: StreamHandle) -> tuple[int, int]:
    bounds = world.call(stream.bounds)
    assert isinstance(bounds, Bounds)
    return bounds.first_seq, bounds.last_seq


def test_a_message_that_is_too_large_is_a_bug_of_its_caller(world: World) -> None:
    _, stream, _ = world.broker()
    with pytest.raises(AssertionError):
        stream.append(1, b"x" * (stream.max_message_bytes + 1), lambda outcome: None)


def test_a_full_stream_stores_nothing(world: World) -> None:
    _, stream, _ = world.broker()
    world.stream.is_full = True
    assert isinstance(world.call(stream.append, 1, b"x"), Unanswered)
    assert world.stream.messages == {}


@pytest.mark.parametrize(
    ("fate", "is_stored"), [(Fate.LOST_REQUEST, False), (Fate.LOST_ANSWER, True)]
)
def test_a_lost_request_is_not_stored_and_a_lost_answer_is(
    world: World, fate: Fate, is_stored: bool
) -> None:
    _, stream, _ = world.broker()
    world.stream.plan(fate, "append")
    assert isinstance(world.call(stream.append, 1, b"x"), Unanswered)
    assert bool(world.stream.messages) is is_stored


def test_a_late_request_is_stored_after_its_caller_gave_up(world: World) -> None:
    _, stream, _ = world.broker()
    world.stream.plan(Fate.LATE, "append")
    outcomes: list[Any] = []
    stream.append(1, b"late", outcomes.append)
    world.simulation.wait_until(lambda: bool(outcomes))
    assert isinstance(outcomes[0], Unanswered)
    assert world.stream.messages == {}
    world.simulation.pass_ms(100)
    assert world.stream.messages == {1: b"late"}


def test_a_duplicated_append_is_stored_once_and_may_be_told_of_its_own_success() -> None:
    seen = set()
    for seed in range(20):
        world = World(seed)
        _, stream, _ = world.broker()
        world.stream.plan(Fate.DUPLICATED, "append")
        seen.add(type(world.call(stream.append, 1, b"x")))
        assert world.stream.messages == {1: b"x"}
    assert seen == {Stored, Refused, Unanswered}


def test_a_stray_message_takes_the_next_sequence() -> None:
    world = World(faults=Faults(stray=1.0))
    _, stream, _ = world.broker()
    assert world.call(stream.append, 1, b"mine") == Refused(1)
    assert world.stream.messages[1] != b"mine"


@pytest.mark.parametrize("committed", [0, 1])
def test_a_leader_without_quorum_counts_what_it_cannot_show(world: World, committed: int) -> None:
    _, stream, _ = world.broker()
    world.stream.lose_quorum()
    assert isinstance(world.call(stream.append, 1, b"mine"), Unanswered)
    assert world.call(stream.append, 1, b"mine") == Refused(1)
    assert world.call(stream.look_up, 1) == Missing(1, 0)
    world.stream.regain_quorum(committed)
    expected = Found(b"mine") if committed else Missing(1, 0)
    assert world.call(stream.look_up, 1) == expected


def test_a_message_that_is_committed_in_time_is_acknowledged(world: World) -> None:
    _, stream, _ = world.broker()
    world.stream.lose_quorum()
    outcomes: list[Any] = []
    stream.append(1, b"mine", outcomes.append)
    world.simulation.pass_ms(500)
    assert outcomes == []
    world.stream.regain_quorum(1)
    world.simulation.pass_ms(2)
    assert outcomes == [Stored()]


def test_an_old_leader_answers_reads_from_the_past_and_its_appends_are_gone(world: World) -> None:
    process, stream, _ = world.broker("b1")
    _, other, _ = world.broker("b2")
    world.stream.store(b"one")
    heard = Heard()
    stream.follow(1, heard)
    world.stream.isolate(process)
    assert isinstance(world.call(stream.append, 2, b"vain"), Unanswered)
    assert world.call(other.append, 2, b"two") == Stored()
    assert world.call(stream.look_up, 2) == Missing(1, 1)
    assert ends(world, stream) == (1, 1)
    world.stream.rejoin(process)
    assert world.call(stream.look_up, 2) == Found(b"two")
    assert heard.messages == [(1, b"one"), (2, b"two")]


def test_a_stalled_tail_goes_on_where_it_was(world: World) -> None:
    process, stream, _ = world.broker()
    heard = Heard()
    stream.follow(1, heard)
    world.simulation.pass_ms(5)
    world.stream.stall(process)
    world.stream.store(b"one")
    world.simulation.pass_ms(5000)
    assert heard.messages == []
    world.stream.release(process)
    world.simulation.pass_ms(5)
    assert heard.messages == [(1, b"one")]


def test_while_the_service_is_away_nothing_is_stored_or_told(world: World) -> None:
    _, stream, keys = world.broker()
    heard = Heard()
    stream.follow(1, heard)
    world.stream.leave()
    world.keys.leave()
    assert isinstance(world.call(stream.append, 1, b"x"), Unanswered)
    assert isinstance(world.call(stream.look_up, 1), Unanswered)
    assert isinstance(world.call(keys.get, "k"), Unanswered)
    world.stream.store(b"one")
    world.simulation.pass_ms(100)
    assert heard.messages == []
    world.stream.come_back()
    world.simulation.pass_ms(100)
    assert heard.messages == [(1, b"one")]


def test_a_broker_that_is_cut_off_is_alone_in_it(world: World) -> None:
    process, stream, _ = world.broker("b1")
    _, other, _ = world.broker("b2")
    world.stream.cut(process)
    assert isinstance(world.call(stream.append, 1, b"x"), Unanswered)
    assert world.call(other.append, 1, b"y") == Stored()
    world.stream.connect(process)
    assert world.call(stream.append, 2, b"z") == Stored()


def test_a_stream_that_lost_its_end_numbers_on_from_there(world: World) -> None:
    _, stream, _ = world.broker()
    for n in range(1, 4):
        world.stream.store(b"%d" % n)
    world.stream.lose_tail(1)
    assert ends(world, stream) == (1, 1)
    assert world.call(stream.append, 2, b"other") == Stored()


@pytest.mark.parametrize("timers_first", [True, False])
def test_nothing_arrives_at_a_paused_process_and_then_everything(
    world: World, timers_first: bool
) -> None:
    process, stream, _ = world.broker()
    told: list[str] = []
    heard = Heard()
    stream.follow(1, heard)
    process.pause()
    stream.append(1, b"one", lambda outcome: told.append("answer"))
    process.later(100, lambda: told.append("timer"))
    cancelled = process.later(100, lambda: told.append("cancelled"))
    world.simulation.pass_ms(500)
    assert told == []
    assert heard.messages == []
    assert process.monotonic_ms() == 500
    cancelled.cancel()
    process.resume(timers_first=timers_first)
    world.simulation.settle()
    assert told == (["timer", "answer"] if timers_first else ["answer", "timer"])
    assert heard.messages == [(1, b"one")]


def test_what_a_killed_process_had_sent_still_arrives(world: World) -> None:
    process, stream, _ = world.broker()
    told: list[Any] = []
    stream.append(1, b"one", told.append)
    process.kill()
    stream.append(2, b"never sent", told.append)
    world.simulation.pass_ms(5000)
    assert world.stream.messages == {1: b"one"}
    assert told == []


def test_a_process_may_have_a_clock_of_another_speed() -> None:
    simulation = Simulation()
    fast = simulation.process("fast", speed=2.0, ahead_ms=60_000)
    slow = simulation.process("slow", speed=0.5)
    rang: list[str] = []
    fast.later(100, lambda: rang.append("fast"))
    slow.later(100, lambda: rang.append("slow"))
    simulation.pass_ms(50)
    assert rang == ["fast"]
    assert (fast.monotonic_ms(), slow.monotonic_ms()) == (100, 25)
    assert fast.clock.now_ms() - slow.clock.now_ms() == 60_075
    simulation.pass_ms(150)
    assert rang == ["fast", "slow"]


# -- seeds --------------------------------------------------------------------------------------


def history(seed: int) -> tuple[list[Any], dict[int, bytes], list[tuple[int, bytes]]]:
    """One broker appends as a log does, under all troubles; another follows."""
    simulation = Simulation(seed)
    stream = SimulatedStream(simulation, Faults.drawn(simulation.random))
    writer, reader = simulation.process("writer"), simulation.process("reader")
    heard = Heard()
    handle = stream.handle(writer)
    stream.handle(reader).follow(1, heard)
    trouble = Trouble(simulation, [stream], [writer, reader])
    acknowledged: list[tuple[int, bytes]] = []
    number = 0

    def append(seq: int) -> None:
        nonlocal number
        number += 1
        data = b"%d" % number

        def done(outcome: Any) -> None:
            outcomes.append(outcome)
            if isinstance(outcome, Stored):
                acknowledged.append((seq, data))
                append(seq + 1)
            else:
                writer.later(50, lambda: append(stream.last_seq + 1))

        handle.append(seq, data, done)

    outcomes: list[Any] = []
    append(1)
    simulation.pass_ms(20_000)
    trouble.end()
    simulation.pass_ms(10_000)
    for seq, data in acknowledged:
        assert stream.messages[seq] == data, "acknowledged and not stored"
    last_seq = heard.messages[-1][0]
    assert heard.messages == [(seq, stream.messages[seq]) for seq in range(1, last_seq + 1)]
    assert last_seq >= stream.last_seq - 20, "the tail does not go on"
    return outcomes, stream.messages, heard.messages


@pytest.mark.parametrize("seed", range(8))
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert history(seed) == history(seed)


def test_the_seeds_draw_every_outcome() -> None:
    outcomes = {type(outcome) for seed in range(8) for outcome in history(seed)[0]}
    assert outcomes == {Stored, Refused, Unanswered}
