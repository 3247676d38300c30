"""The memory for answers in progress: who gets it, who waits, and who is closed."""

from __future__ import annotations

import random
import time

import pytest

from penstock.server.http import answer_budget
from penstock.server.http.answer_budget import (
    SLOWEST_BYTES_S,
    SMALL_ANSWER_BYTES,
    AnswerBudget,
    Claim,
)

PIECE = SMALL_ANSWER_BYTES


class Transport:
    """As much of a transport as the budget needs."""

    def __init__(self) -> None:
        self.unsent = 0
        self.is_aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def a_claim(budget: AnswerBudget, is_answering: bool = True) -> Claim:
    return Claim(budget, Transport(), lambda: is_answering)


def test_answers_wait_for_memory_and_are_made_in_the_order_they_asked():
    budget = AnswerBudget(3 * PIECE)
    claims = [a_claim(budget) for _ in range(7)]
    made: list[int] = []
    for n, claim in enumerate(claims):
        claim.ask(PIECE, lambda n=n: made.append(n))  # type: ignore[misc]
    assert made == [0, 1, 2]
    assert (budget.used_bytes, budget.waiting) == (3 * PIECE, 4)
    claims[1].hold(0)
    assert made == [0, 1, 2, 3]
    claims[0].close()
    claims[5].close()
    assert made == [0, 1, 2, 3, 4]
    claims[2].hold(0)
    assert made == [0, 1, 2, 3, 4, 6]
    assert budget.waiting == 0


def test_small_answers_never_wait():
    budget = AnswerBudget(PIECE)
    a_claim(budget).ask(PIECE, lambda: None)
    made: list[str] = []
    a_claim(budget).ask(SMALL_ANSWER_BYTES - 1, lambda: made.append("small"))
    assert made == ["small"]
    assert budget.used_bytes == PIECE


def test_an_answer_larger_than_the_budget_is_made_when_it_is_alone():
    budget = AnswerBudget(PIECE)
    first, large = a_claim(budget), a_claim(budget)
    made: list[str] = []
    first.ask(PIECE, lambda: None)
    large.ask(10 * PIECE, lambda: made.append("large"))
    assert made == []
    first.hold(0)
    assert made == ["large"]


def test_a_long_line_of_answers_that_leave_at_once_is_worked_off_without_recursion():
    budget = AnswerBudget(PIECE)
    first = a_claim(budget)
    first.ask(PIECE, lambda: None)
    made = []

    def leave(claim: Claim) -> None:
        made.append(claim)
        claim.hold(0)

    for _ in range(5000):
        claim = a_claim(budget)
        claim.ask(PIECE, lambda claim=claim: leave(claim))  # type: ignore[misc]
    first.hold(0)
    assert len(made) == 5000
    assert (budget.used_bytes, budget.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_used_is_the_sum_of_what_connections_hold_after_any_history(seed: int):
    rng = random.Random(seed)
    budget = AnswerBudget(8 * PIECE)
    claims = [a_claim(budget) for _ in range(20)]
    asking: set[Claim] = set()
    for _ in range(2000):
        claim = rng.choice(claims)
        act = rng.random()
        if act < 0.5 and claim not in asking and not claim.held_bytes:
            asking.add(claim)
            claim.ask(PIECE, lambda claim=claim: asking.discard(claim))  # type: ignore[misc]
        elif act < 0.7 and claim not in asking:
            claim.hold(rng.choice([0, PIECE // 2, 2 * PIECE]) if claim.held_bytes else 0)
        elif act < 0.8:
            claim.transport.unsent = rng.randrange(3 * PIECE)
            claim.filled()
        elif act < 0.9:
            claim.drained()
        elif act < 0.95:
            claim.close()
            asking.discard(claim)
        assert budget.used_bytes == sum(each.held_bytes for each in claims)
        assert budget.waiting == len(asking)
        assert not asking or budget.used_bytes + PIECE > budget.limit_bytes


def test_a_connection_that_accepts_nothing_for_the_timeout_is_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    budget = AnswerBudget(10 * PIECE, stalled_timeout_ms=60_000)
    stalled, slow, events = a_claim(budget), a_claim(budget), a_claim(budget, is_answering=False)
    for claim in (stalled, slow, events):
        claim.transport.unsent = 1000 * PIECE
        claim.filled()
    for second in range(1, 200):
        slow.transport.unsent -= 1
        budget.tick(float(second))
        assert stalled.transport.is_aborted == (second >= 60)
    assert not slow.transport.is_aborted
    assert not events.transport.is_aborted
    assert budget.stalled_connections == 1
    assert "accepted nothing, or too little, for 60 s" in caplog.text


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_slow_connection_is_closed_only_while_others_wait_for_its_memory(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool
):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    budget = AnswerBudget(2 * PIECE, stalled_timeout_ms=60_000)
    slow, steady, waiting = (a_claim(budget) for _ in range(3))
    made: list[str] = []
    for claim in (slow, steady):
        claim.ask(PIECE, lambda: None)
        claim.transport.unsent = 1000 * PIECE
        claim.filled()
    if is_awaited:
        waiting.ask(PIECE, lambda: made.append("waiting"))
    for second in range(1, 100):
        slow.transport.unsent -= SLOWEST_BYTES_S - 1
        steady.transport.unsent -= SLOWEST_BYTES_S
        budget.tick(float(second))
        assert slow.transport.is_aborted == (is_awaited and second >= 60)
    assert not steady.transport.is_aborted
    slow.close()
    assert made == (["waiting"] if is_awaited else [])


def test_a_stall_begins_anew_when_a_connection_took_all_that_it_had():
    budget = AnswerBudget(10 * PIECE, stalled_timeout_ms=1)
    claim = a_claim(budget)
    claim.filled()
    claim.drained()
    budget.tick(10.0**12)
    assert not claim.transport.is_aborted


def test_memory_is_given_back_when_much_less_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answer_budget, "GIVE_BACK_BYTES", PIECE)
    calls: list[None] = []
    budget = AnswerBudget(10 * PIECE, give_back=lambda: calls.append(None))
    claim = a_claim(budget)
    claim.ask(4 * PIECE, lambda: None)
    budget.tick(1.0)
    assert not calls
    claim.hold(0)
    budget.tick(2.0)
    budget.tick(3.0)
    assert len(calls) == 1
