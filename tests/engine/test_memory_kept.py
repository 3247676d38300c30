"""What `memory_bytes` counts, and what stays in memory when nobody needs it any more."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.core.invariants import check
from penstock.engine import eviction
from penstock.engine import window as window_module
from penstock.engine.message_size import held_bytes
from penstock.engine.window import Window
from penstock.model.envelope import DeadLetter, Envelope, RetryPolicy, Routing
from penstock.model.limits import CHUNK_BYTES_IN_MEMORY, KIB, Limits
from penstock.model.ranges import RangeRequest
from penstock.model.records import Message, Stored, encode_record, stored_bytes
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk

SEGMENTS = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
TAIL = 8 * KIB
CHUNK_SLACK = 4 * KIB
"""The tail keeps whole chunks."""


def size_of(message: Stored) -> int:
    return stored_bytes(message)


def recount(broker: Broker) -> int:
    """What the window holds, counted from the messages themselves."""
    window = broker.engine.parts.window
    total = 0
    for logs in window._topics.values():
        for log in logs:
            resident = [chunk for chunk in log.chunks if chunk.messages is not None]
            assert len(resident) == log.residents
            assert resident == log.chunks[len(log.chunks) - log.residents :]
            for chunk in resident:
                total += CHUNK_BYTES_IN_MEMORY
                total += sum(held_bytes(m, size_of(m)) for m in chunk.messages or ())
    return total


def recount_pages(broker: Broker) -> int:
    pages = broker.engine.parts.pages._pages.values()
    return sum(held_bytes(m, size_of(m)) for page in pages for m in page)


def finish_all(broker: Broker, *readers: Reader) -> None:
    while any(reader.items for reader in readers):
        for reader in readers:
            for item in reader.take():
                assert broker.ack(reader, item) is None


def envelope_of(rng: random.Random) -> Envelope | None:
    if rng.random() < 0.3:
        return None
    text = "é" * rng.randrange(40) if rng.random() < 0.2 else "r" * rng.randrange(300)
    return Envelope(
        run_id=text,
        step_id="s" * rng.randrange(50),
        tenant_id="acme",
        retry_policy=RetryPolicy(5, 1000) if rng.random() < 0.5 else None,
    )


MESSAGES = {
    "small": ("k", "v", None, None),
    "no key": ("", "value", None, None),
    "large": ("key", "v" * 5000, None, None),
    "not ASCII": ("ключ", "значение" * 20, None, None),
    "one wide character": ("", "v" * 400 + "\U0001f600", None, None),
    "small envelope": ("k", "v", Envelope(run_id="r" * 16, tenant_id="acme"), None),
    "every text of an envelope": (
        "k",
        "v",
        Envelope(
            run_id="r" * 90,
            step_id="s" * 91,
            parent_step_id="p" * 92,
            tenant_id="t" * 93,
            idempotency_key="i" * 94,
            target_topic="g" * 95,
            deadline="2030-01-01T00:00:00Z",
            retry_policy=RetryPolicy(3, 1000, 60_000),
        ),
        None,
    ),
    "dead letter": (
        "k",
        "v",
        Envelope(dlq=DeadLetter("topic", 3, 70_000, "group", 5, "e" * 3000, 1_700_000_000_000)),
        None,
    ),
    "routing": ("k", "v", None, Routing("label", {f"name{n}": "m" * 50 for n in range(8)})),
}


def really_held(thing: Any) -> int:
    """A message's objects one by one. Small numbers and the empty text are shared by all."""
    if thing is None or thing == "" or (isinstance(thing, int) and -6 < thing < 257):
        return 0
    nbytes = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return nbytes + sum(really_held(k) + really_held(v) for k, v in thing.items())
    if hasattr(thing, "__struct_fields__"):
        members = [getattr(thing, name) for name in thing.__struct_fields__]
        return nbytes + sum(map(really_held, members))
    return nbytes


@pytest.mark.parametrize("shape", MESSAGES)
def test_a_message_is_counted_with_everything_that_it_holds(shape: str):
    """driftq-24. Between what its objects take and a little more: the allocator rounds up, there
    is a place in a list and in the log, and texts are smaller from Python 3.12 on."""
    key, value, envelope, routing = MESSAGES[shape]
    message = Message(7, 0, 10_000, 1_700_000_000_000, key, value, envelope, routing)
    before = held_bytes(message, size_of(message))
    encode_record(message)
    assert held_bytes(message, size_of(message)) == before, "it changed when it was written"
    held = really_held(message)
    assert held <= before <= held * 1.3 + 80


