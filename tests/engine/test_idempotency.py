"""Producer-side keys on a manual clock: the TTL to the millisecond, the bound, the restarts."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.envelope import Envelope
from penstock.model.errors import ResourceExhausted
from penstock.model.limits import Limits
from tests.engine.harness import Broker, on_disk, values

TTL_MS = 10_000


def once(key: str = "k", tenant: str = "", target_topic: str = "") -> Envelope:
    return Envelope(idempotency_key=key, tenant_id=tenant, target_topic=target_topic)


def test_a_committed_key_stores_nothing_for_its_ttl_and_is_free_then():
    """driftq-57, 60."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=TTL_MS))
    broker.topic()
    broker.produce("t", "a", envelope=once())
    broker.pass_ms(TTL_MS - 1)
    assert broker.try_produce("t", "b", envelope=once()) is None
    broker.pass_ms(1)
    broker.produce("t", "c", envelope=once())
    assert values(broker.stored("t")) == ["a", "c"]
    broker.pass_ms(TTL_MS - 1)
    assert broker.try_produce("t", "d", envelope=once()) is None
    broker.close()


@pytest.mark.parametrize(
    "restart", [Broker.restart, Broker.crash, Broker.kill, Broker.seal_and_crash]
)
def test_a_committed_key_survives_a_restart(restart):
    """driftq-57, driftq-60: for the rest of its TTL."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=TTL_MS))
    broker.topic()
    broker.produce("t", "a", envelope=once())
    broker.pass_ms(4000)
    restart(broker)
    broker.pass_ms(TTL_MS - 4001)
    assert broker.try_produce("t", "b", envelope=once()) is None
    broker.pass_ms(1)
    broker.produce("t", "c", envelope=once())
    broker.close()


def test_tenant_final_topic_and_key_make_the_identity():
    """driftq-59: an empty key is none, and an absent tenant is the tenant ''."""
    broker = on_disk()
    broker.topic("t")
    broker.topic("u")
    broker.produce("t", "a", envelope=once())
    broker.produce("t", "b", envelope=once(tenant="x"))
    broker.produce("t", "c", envelope=once(key="kk"))
    broker.produce("u", "d", envelope=once())
    assert broker.try_produce("nowhere", "e", envelope=once(target_topic="t")) is None
    for _ in range(2):
        broker.produce("t", "f", envelope=once(key=""))
    # However tenant and key are cut, no two identities run together.
    broker.produce("t", "g", envelope=once(key="bc", tenant="a"))
    broker.produce("t", "h", envelope=once(key="c", tenant="ab"))
    broker.close()


def test_a_topic_of_the_same_name_has_keys_of_its_own():
    """driftq-70, 57."""
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=once())
    broker.must(broker.engine.delete_topic, "t")
    broker.topic()
    broker.produce("t", "b", envelope=once())
    broker.crash()
    assert values(broker.stored("t")) == ["b"]
    assert broker.try_produce("t", "c", envelope=once()) is None
    broker.close()


def test_the_registry_is_bounded_and_forgets_none_before_its_time():
    """driftq-60: a new key beyond the bound is 429."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=TTL_MS, max_idempotency_keys=3))
    broker.topic()
    for n in range(3):
        broker.produce("t", f"v{n}", envelope=once(f"k{n}"))
        broker.pass_ms(1000)
    outcome = broker.try_produce("t", "v3", envelope=once("k3"))
    assert isinstance(outcome, ResourceExhausted)
    assert outcome.limit == "idempotency_keys"
    for n in range(3):
        assert broker.try_produce("t", "again", envelope=once(f"k{n}")) is None
    broker.put("t", "keyless")
    broker.pass_ms(TTL_MS - 3000)
    broker.produce("t", "v3", envelope=once("k3"))
    assert isinstance(broker.try_produce("t", "v4", envelope=once("k4")), ResourceExhausted)
    check(broker.state)
    broker.close()


@pytest.mark.parametrize("ttl_ms", [500, 100_000])
def test_a_ttl_that_was_changed_over_a_restart_breaks_nothing(ttl_ms: int):
    """driftq-60: keys of the old TTL and the new live side by side, from a snapshot too."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=TTL_MS))
    broker.topic()
    for n in range(3):
        broker.produce("t", "x" * 100_000, envelope=once(f"k{n}"))
    broker.settle()
    broker.limits = Limits(idempotency_ttl_ms=ttl_ms)
    broker.restart()
    for turn in range(40):
        for n in range(4):
            outcome = broker.try_produce("t", f"{turn}", envelope=once(f"k{n}"))
            assert outcome is None or hasattr(outcome, "offset"), outcome
        broker.pass_ms(400)
        check(broker.state)
    broker.crash()
    check(broker.state)
    broker.pass_ms(2 * max(ttl_ms, TTL_MS))
    assert len(broker.state.produced) == 0
    broker.close()
