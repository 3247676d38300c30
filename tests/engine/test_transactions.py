"""Transactions: all operations happen together, are durable together, or are refused together."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.api.messages import Decided, Produce
from penstock.api.transactions import Operation, TransactionCommand
from penstock.core.invariants import check
from penstock.engine import ledger
from penstock.model.caching import Delete, Increment, Put
from penstock.model.envelope import RetryPolicy, RoutingDecision
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    VersionMismatch,
)
from penstock.model.limits import MAX_TXN_OPS, Limits
from penstock.model.quotas import Quota
from penstock.model.transactions import (
    CacheResult,
    DuplicateResult,
    SettledResult,
    StoredResult,
)
from tests.engine.harness import LONG_MS, Reader, values
from tests.engine.transaction_harness import (
    CACHE,
    TransactionBroker,
    begun,
    effect,
    producing,
)
from tests.engine.write_harness import EVERY_APPEND_A_FRAME
from tests.property.follower import Follower
from tests.storage.faulty_vfs import FaultyVfs

SETTLED = SettledResult()


def command_of(*operations: Operation, tx: str = "") -> TransactionCommand:
    return TransactionCommand([*operations], tx)


def test_every_kind_of_operation_happens_and_survives_a_restart():
    broker, reader = begun()
    follower = Follower(broker)
    first, second = reader.take()
    broker.begin("k")
    version = broker.write(CACHE, "old", b"v")
    results = broker.do(
        producing("u", "one", "x"),
        broker.fenced(reader, first),
        broker.nacking(reader, second, delay_ms=LONG_MS // 10),
        effect("k", result="done"),
        Put(CACHE, "new", b"1"),
        Increment(CACHE, "new", 4),
        Delete(CACHE, "old", version),
        producing("u", "two", "x"),
    )
    partition = results[0].partition  # type: ignore[union-attr]
    assert results == [
        StoredResult(partition, 0),
        SETTLED,
        SETTLED,
        SETTLED,
        CacheResult(version + 1),
        CacheResult(version + 2, number=5),
        CacheResult(version + 3, deleted=True),
        StoredResult(partition, 1),
    ]
    follower.compare()
    check(broker.state)
    broker.crash()
    assert broker.contents("u") == ["one", "two"]
    assert (broker.read(CACHE, "new"), broker.read(CACHE, "old")) == (b"5", None)
    assert list(broker.state.topics["t"].groups["g"].progress[0].unfinished) == [second.offset]
    begin = broker.begin("k")
    assert not isinstance(begin, PenstockError)
    assert begin is not None
    assert begin.text == "done"
    broker.close()


def test_all_records_of_a_transaction_are_one_frame():
    """However small the frames are, it is not divided."""
    broker, reader = begun(options=EVERY_APPEND_A_FRAME)
    operations: list[Operation] = [
        *(producing("u", "v"), broker.acking(reader, 0)),
        Put(CACHE, "k", b"v"),
    ]
    seq = broker.log.seq
    broker.submit(broker.engine.transactions.commit, command_of(*operations, tx="tx"))
    assert broker.log.seq == seq
    assert len(broker.log._records) == 4
    broker.settle()
    broker.close()


def test_nothing_is_answered_or_delivered_before_the_frame_is_durable():
    broker, reader = begun()
    other = broker.consume("u", "h", lease_ms=LONG_MS)
    broker.hold_writes()
    command = command_of(producing("u", "v"), broker.acking(reader, 0))
    outcomes = broker.submit(broker.engine.transactions.commit, command)
    broker.scheduler.run()
    assert not outcomes
    assert not other.items
    broker.disk.release()
    broker.settle()
    assert len(outcomes) == 1
    assert values(other.items) == ["v"]
    broker.close()


def test_a_message_is_dispatched_in_the_commit_that_stores_it():
    broker, reader = begun()
    other = broker.consume("u", "h", lease_ms=LONG_MS)
    commits = broker.log.commits
    broker.do(producing("u", "v"), broker.acking(reader, 0))
    assert values(other.items) == ["v"]
    assert broker.log.commits == commits + 1
    broker.close()


# -- refusals -------------------------------------------------------------------------------------


def test_each_refusal_names_its_operation_and_changes_nothing():
    broker, reader = begun(limits=Limits(lease_ms=LONG_MS, max_message_bytes=100))
    version = broker.write(CACHE, "k", b"text")
    broker.cache("m", "default", "default")
    memory = ("default", "default", "m")
    wrongs: list[tuple[Operation, type[PenstockError], int]] = [
        (producing("nowhere", "v"), NotFound, 404),
        (producing("u", "v", partition_override=9), InvalidArgument, 400),
        (producing("u", "v" * 101), TooLarge, 413),
        (Produce("u", "", "v", deadline_ms=1), InvalidArgument, 400),
        (broker.acking(reader, 0, owner="p"), FailedPrecondition, 409),
        (broker.acking(reader, 0, delivery_id="1-7"), FailedPrecondition, 409),
        (broker.acking(reader, 7), FailedPrecondition, 409),
        (broker.acking(reader, 0, group="nobody"), FailedPrecondition, 409),
        (broker.acking(reader, 0, topic="nowhere"), NotFound, 404),
        (broker.nacking(reader, 7), FailedPrecondition, 409),
        (broker.nacking(reader, 0, delay_ms=-1), InvalidArgument, 400),
        (effect("never begun"), FailedPrecondition, 409),
        (Put(CACHE, "k", b"x", if_not_exists=True), AlreadyExists, 409),
        (Put(CACHE, "k", b"x", if_version=version + 1), VersionMismatch, 412),
        (Put(CACHE, "k", b"x" * 101), TooLarge, 413),
        (Delete(CACHE, "k", version + 1), VersionMismatch, 412),
        (Increment(CACHE, "k"), FailedPrecondition, 409),
        (Put(("default", "default", "none"), "k", b"x"), NotFound, 404),
        (Put(memory, "k", b"x"), FailedPrecondition, 409),
    ]
    for wrong, kind, status in wrongs:
        error = broker.refused(
            producing("u", "before", once="key"),
            broker.acking(reader, 1),
            Put(CACHE, "other", b"v"),
            wrong,
            producing("u", "behind"),
        )
        assert (type(error), error.http_status, error.operation) == (kind, status, 3), wrong
        assert error.message.startswith("operation 3: ")
    assert broker.contents("u") == []
    assert broker.keys(CACHE) == {"k"}
    assert broker.in_flight() == 2
    broker.produce("u", "now", envelope=producing("u", "", once="key").envelope)
    check(broker.state)
    broker.close()


def test_the_shape_of_a_transaction_is_checked():
    broker, _ = begun()
    assert isinstance(broker.refused(), InvalidArgument)
    many = [producing("u", "v")] * (MAX_TXN_OPS + 1)
    assert isinstance(broker.refused(*many), TooLarge)
    elsewhere = broker.cache("c", "t", "n", durable=True)
    mixed = broker.refused(producing("u", "v"), Put(elsewhere, "k", b"v"))
    assert "one namespace" in mixed.message
    assert len(broker.do(*many[1:])) == MAX_TXN_OPS
    broker.close()


def test_a_full_disk_refuses_all_of_it_but_what_only_settles_uses_the_reserve():
    broker, reader = begun()
    broker.log.has_room = lambda nbytes, *, reserve=False: reserve
    error = broker.refused(producing("u", "v"), broker.acking(reader, 0))
    assert isinstance(error, Unavailable)
    assert error.operation is None
    assert isinstance(broker.refused(Put(CACHE, "k", b"v")), Unavailable)
    assert broker.do(broker.acking(reader, 0)) == [SETTLED]
    del broker.log.has_room
    assert broker.do(producing("u", "v"), broker.acking(reader, 1))[1] == SETTLED
    check(broker.state)
    broker.close()


def test_a_transaction_that_no_frame_can_hold_is_too_large():
    broker, _ = begun()
    broker.log.max_frame_bytes = 1000
    assert isinstance(broker.refused(*[producing("u", "v" * 300)] * 4), TooLarge)
    broker.do(*[producing("u", "v" * 300)] * 3)
    broker.close()


def test_full_memory_refuses_a_transaction_that_produces():
    broker = TransactionBroker(limits=Limits(memory_bytes=20_000))
    broker.topic("u")
    refusals = [broker.try_commit(producing("u", "v" * 1000)) for _ in range(30)]
    assert isinstance(refusals[0], list)
    assert isinstance(refusals[-1], ResourceExhausted)
    broker.close()


# -- produces ---------------------------------------------------------------------------------


def test_buffers_are_counted_over_the_whole_transaction():
    broker, _ = begun(limits=Limits(max_partition_msgs=3, max_partition_bytes=100))
    three = [producing("u", "v", partition_override=0)] * 3
    fourth = broker.refused(*three, producing("u", "v", partition_override=0))
    assert isinstance(fourth, ResourceExhausted)
    assert (fourth.limit, fourth.operation, fourth.partition) == ("partition_msgs", 3, 0)
    wide = [producing("u", "v" * 60, partition_override=index) for index in (0, 1, 0)]
    too_wide = broker.refused(*wide)
    assert isinstance(too_wide, ResourceExhausted)
    assert (too_wide.limit, too_wide.operation) == ("partition_bytes", 2)
    broker.do(*three, wide[1])
    assert isinstance(broker.refused(three[0]), ResourceExhausted)
    check(broker.state)
    broker.close()


def test_a_refused_produce_is_counted_like_one_that_stands_alone():
    broker, _ = begun()
    broker.refused(producing("u", "v"), producing("nowhere", "v"))
    assert broker.engine.rejected == {("(unknown)", "", "not_found"): 1}
    broker.close()


def test_offsets_follow_each_other_over_the_partitions_of_a_topic():
    broker, _ = begun()
    places = broker.do(*(producing("u", f"v{n}", partition_override=n % 2) for n in range(5)))
    assert places == [StoredResult(n % 2, n) for n in range(5)]
    assert broker.produce("u", "next").offset == 5
    assert broker.contents("u") == ["v0", "v1", "v2", "v3", "v4", "next"]
    check(broker.state)
    broker.close()


def test_a_known_idempotency_key_counts_as_done_and_stores_nothing():
    broker, reader = begun()
    broker.do(producing("u", "first", once="k"))
    results = broker.do(
        producing("u", "second", once="k"),
        producing("u", "new", once="l"),
        producing("u", "new again", once="l"),
        producing("t", "another topic", once="l"),
        broker.acking(reader, 0),
    )
    assert results[0] == results[2] == DuplicateResult()
    assert isinstance(results[1], StoredResult)
    assert isinstance(results[3], StoredResult)
    assert broker.contents("u") == ["first", "new"]
    check(broker.state)
    broker.close()


def test_idempotency_keys_are_limited_over_the_whole_transaction():
    broker, _ = begun(limits=Limits(max_idempotency_keys=2))
    error = broker.refused(*(producing("u", "v", once=f"k{n}") for n in range(3)))
    assert isinstance(error, ResourceExhausted)
    assert (error.limit, error.operation) == ("idempotency_keys", 2)
    broker.do(*(producing("u", "v", once=f"k{n}") for n in range(2)))
    broker.close()


# -- deliveries and effects -------------------------------------------------------------------


def test_an_offset_that_is_done_refuses_the_transaction_so_that_nothing_is_produced_twice():
    """The lease of a worker ends, another finishes the message, then the first one is done."""
    broker, late = begun()
    item = late.take()[0]
    late.live.close()
    broker.pass_ms(1001)
    other = broker.consume("t", "g", "other", lease_ms=LONG_MS)
    broker.do(producing("u", "result"), broker.fenced(other, other.take()[0]))
    refusal = broker.refused(producing("u", "result"), broker.acking(late, item))
    assert isinstance(refusal, FailedPrecondition)
    assert refusal.operation == 1
    assert "already done" in refusal.message
    assert broker.contents("u") == ["result"]
    broker.close()


def test_a_delivery_id_fences_an_earlier_delivery_to_the_same_owner():
    broker, reader = begun()
    first = reader.take()[0]
    broker.pass_ms(1001)
    again = next(item for item in reader.take() if item.offset == first.offset)
    refusal = broker.refused(producing("u", "stale"), broker.fenced(reader, first))
    assert isinstance(refusal, FailedPrecondition)
    broker.do(producing("u", "fresh"), broker.fenced(reader, again))
    assert broker.contents("u") == ["fresh"]
    broker.close()


def test_an_offset_of_another_partition_is_refused_without_a_read():
    broker, _ = begun()
    reader = broker.consume("u", lease_ms=LONG_MS)
    broker.do(*(producing("u", "v", partition_override=n % 2) for n in range(4)))
    for item in reader.take():
        broker.ack(reader, item)
    broker.scheduler.is_holding_reads = True
    for partition in (0, 1):
        refusal = broker.refused(broker.acking(reader, 1, partition=partition))
        assert isinstance(refusal, FailedPrecondition)
    broker.close()


@pytest.mark.parametrize("kinds", ["ack ack", "ack nack", "nack nack"])
def test_a_delivery_is_settled_once_in_a_transaction(kinds: str):
    broker, reader = begun()
    kind: dict[str, Operation] = {
        "ack": broker.acking(reader, 0),
        "nack": broker.nacking(reader, 0),
    }
    refusal = broker.refused(*(kind[each] for each in kinds.split()))
    assert isinstance(refusal, FailedPrecondition)
    assert refusal.operation == 1
    broker.close()


def test_a_nack_of_the_last_attempt_buries_the_message():
    broker, _ = begun()
    broker.do(producing("u", "dying", retry_policy=RetryPolicy(1)), producing("u", "dead"))
    reader = broker.consume("u", lease_ms=LONG_MS)
    dying, dead = sorted(reader.take(), key=lambda item: item.offset)
    broker.do(
        broker.nacking(reader, dying), broker.nacking(reader, dead, dead=True), producing("t", "x")
    )
    assert sorted(broker.contents("dlq.u")) == ["dead", "dying"]
    check(broker.state)
    broker.close()


def test_acks_make_room_in_flight_for_the_next_deliveries():
    broker, reader = begun(limits=Limits(max_in_flight=2, lease_ms=LONG_MS))
    broker.put("t", "c", "d", "e")
    assert values(reader.take()) == ["a", "b"]
    broker.do(broker.acking(reader, 0), producing("u", "v"), broker.nacking(reader, 1, delay_ms=0))
    assert values(reader.take()) == ["b", "c"]
    broker.pass_ms(10)
    check(broker.state)
    broker.close()


def test_an_effect_is_committed_once():
    broker, _ = begun()
    broker.begin("k")
    twice = broker.refused(producing("u", "v"), effect("k"), effect("k"))
    assert twice.operation == 2
    assert isinstance(broker.refused(effect("k", owner="p")), FailedPrecondition)
    broker.do(producing("u", "v"), effect("k", result="r"))
    again = broker.refused(producing("u", "v"), effect("k", result="r"))
    assert isinstance(again, FailedPrecondition)
    assert broker.contents("u") == ["v"]
    broker.close()


def test_the_results_of_effects_are_limited_over_the_whole_transaction():
    broker, _ = begun(limits=Limits(memory_bytes=4000))
    for key in ("k", "l"):
        broker.begin(key)
    error = broker.refused(effect("k", result="x" * 600), effect("l", result="x" * 600))
    assert isinstance(error, ResourceExhausted)
    assert error.operation == 1
    broker.close()


# -- caches -----------------------------------------------------------------------------------


def test_a_watch_sees_a_transaction_when_it_is_durable():
    broker, _ = begun()
    watcher = broker.watch(CACHE)
    broker.do(Put(CACHE, "k", b"1"), producing("u", "v"), Delete(CACHE, "k"))
    assert watcher.kinds() == ["put", "delete"]
    broker.close()


def test_a_ttl_counts_from_the_answer():
    broker, _ = begun()
    broker.hold_writes()
    outcomes = broker.submit(
        broker.engine.transactions.commit, command_of(Put(CACHE, "k", b"v", 100))
    )
    broker.scheduler.run()
    broker.clock.advance(500)
    assert not outcomes
    broker.disk.release()
    broker.settle()
    value = broker.value(CACHE, "k")
    assert value is not None
    assert value.ttl_ms == 100
    broker.pass_ms(100)
    assert broker.read(CACHE, "k") is None
    broker.close()


def test_what_a_cache_cannot_hold_refuses_all_of_it():
    broker, _ = begun()
    broker.configure(CACHE, durable=True, max_entries=2)
    puts = [Put(CACHE, f"k{n}", b"v") for n in range(3)]
    error = broker.refused(*puts, producing("u", "v"))
    assert isinstance(error, TooLarge)
    assert error.operation == 2
    broker.do(*puts[:2], producing("u", "v"))
    broker.do(puts[2], producing("u", "v"))
    assert len(broker.keys(CACHE)) == 2
    broker.close()


# -- repeats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["nothing", "crash", "restart", "seal_and_crash"])
def test_a_repeat_gets_the_first_answer_and_does_nothing_twice(between: str):
    broker, reader = begun()
    operations: list[Operation] = [
        producing("u", "v"),
        broker.acking(reader, 0),
        Increment(CACHE, "n"),
        Delete(CACHE, "none"),
    ]
    first = broker.do(*operations, tx="tx")
    if between != "nothing":
        getattr(broker, between)()
    seq = broker.log.seq
    assert broker.do(*operations, tx="tx") == first
    assert broker.log.seq == seq
    assert (broker.contents("u"), broker.read(CACHE, "n")) == (["v"], b"1")
    assert isinstance(broker.refused(*operations, tx="another"), FailedPrecondition)
    check(broker.state)
    broker.close()


def test_a_repeat_that_overtakes_the_answer_waits_with_it():
    broker, reader = begun()
    broker.hold_writes()
    command = command_of(producing("u", "v"), broker.acking(reader, 0), tx="tx")
    first = broker.submit(broker.engine.transactions.commit, command)
    broker.scheduler.run()
    second = broker.submit(broker.engine.transactions.commit, command)
    broker.scheduler.run()
    assert not first
    assert not second
    broker.disk.release()
    broker.settle()
    assert first == second
    assert broker.contents("u") == ["v"]
    broker.close()


def test_an_id_is_for_one_transaction():
    broker, _ = begun()
    broker.do(producing("u", "v"), tx="tx")
    outcome = broker.try_commit(producing("u", "w"), tx="tx", fingerprint=b"other")
    assert isinstance(outcome, FailedPrecondition)
    assert "transaction_id" in outcome.message
    assert broker.contents("u") == ["v"]
    broker.close()


def test_a_refused_transaction_leaves_its_id_free():
    broker, _ = begun()
    broker.refused(producing("nowhere", "v"), tx="tx")
    broker.topic("nowhere")
    broker.do(producing("nowhere", "v"), tx="tx")
    broker.close()


def test_an_id_is_forgotten_after_the_idempotency_ttl():
    broker, _ = begun(limits=Limits(idempotency_ttl_ms=5000))
    broker.do(producing("u", "v"), tx="tx")
    broker.pass_ms(4999)
    broker.do(producing("u", "v"), tx="tx")
    assert broker.contents("u") == ["v"]
    broker.pass_ms(1)
    broker.do(producing("u", "v"), tx="tx")
    assert broker.contents("u") == ["v", "v"]
    broker.pass_ms(7000)
    assert len(broker.state.transactions) == 0
    assert broker.state.transactions.answer_bytes == 0
    check(broker.state)
    broker.close()


def test_remembered_transactions_are_limited():
    broker, _ = begun(limits=Limits(max_idempotency_keys=2, idempotency_ttl_ms=1000))
    for n in range(2):
        broker.do(producing("u", "v"), tx=f"tx{n}")
    error = broker.refused(producing("u", "v"), tx="tx2")
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "idempotency_keys"
    broker.do(producing("u", "without an id"))
    broker.pass_ms(1000)
    broker.do(producing("u", "v"), tx="tx2")
    broker.close()
    small, _ = begun(limits=Limits(memory_bytes=4000))
    many = [producing("u", "v")] * 400
    error = small.refused(*many, tx="tx")
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "memory_bytes"
    small.close()


# -- the router, and the end -------------------------------------------------------------------


class Waiting:
    def __init__(self) -> None:
        self.asked: list[tuple[Produce, Decided]] = []

    def route(self, command: Produce, decided: Decided) -> None:
        self.asked.append((command, decided))


def test_all_messages_are_routed_before_anything_is_decided():
    router = Waiting()
    broker, reader = begun_with(router)
    command = command_of(
        producing("t", "one"), broker.acking(reader, 0), producing("t", "two"), tx="tx"
    )
    outcomes = broker.submit(broker.engine.transactions.commit, command)
    broker.settle()
    assert len(router.asked) == 2
    assert broker.in_flight() == 2
    router.asked[1][1](RoutingDecision("second", "u", 1))
    broker.settle()
    assert not outcomes
    router.asked[0][1](RoutingDecision("first", "u", 0))
    broker.settle()
    assert outcomes == [[StoredResult(0, 0), SETTLED, StoredResult(1, 1)]]
    assert broker.contents("u") == ["one", "two"]
    router.asked.clear()
    again = broker.submit(broker.engine.transactions.commit, command)
    broker.settle()
    assert again == outcomes
    assert not router.asked, "a repeat needs no router"
    broker.close()


def test_a_key_that_is_under_way_at_the_router_refuses_the_transaction():
    router = Waiting()
    broker, reader = begun_with(router)
    keyed = producing("t", "v", once="k")
    alone = broker.submit(broker.engine.produce, keyed)
    command = command_of(broker.acking(reader, 0), keyed)
    outcomes = broker.submit(broker.engine.transactions.commit, command)
    broker.settle()
    assert isinstance(outcomes[0], FailedPrecondition)
    assert outcomes[0].operation == 1
    assert broker.in_flight() == 2
    router.asked[0][1](None)
    broker.settle()
    assert alone
    broker.close()


def begun_with(router: Waiting) -> tuple[TransactionBroker, Reader]:
    broker = TransactionBroker(FaultyVfs(), router=router)
    broker.topic("t")
    broker.topic("u", 2)
    outcomes = broker.submit(broker.engine.produce_many, [producing("t", "a"), producing("t", "b")])
    for _, decided in router.asked:
        decided(None)
    router.asked.clear()
    broker.settle()
    assert outcomes
    return broker, broker.consume("t", lease_ms=LONG_MS)


@pytest.mark.parametrize("what", ["apply", "apply_message"])
def test_a_defect_in_the_midst_of_a_transaction_ends_serving(
    what: str, monkeypatch: pytest.MonkeyPatch
):
    """driftq-50: the log has all of it, memory a part, so nobody is told anything any more."""
    broker, reader = begun()

    def broken(*args: object) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, what, broken)
        outcome = broker.try_commit(producing("u", "v"), broker.acking(reader, 0))
    assert isinstance(outcome, Unavailable)
    assert isinstance(broker.try_commit(producing("u", "v")), Unavailable)
    assert not broker.engine.health().ready
    broker.crash()
    check(broker.state)
    is_there = broker.contents("u") == ["v"]
    unfinished = broker.state.topics["t"].groups["g"].progress[0].unfinished
    assert is_there == (0 not in unfinished), "all of it or nothing"
    broker.close()


def test_a_log_that_fails_refuses_the_transactions_that_wait():
    broker, reader = begun()
    broker.disk.fail_call(1, errno.EIO)
    outcome = broker.try_commit(producing("u", "v"), broker.acking(reader, 0), tx="tx")
    assert isinstance(outcome, Unavailable)
    broker.crash()
    assert broker.contents("u") == []
    broker.close()


def test_quotas_count_the_messages_and_the_caches_of_a_transaction():
    broker, reader = begun()

    def limit(**limits: int) -> None:
        def change(done: Any) -> None:
            broker.engine.registry.change(("default", "default", ""), done, quota=Quota(**limits))

        broker.must(change)

    limit(backlog_msgs=4)
    two = [producing("u", "v"), producing("u", "v")]
    assert len(broker.do(*two, broker.acking(reader, 0))) == 3
    error = broker.refused(*two, broker.acking(reader, 1))
    assert isinstance(error, ResourceExhausted)
    assert (error.limit, error.reason) == ("backlog_msgs", "quota")
    limit(cache_memory=1000)
    error = broker.refused(*two, Put(CACHE, "k", b"v" * 2000))
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "cache_memory"
    broker.do(Put(CACHE, "k", b"v"), broker.acking(reader, 1))
    assert broker.contents("u") == ["v", "v"]
    broker.close()


@pytest.mark.parametrize("reason", ["cache_memory", "full disk", "frame"])
def test_a_refused_transaction_is_not_charged(reason: str, monkeypatch: pytest.MonkeyPatch):
    """felix-98: whatever refuses it, rates and room are as if it had never come."""
    broker, _ = begun()
    quota = Quota(publish_rate_limit=10, cache_memory=1500, disk_bytes=1_000_000)
    path = ("default", "default", "")
    broker.must(lambda done: broker.engine.registry.change(path, done, quota=quota))
    many: list[Operation] = [producing("u", "v" * 100)] * 500
    value = b"v" * 2000 if reason == "cache_memory" else b"v" * 900
    with monkeypatch.context() as patch:
        if reason == "full disk":
            patch.setattr(broker.log, "has_room", lambda nbytes, *, reserve=False: reserve)
        if reason == "frame":
            patch.setattr(broker.log, "max_frame_bytes", 1000)
        for _ in range(3):
            refusal = broker.refused(*many, Put(CACHE, "k", value))
            kinds = {"full disk": Unavailable, "frame": TooLarge}
            assert isinstance(refusal, kinds.get(reason, ResourceExhausted))
    broker.do(*many, Put(CACHE, "k", b"v" * 900))
    slowed = broker.refused(producing("u", "v"))
    assert isinstance(slowed, ResourceExhausted)
    assert slowed.limit == "publish_rate_limit", "what happens is charged"
    full = broker.refused(Put(CACHE, "l", b"v" * 900))
    assert isinstance(full, ResourceExhausted)
    assert full.limit == "cache_memory"
    broker.close()


def test_quotas_of_disk_and_of_keys_count_all_of_a_transaction() -> None:
    """felix-98: messages and durable caches share the disk; each new key counts once."""
    broker, _ = begun()
    path = ("default", "default", "")

    def limit(**limits: int) -> None:
        quota = Quota(**limits)
        broker.must(lambda done: broker.engine.registry.change(path, done, quota=quota))

    limit(disk_bytes=3500)
    half: list[Operation] = [producing("u", "v" * 1400), Put(CACHE, "k", b"v" * 1000)]
    error = broker.refused(*half, Put(CACHE, "l", b"v" * 1500))
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "disk_bytes"
    broker.do(*half)
    limit(idempotency_keys=2)
    keys = [producing("u", "v", once=once) for once in ("a", "b", "a")]
    error = broker.refused(*keys, producing("u", "v", once="c"))
    assert isinstance(error, ResourceExhausted)
    assert error.limit == "idempotency_keys"
    broker.do(*keys)
    assert isinstance(broker.refused(producing("u", "v", once="c")), ResourceExhausted)
    broker.close()
