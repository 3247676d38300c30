"""A batch is stored as one: what that saves must not be seen. Only its price differs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.api.messages import Produce
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.engine.append_batch import BATCH_BYTES
from penstock.engine.window import CHUNK_BYTES, CHUNK_MSGS
from penstock.model.envelope import Envelope
from penstock.model.errors import Unavailable
from penstock.model.limits import KIB, MIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, on_disk, values

ROOMY = WalOptions(segment_bytes=64 * MIB, reserve_bytes=0)
TINY = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
SPACE_CHECK_MS = 1001
ONCE = Envelope(idempotency_key="once")

SMALL = [Produce("t", f"key {n}", f"value {n}") for n in range(3 * CHUNK_MSGS)]
LARGE = [Produce("t", f"key {n}", "x" * (BATCH_BYTES // 3 + n)) for n in range(20)]
MANY = [Produce("other", "", "x" * (10 * KIB + n)) for n in range(300)]
HUGE = [Produce("t", "", "x" * (CHUNK_BYTES + n)) for n in range(3)]
MIXED = [
    Produce("t", "a", "first"),
    Produce("no such topic", "a", "refused"),
    Produce("other", "a", "elsewhere"),
    Produce("t", "ä", "ключ", ONCE),
    Produce("t", "b", "a duplicate", ONCE),
    Produce("t", "c", "last"),
]


def two_topics(options: WalOptions = ROOMY, **limits: int) -> Broker:
    broker = on_disk(options=options, limits=replace(Limits(), **limits))
    broker.topic("t", partitions=3)
    broker.topic("other")
    return broker


def everything(broker: Broker) -> list[str]:
    """The values of every partition."""
    return [
        value
        for topic in broker.state.topics.values()
        for partition in topic.partitions
        for value in values(broker.stored(topic.name, partition.index))
    ]


def chunks(broker: Broker) -> list[list[tuple[Any, ...]]]:
    window, topics = broker.engine.parts.window, broker.state.topics.values()
    logs = [window.log(topic.id, p.index) for topic in topics for p in topic.partitions]
    return [
        [
            (c.first, c.base, c.last, c.last_ts, c.msgs, c.bytes, list(c.positions), c.messages)
            for c in log.chunks
        ]
        for log in logs
    ]


@pytest.mark.parametrize(
    "commands",
    [SMALL, LARGE, MANY, HUGE, MIXED],
    ids=["small", "large", "many", "huge", "mixed"],
)
def test_batches_leave_what_their_messages_one_by_one_would(commands: list[Produce]):
    """Outcomes, state, and where each message is."""
    together, apart = two_topics(), two_topics()
    batches = [commands[:2], commands[2:]]
    outcomes = [together.submit(together.engine.produce_many, batch) for batch in batches]
    together.settle()
    assert _plain(outcomes[0][0] + outcomes[1][0]) == _plain(one_by_one(apart, commands))
    assert take_image(together.state) == take_image(apart.state)
    assert chunks(together) == chunks(apart)
    assert together.engine.parts.window.used_bytes == apart.engine.parts.window.used_bytes
    assert together.engine.rejected == apart.engine.rejected
    check(together.state)
    together.close()
    apart.close()


def one_by_one(broker: Broker, commands: list[Produce]) -> list[Any]:
    """Outcomes of commands that come at once, as those of a batch do."""
    outcomes = [broker.submit(broker.engine.produce, command) for command in commands]
    broker.settle()
    return [outcome for [outcome] in outcomes]


def _plain(outcomes: list[Any]) -> list[Any]:
    return [repr(o) if isinstance(o, Exception) else o for o in outcomes]


def test_a_batch_reaches_those_who_wait_in_every_partition():
    broker = two_topics()
    readers = [broker.consume("t"), broker.consume("t", "another group"), broker.consume("other")]
    broker.call(broker.engine.produce_many, MIXED)
    given = [sorted(values(reader.items)) for reader in readers]
    assert given == [["first", "last", "ключ"], ["first", "last", "ключ"], ["elsewhere"]]
    broker.close()


@pytest.mark.parametrize("commands", [SMALL, LARGE], ids=["small", "large"])
def test_what_a_batch_stored_is_read_back_from_the_log(commands: list[Produce]):
    """Out of memory, and after a crash."""
    broker = two_topics(memory_bytes=1)
    broker.call(broker.engine.produce_many, commands)
    assert broker.engine.parts.window.used_bytes == 0
    expected = sorted(command.value for command in commands)
    assert sorted(everything(broker)) == expected
    broker.crash()
    assert sorted(everything(broker)) == expected
    broker.close()


def test_each_message_of_a_batch_finds_room_or_is_refused_alone():
    """driftq-49: what was answered as stored is there after a crash, what was refused is not."""
    broker, apart = full(two_topics(TINY)), full(two_topics(TINY))
    commands = [Produce("t", "", f"{n:05}" + "x" * KIB) for n in range(100)]
    commands += [Produce("other", "", "small")]
    outcomes = broker.call(broker.engine.produce_many, commands)
    assert _plain(outcomes) == _plain(one_by_one(apart, commands))
    stored = [outcome.value for outcome in outcomes if isinstance(outcome, Message)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
    assert stored
    assert refused
    assert len(stored) + len(refused) == len(commands)
    broker.disk.capacity_bytes = 2**40
    broker.crash()
    assert sorted(everything(broker)) == sorted(stored)
    broker.close()
    apart.close()


def full(broker: Broker) -> Broker:
    """Nothing is left on its disk, and it has noticed."""
    broker.disk.capacity_bytes = broker.disk.used_bytes
    broker.pass_ms(SPACE_CHECK_MS)
    return broker


def test_a_defect_in_the_midst_of_a_batch_leaves_no_message_out_of_the_log():
    """What is in the state is in the log, whatever came between."""
    broker = two_topics()
    with pytest.raises(UnicodeEncodeError):
        broker.engine.produce_many([*SMALL[:3], Produce("t", "\ud800", "no text")], _ignore)
    broker.produce("t", "later")
    image = take_image(broker.state)
    broker.crash()
    assert take_image(broker.state) == image
    assert sorted(everything(broker)) == ["later", "value 0", "value 1", "value 2"]
    broker.close()


def _ignore(outcome: object) -> None:
    """Nobody is answered."""


def test_a_batch_in_memory_mode_is_refused_where_the_memory_ends():
    broker = Broker(limits=Limits(memory_bytes=100 * KIB))
    broker.topic()
    outcomes = broker.call(
        broker.engine.produce_many, [Produce("t", "", "x" * KIB) for _ in range(200)]
    )
    stored = [isinstance(outcome, Message) for outcome in outcomes]
    assert 50 < sum(stored) < 100
    assert stored == sorted(stored, reverse=True)
    assert broker.engine.parts.window.used_bytes < 102 * KIB
    broker.close()
