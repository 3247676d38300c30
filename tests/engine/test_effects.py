"""Consumer-side idempotency at the seam: how long an entry lives, and what replay makes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.api.effects import BegunEffect, EffectCommand
from penstock.core.comparison import comparable
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.model.envelope import Envelope
from penstock.model.errors import FailedPrecondition, ResourceExhausted
from penstock.model.limits import Limits
from tests.engine.harness import LONG_MS, Broker, on_disk, policy, values

TTL_MS = 10_000


def broker_with_ttl(**limits: int) -> Broker:
    broker = on_disk(limits=replace(Limits(idempotency_ttl_ms=TTL_MS), **limits))
    broker.topic()
    return broker


def keyed(key: str = "k") -> Envelope:
    return Envelope(idempotency_key=key)


def is_committed(outcome: object) -> bool:
    return isinstance(outcome, BegunEffect)


def test_begin_says_run_or_done_and_refuses_another_owner():
    """driftq-61."""
    broker = broker_with_ttl()
    assert broker.begin("k", lease_ms=1000) is None
    assert isinstance(broker.begin("k", owner="another"), FailedPrecondition)
    assert broker.begin("k", lease_ms=1000) is None, "its own again"
    broker.pass_ms(1000)
    assert broker.begin("k", owner="another") is None, "the lease has ended"
    assert isinstance(broker.commit("k", "late"), FailedPrecondition)
    assert broker.commit("k", "result", owner="another") is None
    for owner in ("o", "another", "third"):
        known = broker.begin("k", owner=owner)
        assert isinstance(known, BegunEffect)
        assert known.text == "result"
    broker.crash()
    assert is_committed(broker.begin("k"))
    broker.close()


def test_a_message_whose_effect_is_committed_is_finished_without_delivery():
    """driftq-61: new ones at the cursor and old ones that come back, for that group only."""
    broker = broker_with_ttl()
    for n in range(4):
        broker.produce("t", f"v{n}", envelope=keyed(f"k{n}"))
    assert broker.begin("k1") is None
    assert broker.commit("k1") is None
    reader = broker.consume(lease_ms=1000)
    assert values(reader.take()) == ["v0", "v2", "v3"]
    assert broker.begin("k2") is None
    assert broker.commit("k2") is None
    broker.pass_ms(1010)
    assert sorted(values(reader.take())) == ["v0", "v3"]
    assert broker.ack(reader, 0) is None
    assert broker.ack(reader, 3) is None
    assert broker.ack(reader, 2) is None, "done"
    assert broker.state.topics["t"].groups["g"].progress[0].floor() == 4
    other = broker.consume(group="other", lease_ms=LONG_MS)
    assert values(other.items) == ["v0", "v1", "v2", "v3"]
    check(broker.state)
    broker.close()


def test_an_entry_lives_until_its_message_is_done_and_a_ttl_more():
    """Settled: it is not forgotten under a message that may come again."""
    broker = broker_with_ttl()
    broker.produce("t", "v", envelope=keyed())
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.begin("k") is None
    assert broker.commit("k", "r") is None
    broker.pass_ms(3 * TTL_MS)
    assert is_committed(broker.begin("k"))
    assert broker.ack(reader, 0) is None
    broker.pass_ms(TTL_MS - 1)
    assert is_committed(broker.begin("k"))
    broker.pass_ms(1)
    assert broker.begin("k") is None
    broker.close()


def test_an_entry_without_a_message_lives_for_the_ttl():
    broker = broker_with_ttl()
    assert broker.begin("k") is None
    assert broker.commit("k", "r") is None
    broker.pass_ms(TTL_MS - 1)
    assert is_committed(broker.begin("k"))
    broker.pass_ms(1)
    assert broker.begin("k") is None
    broker.close()


def test_an_effect_whose_time_has_passed_does_not_come_back_with_a_restart():
    """driftq-51: a later message with its key is delivered, live and replayed alike."""
    broker = broker_with_ttl()
    assert broker.begin("k") is None
    assert broker.commit("k", "r") is None
    broker.pass_ms(TTL_MS + 1)
    broker.produce("t", "first", envelope=keyed())
    reader = broker.consume(lease_ms=LONG_MS)
    assert values(reader.items) == ["first"]
    broker.pass_ms(TTL_MS + 1)
    assert broker.ack(reader, 0) is None
    live = comparable(take_image(broker.state), broker.clock.now_ms())
    broker.crash()
    assert comparable(take_image(broker.state), broker.clock.now_ms()) == live
    broker.produce("t", "second", envelope=keyed())
    again = broker.consume(lease_ms=LONG_MS)
    assert values(again.items) == ["second"]
    broker.close()


def test_what_was_begun_may_be_committed_when_the_registry_is_full():
    """driftq-60: only a new entry needs a place."""
    broker = broker_with_ttl(max_idempotency_keys=2)
    assert broker.begin("a") is None
    assert broker.begin("b") is None
    outcome = broker.begin("c")
    assert isinstance(outcome, ResourceExhausted)
    assert outcome.limit == "idempotency_keys"
    assert broker.commit("a", "done") is None
    assert broker.begin("b") is None
    assert broker.commit("b", "done") is None
    broker.pass_ms(TTL_MS + 1001)
    assert broker.begin("c") is None
    broker.close()


def test_results_are_bounded_in_bytes():
    broker = broker_with_ttl(memory_bytes=400_000)
    for n in range(10):
        assert broker.begin(f"k{n}") is None
    outcomes = [broker.commit(f"k{n}", "x" * 30_000) for n in range(10)]
    assert [outcome is None for outcome in outcomes] == [True] * 3 + [False] * 7
    assert isinstance(outcomes[-1], ResourceExhausted)
    broker.close()


def test_a_deleted_group_takes_its_effects_with_it():
    """driftq-70."""
    broker = broker_with_ttl()
    broker.produce("t", "v", envelope=keyed())
    broker.consume(lease_ms=LONG_MS)
    assert broker.begin("k") is None
    assert broker.commit("k") is None
    broker.must(broker.engine.delete_group, "t", "g")
    reader = broker.consume(lease_ms=LONG_MS)
    assert values(reader.items) == ["v"]
    check(broker.state)
    broker.close()


def test_a_deleted_topic_takes_the_effects_of_groups_that_never_consumed_with_it():
    """driftq-70, 60: they would use up the registry for ever."""
    broker = broker_with_ttl(max_idempotency_keys=1)
    for _ in range(3):
        assert broker.begin("k", group="never consumed") is None
        assert broker.commit("k", "result", group="never consumed") is None
        broker.must(broker.engine.delete_topic, "t")
        check(broker.state)
        broker.topic()
    broker.crash()
    check(broker.state)
    broker.close()


def test_a_committed_effect_keeps_its_message_out_of_the_dead_letters():
    """driftq-62: the effect happened; a crash before the ack must not make it a failure."""
    broker = broker_with_ttl()
    broker.produce("t", "v", envelope=policy(1, idempotency_key="k"))
    broker.consume(lease_ms=1000)
    assert broker.begin("k") is None
    assert broker.commit("k", "done") is None
    broker.pass_ms(1010)
    assert "dlq.t" not in broker.state.topics
    assert broker.state.topics["t"].groups["g"].progress[0].floor() == 1
    broker.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_effect_is_its_owners_for_the_whole_lease(is_restarted: bool) -> None:
    """driftq-61: also if the lease is longer than the time that effects are remembered."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000))
    broker.topic()
    assert broker.begin("k", owner="a", lease_ms=60_000) is None
    broker.pass_ms(30_000)
    if is_restarted:
        broker.restart()
    assert isinstance(broker.begin("k", owner="b", lease_ms=60_000), FailedPrecondition)
    assert broker.commit("k", "done", owner="a") is None
    broker.close()


