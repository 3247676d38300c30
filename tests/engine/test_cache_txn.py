"""Transactions: all of it or nothing, whatever caches are in it."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.caching import Check, Delete, Increment, Put, Txn, Written
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    TooLarge,
    VersionMismatch,
)
from penstock.model.limits import MAX_TXN_OPS
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, durable, in_memory
from tests.storage.faulty_vfs import FLAVOURS

Held = tuple[CacheBroker, Path]


@pytest.fixture(params=["ephemeral", "durable"])
def held(request: pytest.FixtureRequest) -> Held:
    if request.param == "durable":
        return durable()
    broker = in_memory()
    return broker, broker.cache("c")


def test_ops_are_done_in_order_and_see_each_other(held: Held):
    """felix-81."""
    broker, path = held
    broker.write(path, "old", b"v")
    start = broker.inside(path).version
    written = broker.transact(
        [
            Put(path, "n", b"5"),
            Increment(path, "n", 2),
            Delete(path, "old"),
            Delete(path, "old"),
            Put(path, "old", b"new", if_not_exists=True),
            Put(path, "now", b"v", 0),
            Increment(path, "now"),
        ]
    )
    assert written[:5] == [
        Written(start + 1),
        Written(start + 2, number=7),
        Written(start + 3, deleted=True),
        Written(0, deleted=False),
        Written(start + 4),
    ]
    assert written[6].number == 1, "what expires at once is not there for the next op"
    assert (broker.read(path, "n"), broker.read(path, "old")) == (b"7", b"new")
    check(broker.state)


def test_of_a_key_that_is_written_twice_the_last_ttl_counts(held: Held):
    """felix-60, 65, 81."""
    broker, path = held
    broker.transact(
        [
            Put(path, "cleared", b"1", 200),
            Put(path, "cleared", b"2"),
            Put(path, "shorter", b"1", 200),
            Put(path, "shorter", b"2", 100),
            Put(path, "counted", b"1", 200),
            Increment(path, "counted", ttl_ms=5),
            Put(path, "gone", b"1", 200),
            Delete(path, "gone"),
            Put(path, "counter", b"1", 200),
            Delete(path, "counter"),
            Increment(path, "counter"),
        ]
    )
    left = {}
    for key in ("cleared", "shorter", "counted", "gone", "counter"):
        value = broker.value(path, key)
        left[key] = (value.value, value.ttl_ms) if value is not None else None
    assert left == {
        "cleared": (b"2", None),
        "shorter": (b"2", 100),
        "counted": (b"2", 200),
        "gone": None,
        "counter": (b"1", None),
    }
    assert not broker.inside(path).unanswered


@pytest.mark.parametrize("wrong", range(6))
def test_one_refusal_and_nothing_is_changed(held: Held, wrong: int):
    """felix-81."""
    broker, path = held
    version = broker.write(path, "k", b"text")
    wrongs: list[Put | Delete | Increment] = [
        Put(path, "k", b"x", if_not_exists=True),
        Put(path, "k", b"x", if_version=version + 1),
        Delete(path, "k", version + 1),
        Increment(path, "k"),
        Put(path, "", b"x"),
        Put(path, "k", b"x", -1),
    ]
    op = wrongs[wrong]
    seq = broker.log.seq
    with pytest.raises((AlreadyExists, FailedPrecondition, InvalidArgument)):
        broker.transact([Put(path, "a", b"1"), op, Put(path, "b", b"1")])
    assert broker.keys(path) == {"k"}
    assert broker.inside(path).version == version
    assert broker.log.seq == seq, "nothing was recorded"


@pytest.mark.parametrize(
    ("key", "wanted", "holds"),
    [
        ("k", {"exists": True}, True),
        ("k", {"exists": False}, False),
        ("none", {"exists": False}, True),
        ("none", {"exists": True}, False),
        ("none", {"version": 0}, True),
        ("k", {"version": 0}, False),
        ("over", {"exists": False}, True),
        ("over", {"version": 0}, True),
        ("over", {"exists": True}, False),
    ],
)
def test_a_check_decides_before_anything_is_done(
    held: Held, key: str, wanted: dict[str, int], holds: bool
):
    """felix-81, 78."""
    broker, path = held
    broker.write(path, "k", b"v")
    broker.write(path, "over", b"v", 5)
    broker.pass_ms(5)
    checks = [Check(path, "k", exists=True), Check(path, key, **wanted)]  # type: ignore[arg-type]
    ops: list[Put | Delete | Increment] = [Put(path, key, b"new"), Put(path, "also", b"new")]
    if holds:
        broker.transact(ops, checks)
        assert broker.read(path, "also") == b"new"
    else:
        with pytest.raises(VersionMismatch) as refusal:
            broker.transact(ops, checks)
        assert refusal.value.http_status == 412
        assert broker.read(path, "also") is None


def test_a_check_of_a_version_is_compare_and_swap_over_several_keys(held: Held):
    """felix-78, 81."""
    broker, path = held
    a, b = broker.write(path, "a", b"1"), broker.write(path, "b", b"1")
    checks = [Check(path, "a", version=a), Check(path, "b", version=b)]
    swap: list[Put | Delete | Increment] = [Put(path, "a", b"2"), Put(path, "b", b"2")]
    broker.transact(swap, checks)
    with pytest.raises(VersionMismatch):
        broker.transact([Put(path, "a", b"3"), Put(path, "b", b"3")], checks)
    assert (broker.read(path, "a"), broker.read(path, "b")) == (b"2", b"2")


def test_an_eviction_never_takes_what_the_same_transaction_wrote(held: Held):
    """felix-72, 81."""
    broker, path = held
    broker.configure(path, max_entries=3, durable=broker.inside(path).is_durable)
    for key in ("a", "b", "c"):
        broker.write(path, key, b"old")
    broker.transact([Put(path, key, b"new") for key in ("a", "x", "y")])
    assert broker.keys(path) == {"a", "x", "y"}
    with pytest.raises(TooLarge):
        broker.transact([Put(path, f"k{n}", b"v") for n in range(4)])
    assert broker.keys(path) == {"a", "x", "y"}, "a transaction that cannot fit changes nothing"
    broker.transact([*(Put(path, f"k{n}", b"v") for n in range(4)), Delete(path, "k0")])
    assert broker.keys(path) == {"k1", "k2", "k3"}, "what it deletes again needs no room"
    check(broker.state)


def test_a_transaction_is_of_one_namespace_and_of_limited_size():
    broker = in_memory()
    path, other = broker.cache("c"), broker.cache("c", namespace="other")
    with pytest.raises(InvalidArgument, match="one namespace"):
        broker.transact([Put(path, "k", b"v"), Put(other, "k", b"v")])
    with pytest.raises(InvalidArgument, match="one namespace"):
        broker.transact([Put(path, "k", b"v")], [Check(other, "k", exists=False)])
    with pytest.raises(InvalidArgument, match="at least one"):
        broker.transact([], [Check(path, "k", exists=False)])
    broker.transact([Increment(path, "n") for _ in range(MAX_TXN_OPS)])
    with pytest.raises(TooLarge):
        broker.transact([Increment(path, "n") for _ in range(MAX_TXN_OPS + 1)])
    assert broker.read(path, "n") == b"%d" % MAX_TXN_OPS


def test_durable_and_ephemeral_caches_share_a_transaction():
    """felix-81, 111."""
    broker, path = durable()
    other, memory = broker.cache("c2", durable=True), broker.cache("m")
    broker.transact([Put(path, "k", b"1"), Put(memory, "k", b"2"), Put(other, "k", b"3")])
    assert [broker.read(p, "k") for p in (path, memory, other)] == [b"1", b"2", b"3"]
    broker.clock.advance(1)
    broker.crash()
    assert [broker.read(p, "k") for p in (path, memory, other)] == [b"1", None, b"3"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_keeps_all_of_a_transaction_or_nothing(flavour: str):
    """felix-81, 111: the durable part is one frame."""
    for seed in range(6):
        broker, path = durable()
        other = broker.cache("c2", durable=True)
        broker.hold_writes()
        ops = [Put(p, f"k{n}", b"x" * 3000) for n in range(6) for p in (path, other)]
        outcomes = broker.submit(broker.engine.caches.transact, Txn([], [*ops]))
        broker.scheduler.run()
        assert not outcomes
        broker.crash(flavour, seed)
        found = len(broker.keys(path)) + len(broker.keys(other))
        assert found in (0, 12), f"{found} of 12 are there"
        check(broker.state)