@pytest.mark.parametrize("seed", range(6))
def test_what_is_counted_is_what_a_recount_finds_after_any_history(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """driftq-24: produce, batches, acks, sealing, retention, deletions, restarts."""
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 8)
    rng = random.Random(seed)
    limits = Limits(memory_bytes=96 * KIB, tail_bytes=TAIL, max_in_flight=50)
    broker = on_disk(limits=limits, options=SEGMENTS)
    broker.topic("t", 2)
    readers = [broker.consume(group=name, lease_ms=LONG_MS) for name in ("a", "b")]
    for step in range(150):
        act = rng.random()
        if act < 0.5:
            for _ in range(rng.randrange(1, 12)):
                value = "v" * rng.randrange(800)
                broker.produce("t", value, key=str(step), envelope=envelope_of(rng))
        elif act < 0.6:
            batch = [Produce("t", str(n), "b" * 300, envelope_of(rng)) for n in range(30)]
            broker.must(broker.engine.produce_many, batch)
        elif act < 0.85:
            reader = rng.choice(readers)
            for item in reader.take():
                assert broker.ack(reader, item) is None
        elif act < 0.9:
            broker.pass_ms(1001)
        elif act < 0.94:
            broker.must(broker.engine.configure_topic, "t", None, rng.choice([0, 40 * KIB]))
        elif act < 0.97:
            broker.topic("other")
            broker.put("other", "x" * 500, "y" * 500)
            broker.must(broker.engine.delete_topic, "other")
        else:
            broker.restart()
            readers = [broker.consume(group=name, lease_ms=LONG_MS) for name in ("a", "b")]
        window = broker.engine.parts.window
        assert window.used_bytes == recount(broker)
        assert window.page_bytes == recount_pages(broker)
        assert not window.is_over() or not window.resident_partitions
        assert set(window._with_residents) == {
            log for logs in window._topics.values() for log in logs if log.residents
        }
    check(broker.state)
    broker.close()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_broker_whose_groups_are_up_to_date_holds_no_more_than_the_tail(
    is_sealed: bool, monkeypatch: pytest.MonkeyPatch
):
    """driftq-24: whatever memory_bytes allow; and everything can still be read."""
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 4)
    broker = on_disk(limits=Limits(tail_bytes=TAIL), options=SEGMENTS)
    broker.topic("t", 2)
    readers = [broker.consume(group=name, lease_ms=LONG_MS) for name in ("a", "b")]
    sent = []
    for n in range(300):
        envelope = Envelope(run_id=f"run-{n}", partition_override=n % 2)
        sent.append(broker.produce("t", f"{n} ".ljust(300, "."), envelope=envelope))
        finish_all(broker, *readers)
    if is_sealed:
        broker.seal()
    broker.pass_ms(1001)
    assert broker.engine.parts.window.used_bytes <= TAIL + CHUNK_SLACK
    stored = broker.stored("t", 0) + broker.stored("t", 1)
    assert sorted(stored, key=lambda message: message.offset) == sent
    late = broker.consume(group="late", lease_ms=LONG_MS)
    found: list[int] = []
    while late.items:
        for item in late.take():
            found.append(item.offset)
            assert broker.ack(late, item) is None
    assert sorted(found) == [message.offset for message in sent]
    for partition in range(2):
        request = RangeRequest(topic="t", partition=partition, format="ndjson")
        opened = broker.must(broker.engine.ranges.open, request)
        lines = b""
        while (piece := broker.must(opened.next)) is not None:
            lines += piece
        assert lines.count(b"\n") == 150
    broker.close()


def test_messages_that_a_group_has_not_finished_stay_in_memory():
    """Only finished ones go by themselves: a group that is behind reads from memory."""
    broker = on_disk(limits=Limits(tail_bytes=0, max_in_flight=10**6), options=SEGMENTS)
    broker.topic()
    behind = broker.consume(group="behind", lease_ms=LONG_MS)
    ahead = broker.consume(group="ahead", lease_ms=LONG_MS)
    broker.put("t", *["x" * 300 for _ in range(100)])
    finish_all(broker, ahead)
    broker.pass_ms(1001)
    log = broker.engine.parts.window.log(broker.state.topics["t"].id, 0)
    assert sum(chunk.msgs for chunk in log.chunks if chunk.messages is not None) == 100
    finish_all(broker, behind)
    broker.pass_ms(1001)
    assert broker.engine.parts.window.used_bytes == 0
    broker.close()