def test_an_ack_does_not_end_the_lease_on_the_messages_effect() -> None:
    """driftq-61: an ack by another owner does not end it either."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000))
    broker.topic()
    broker.produce("t", "v", envelope=Envelope(idempotency_key="k"))
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.begin("k", owner="a", lease_ms=60_000) is None
    assert broker.ack(reader, 0) is None
    broker.pass_ms(30_000)
    assert isinstance(broker.begin("k", owner="b", lease_ms=60_000), FailedPrecondition)
    broker.pass_ms(40_000)
    assert broker.begin("k", owner="b", lease_ms=60_000) is None
    broker.close()


def test_a_long_lease_keeps_no_other_effect_in_memory() -> None:
    """driftq-60: each is forgotten at its own time, so their number stays bounded."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000, max_idempotency_keys=10))
    broker.topic()
    assert broker.begin("long", lease_ms=LONG_MS) is None
    for n in range(9):
        assert broker.begin(f"short {n}", lease_ms=100) is None
    broker.pass_ms(5000)
    for n in range(9):
        assert broker.begin(f"later {n}", lease_ms=100) is None
    assert len(broker.state.topics["t"].effects) == 10
    broker.close()


def test_renewals_of_a_long_lease_leave_nothing_behind() -> None:
    """driftq-60: the queue of lease ends has one entry per effect, not one per renewal."""
    broker = Broker()
    broker.topic()
    assert broker.begin("k", lease_ms=LONG_MS) is None
    command = EffectCommand("", "t", "g", "k", "o")
    for n in range(5000):
        broker.submit(broker.engine.effects.renew, command, LONG_MS + n)
    broker.settle()
    assert len(broker.state.topics["t"].effects._order) < 2500
    assert isinstance(broker.begin("k", owner="b"), FailedPrecondition)
    check(broker.state)
    broker.close()