def test_under_pressure_finished_messages_go_before_unfinished_older_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    """A backlog stays in memory while others' finished traffic passes through."""
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 4)
    limits = Limits(memory_bytes=128 * KIB, tail_bytes=TAIL, max_in_flight=10**6)
    broker = on_disk(limits=limits, options=SEGMENTS)
    for name in ("backlog", "busy"):
        broker.topic(name)
    broker.consume("backlog", "g", lease_ms=LONG_MS)
    busy = broker.consume("busy", "g", lease_ms=LONG_MS)
    broker.put("backlog", *["b" * 500 for _ in range(60)])
    for _ in range(500):
        broker.put("busy", "x" * 500)
        finish_all(broker, busy)
    log = broker.engine.parts.window.log(broker.state.topics["backlog"].id, 0)
    assert log.residents == len(log.chunks) == 15
    broker.close()


def test_an_idle_group_keeps_nothing_alive_that_memory_has_let_go():
    """A group that has read all there is has no page of its own."""
    broker = on_disk(limits=Limits(tail_bytes=0), options=SEGMENTS)
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.put("t", "x" * 300)
    finish_all(broker, reader)
    (run,) = broker.engine.parts.dispatcher._active.all()
    assert [feed.messages for feed in run.feeds] == [[]]
    broker.close()


def test_memory_that_a_large_backlog_took_is_given_back(monkeypatch: pytest.MonkeyPatch):
    """The allocator is told when much less is held than before, and only then."""
    monkeypatch.setattr(eviction, "GIVE_BACK_BYTES", 20 * KIB)
    calls: list[None] = []
    monkeypatch.setattr(eviction, "trim_memory", lambda: calls.append(None))
    broker = on_disk(limits=Limits(tail_bytes=0, max_in_flight=10**6), options=SEGMENTS)
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.put("t", *["x" * 300 for _ in range(100)])
    broker.pass_ms(1001)
    assert not calls
    finish_all(broker, reader)
    broker.pass_ms(3003)
    assert len(calls) == 1
    broker.close()


def test_evicted_messages_are_trimmed_by_age_before_they_are_sealed():
    """Retention: messages that memory let go of are not kept longer for that."""
    broker = on_disk(limits=Limits(tail_bytes=0))
    broker.topic()
    broker.must(broker.engine.configure_topic, "t", 5000, None)
    reader = broker.consume(lease_ms=LONG_MS)
    broker.put("t", "one", "two")
    finish_all(broker, reader)
    broker.pass_ms(1001)
    assert broker.engine.parts.window.used_bytes == 0
    broker.pass_ms(6000)
    assert broker.state.topics["t"].partitions[0].first_offset == 2
    broker.close()


def test_a_start_takes_no_more_memory_than_the_broker_had(monkeypatch: pytest.MonkeyPatch):
    """What was finished before the stop leaves memory while the log is replayed."""
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 4)
    broker = on_disk(limits=Limits(tail_bytes=TAIL), options=WalOptions(reserve_bytes=0))
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    for n in range(200):
        broker.put("t", f"{n} ".ljust(300, "."))
        finish_all(broker, reader)
    used: list[int] = []
    add = Window.add

    def add_and_look(window: Window, message: Message, size: int, position: int) -> None:
        add(window, message, size, position)
        used.append(window.used_bytes)

    monkeypatch.setattr(Window, "add", add_and_look)
    broker.restart()
    assert len(used) == 200
    assert max(used) <= 3 * TAIL
    assert len(broker.stored("t")) == 200
    broker.close()


def test_a_page_that_is_loaded_again_is_counted_once():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    parts = broker.engine.parts
    log = parts.window.log(broker.state.topics["t"].id, 0)
    for _ in range(2):
        parts.pages.load(log, 0, lambda: None)
        broker.settle()
    assert parts.pages.reads == 2
    assert parts.window.page_bytes == recount_pages(broker)
    assert parts.pages._starts == {(log.topic_id, 0): [0]}
    broker.close()
