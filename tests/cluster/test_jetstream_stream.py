"""JetStream streams in trouble: consumers that end or lie, streams that are full, remade, slow."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.jetstream.stream import JetStreamStream
from penstock.cluster.shared import Bounds, Found, Missing, Refused, Stored, Unanswered
from penstock.engine.scheduler import LoopScheduler
from tests.cluster.jetstream_world import JetStreamBroker, JetStreamWorld
from tests.cluster.nats_servers import MAX_PAYLOAD
from tests.cluster.service_world import Heard, HeardKeys

KIB = 1024
MIB = 1024 * KIB


def store(world: JetStreamWorld, stream: JetStreamStream, *messages: bytes) -> None:
    last_seq = world.bounds(stream).last_seq
    for seq, data in enumerate(messages, start=last_seq + 1):
        assert world.call(stream.append, seq, data) == Stored()


def ask(world: JetStreamWorld, broker: JetStreamBroker, name: str, body: Any = None) -> Any:
    """An answer of JetStream's API, as the tools of NATS get it."""
    data = b"" if body is None else msgspec.json.encode(body)
    asked = broker.services.connection.ask(f"$JS.API.{name}".encode(), data, 10.0)
    answered: Any = world.run(asked)
    answer = msgspec.json.decode(answered.data)
    assert "error" not in answer, answer
    return answer


def consumers_of(world: JetStreamWorld, broker: JetStreamBroker) -> list[str]:
    found = ask(world, broker, f"CONSUMER.NAMES.{broker.stream.place.name}", {})["consumers"]
    return list(found or ())


# -- consumers -------------------------------------------------------------------------------------


def test_a_tail_whose_consumer_is_removed_goes_on_with_another(jetstream: JetStreamWorld) -> None:
    broker, other = jetstream.broker(), jetstream.broker()
    heard = Heard()
    broker.stream.follow(1, heard)
    store(jetstream, other.stream, b"1")
    jetstream.until(lambda: bool(heard.messages))
    (name,) = consumers_of(jetstream, other)
    ask(jetstream, other, f"CONSUMER.DELETE.{other.stream.place.name}.{name}")
    store(jetstream, other.stream, b"2", b"3")
    jetstream.until(lambda: len(heard.messages) == 3)
    assert heard.messages == [(1, b"1"), (2, b"2"), (3, b"3")]


def test_a_closed_tail_leaves_no_consumer_behind(jetstream: JetStreamWorld) -> None:
    broker = jetstream.broker()
    heard = Heard()
    tail = broker.stream.follow(1, heard)
    store(jetstream, broker.stream, b"1")
    jetstream.until(lambda: bool(heard.messages))
    assert len(consumers_of(jetstream, broker)) == 1
    tail.close()
    jetstream.until(lambda: consumers_of(jetstream, broker) == [])


LIES: dict[str, tuple[bytes, bytes, bytes]] = {
    # the reply subject, the headers, the data
    "a repeat": (b"$JS.ACK.s.c.1.1.1.0.0", b"", b"1"),
    "a repeat with a number of its own": (b"$JS.ACK.s.c.1.1.2.0.0", b"", b"1"),
    "a delivery out of turn": (b"$JS.ACK.s.c.1.2.3.0.0", b"", b"lie"),
    "a gap": (b"$JS.ACK.s.c.1.9.9.0.0", b"", b"lie"),
    "a delivery of the newer form": (b"$JS.ACK.d.a.s.c.1.9.9.0.0", b"", b"lie"),
    "a message of nobody": (b"", b"", b"lie"),
    "an unreadable delivery": (b"$JS.ACK.s.c", b"", b"lie"),
    "a heartbeat past a gap": (
        b"",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nNats-Last-Stream: 7\r\n\r\n",
        b"",
    ),
    "a heartbeat past a lost delivery": (
        b"",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 2\r\nNats-Last-Stream: 1\r\n\r\n",
        b"",
    ),
    "a heartbeat that left out messages": (
        b"",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\nNats-Last-Stream: 7\r\n\r\n",
        b"",
    ),
    "an unreadable heartbeat": (
        b"",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: x\r\nNats-Last-Stream: -\r\n\r\n",
        b"",
    ),
    "another subject": (b"$JS.ACK.s.c.1.2.2.0.0", b"", b"lie"),
}


HARMLESS = ("a repeat with a number of its own", "a message of nobody", "an unreadable delivery")
"""After every other lie there is another consumer."""


@pytest.mark.parametrize("lie", LIES)
def test_a_tail_tells_no_gap_repeat_or_lie_of_its_consumer(
    jetstream: JetStreamWorld, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the lie ends the consumer.
    monkeypatch.setattr("penstock.cluster.jetstream.consumer.SILENT_TICKS", 1_000_000)
    broker = jetstream.broker(behind_proxy=False)
    heard = Heard()
    tail: Any = broker.stream.follow(1, heard)
    store(jetstream, broker.stream, b"1")
    jetstream.until(lambda: bool(heard.messages))
    reply, headers, data = LIES[lie]
    consumer = tail._consumer._consumer
    sid, ours = consumer._subscription.sid, broker.stream.place.subject.encode()
    subject = b"elsewhere" if lie == "another subject" else ours
    sizes = b"%d %d" % (len(headers), len(headers) + len(data))
    session: Any = broker.services.connection._session
    # As if the server had sent it: no client can publish with these headers.
    session.data_received(
        b"HMSG %b %d %b %b\r\n%b%b\r\n" % (subject, sid, reply, sizes, headers, data)
    )
    if lie not in HARMLESS:
        jetstream.until(lambda: tail._consumer._consumer is not consumer)
    store(jetstream, broker.stream, b"2", b"3")
    jetstream.until(lambda: len(heard.messages) >= 3)
    jetstream.quiet()
    assert heard.messages == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert heard.purges == []


def test_a_key_that_no_broker_wrote_disturbs_no_watch(jetstream: JetStreamWorld) -> None:
    broker = jetstream.broker(behind_proxy=False)
    heard = HeardKeys()
    broker.keys.watch("", heard.changed)
    connection = broker.services.connection
    bucket = f"$KV.penstock-{jetstream.cluster}.".encode()
    for subject in (b"\xff\xfe", b"=ZZ", b"=C3"):
        jetstream.run(connection.ask(bucket + subject, b"stray", 10.0))
    jetstream.call(broker.keys.put, "k", b"1", 0)
    jetstream.until(lambda: ("k", b"1") in heard.changes)
    assert [value for _, value in heard.changes] == 3 * [b"stray"] + [b"1"]


@pytest.mark.parametrize("operation", ["DEL", "PURGE"])
def test_a_key_that_a_tool_removed_has_no_value_and_can_be_set_again(
    jetstream: JetStreamWorld, operation: str
) -> None:
    broker = jetstream.broker(behind_proxy=False)
    keys, heard = broker.keys, HeardKeys()
    keys.watch("", heard.changed)
    first = jetstream.call(keys.put, "k", b"1", 0)
    jetstream.until(lambda: len(heard.changes) == 1)
    removed = broker.services.connection.ask(
        f"$KV.penstock-{jetstream.cluster}.k".encode(),
        b"",
        10.0,
        headers=f"KV-Operation: {operation}\r\n".encode(),
    )
    jetstream.run(removed)
    assert jetstream.call(keys.get, "k") is None
    jetstream.until(lambda: len(heard.changes) == 2)
    again = jetstream.call(keys.put, "k", b"2", 0)
    assert again > first + 1
    jetstream.until(lambda: len(heard.changes) == 3)
    assert heard.values() == [b"1", None, b"2"]


# -- streams that are full, changed or gone --------------------------------------------------------


def test_a_full_stream_takes_nothing_and_goes_on_after_a_purge(jetstream: JetStreamWorld) -> None:
    broker = jetstream.broker(behind_proxy=False, max_bytes=200 * KIB)
    stream = broker.stream
    room = jetstream.bounds(stream).room_bytes
    assert room == 200 * KIB
    count = 0
    while (outcome := jetstream.call(stream.append, count + 1, 30 * KIB * b"x")) == Stored():
        count += 1
        left = jetstream.bounds(stream).room_bytes
        assert 30 * KIB <= room - left <= 31 * KIB
        room = left
    assert count == 6
    assert isinstance(outcome, Unanswered)
    assert "maximum bytes exceeded" in outcome.reason
    assert jetstream.call(stream.look_up, count + 1) == Missing(1, count)

    async def send() -> list[Fate]:
        fates: list[Fate] = []
        sender = FrameSender(stream, LoopScheduler(jetstream.loop))
        sender.send(count + 1, 30 * KIB * b"y", fates.append)
        await asyncio.sleep(0.5)
        assert fates == []
        stream.purge(3, lambda outcome: None)
        while not fates:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return fates

    assert jetstream.run(send()) == [Fate.STORED]
    bounds = jetstream.bounds(stream)
    assert (bounds.first_seq, bounds.last_seq) == (4, count + 1)


def test_a_stream_that_somebody_deleted_answers_nothing(
    jetstream: JetStreamWorld, caplog: pytest.LogCaptureFixture
) -> None:
    broker = jetstream.broker(behind_proxy=False)
    stream, heard = broker.stream, Heard()
    stream.follow(1, heard)
    store(jetstream, stream, b"1")
    ask(jetstream, broker, f"STREAM.DELETE.{stream.place.name}")
    with caplog.at_level(logging.WARNING):
        assert isinstance(jetstream.call(stream.append, 2, b"2"), Unanswered)
        assert isinstance(jetstream.call(stream.look_up, 1), Unanswered)
        assert isinstance(jetstream.call(stream.bounds), Unanswered)
        assert isinstance(jetstream.call(stream.purge, 1), Unanswered)
    assert caplog.text.count("stream not found") == 1


def test_a_stream_that_somebody_made_anew_is_left_alone(
    jetstream: JetStreamWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Its messages are not ours, although they have our numbers."""
    broker = jetstream.broker(behind_proxy=False)
    stream, heard = broker.stream, Heard()
    store(jetstream, stream, b"1", b"2")
    stream.follow(1, heard)
    jetstream.until(lambda: len(heard.messages) == 2)
    before = jetstream.bounds(stream).identity
    ask(jetstream, broker, f"STREAM.DELETE.{stream.place.name}")
    remade = jetstream.broker(behind_proxy=False).stream
    store(jetstream, remade, b"a", b"b", b"c", b"d")
    assert jetstream.call(remade.purge, 1) is None
    after = jetstream.call(stream.bounds)
    assert isinstance(after, Bounds)
    assert after.identity == jetstream.bounds(remade).identity != before
    with caplog.at_level(logging.WARNING):
        for seq in (1, 3, 9):
            assert isinstance(jetstream.call(stream.look_up, seq), Unanswered)
    assert "somebody deleted it and made another one under its name" in caplog.text
    assert isinstance(jetstream.call(stream.append, 5, b"x"), Unanswered)
    assert isinstance(jetstream.call(stream.purge, 2), Unanswered)
    assert jetstream.call(remade.look_up, 2) == Found(b"b")
    late, later = Heard(), Heard()
    stream.follow(1, late)
    jetstream.sleep(1.0)
    assert jetstream.call(remade.purge, 4) is None
    stream.follow(1, later)
    jetstream.sleep(3.0)  # The tail's consumer was silent for 2.5 s, and there is another one.
    assert heard.messages == [(1, b"1"), (2, b"2")]
    for each in (late, later):
        assert (each.messages, each.purges) == ([], [])
    assert heard.purges == []


# -- frames ----------------------------------------------------------------------------------------


def send_frame(world: JetStreamWorld, stream: JetStreamStream, seq: int, data: bytes) -> list[Fate]:
    fates: list[Fate] = []

    async def send() -> None:
        FrameSender(stream, LoopScheduler(world.loop)).send(seq, data, fates.append)

    world.run(send())
    return fates


def test_a_frame_whose_answer_is_lost_counts_as_stored_and_is_there_once(
    jetstream: JetStreamWorld,
) -> None:
    broker, other = jetstream.broker(), jetstream.broker(behind_proxy=False)
    assert broker.proxy is not None
    broker.proxy.swallows_answers = True
    fates = send_frame(jetstream, broker.stream, 1, b"frame")
    jetstream.until(lambda: jetstream.bounds(other.stream).last_seq == 1)
    assert fates == []
    jetstream.back(broker)
    jetstream.until(lambda: bool(fates))
    assert fates == [Fate.STORED]
    assert jetstream.bounds(other.stream).last_seq == 1


def test_a_frame_whose_place_another_broker_took_is_told_so(jetstream: JetStreamWorld) -> None:
    broker, other = jetstream.broker(behind_proxy=False), jetstream.broker(behind_proxy=False)
    store(jetstream, other.stream, b"theirs", b"more")
    for seq in (1, 2):
        fates = send_frame(jetstream, broker.stream, seq, b"ours")
        jetstream.until(lambda fates=fates: bool(fates))  # type: ignore[misc]
        assert fates == [Fate.TAKEN]
    assert jetstream.call(other.stream.look_up, 1) == Found(b"theirs")


# -- sizes and slow networks -----------------------------------------------------------------------


def test_a_message_as_large_as_the_servers_take_is_stored_found_and_told(
    jetstream: JetStreamWorld,
) -> None:
    largest = MAX_PAYLOAD - 256
    broker = jetstream.broker(behind_proxy=False, max_message_bytes=largest)
    stream, heard = broker.stream, Heard()
    stream.follow(1, heard)
    data = largest * b"x"
    fates: list[Fate] = []

    async def send() -> None:
        FrameSender(stream, LoopScheduler(jetstream.loop)).send(1, data, fates.append)

    jetstream.run(send())
    jetstream.until(lambda: bool(fates))
    assert fates == [Fate.STORED]
    jetstream.until(lambda: bool(heard.messages))
    assert heard.messages == [(1, data)]
    found = jetstream.call(stream.look_up, 1)
    while isinstance(found, Unanswered):
        found = jetstream.call(stream.look_up, 1)
    assert found == Found(data)


def test_a_message_beyond_what_the_servers_take_is_not_sent(jetstream: JetStreamWorld) -> None:
    broker = jetstream.broker(behind_proxy=False)
    outcome = jetstream.call(broker.stream.append, 1, MAX_PAYLOAD * b"x")
    assert isinstance(outcome, Unanswered)
    assert f"more than its max_payload of {MAX_PAYLOAD}" in outcome.reason
    assert jetstream.call(broker.stream.append, 1, b"x") == Stored()


def test_a_large_message_passes_a_slow_network(jetstream: JetStreamWorld) -> None:
    """It takes longer than the answer to a small one may take."""
    largest = 1536 * KIB
    broker = jetstream.broker(max_message_bytes=largest, request_timeout_s=0.25)
    assert broker.proxy is not None
    broker.proxy.bytes_per_s = 4 * MIB
    stream, heard = broker.stream, Heard()
    data = largest * b"x"
    assert jetstream.call(stream.append, 1, data) == Stored()
    outcomes = [jetstream.call(stream.look_up, 1) for _ in range(4)]
    assert Found(data) in outcomes
    stream.follow(1, heard)
    jetstream.until(lambda: bool(heard.messages))
    assert jetstream.call(stream.append, 1, b"x") == Refused(1)


# -- connections -----------------------------------------------------------------------------------


def test_a_tail_and_a_watch_tell_everything_once_over_many_lost_connections(
    jetstream: JetStreamWorld,
) -> None:
    broker, other = jetstream.broker(), jetstream.broker(behind_proxy=False)
    assert broker.proxy is not None
    heard, keys = Heard(), HeardKeys()
    broker.stream.follow(1, heard)
    broker.keys.watch("k", keys.changed)
    revision = 0
    for seq in range(1, 61):
        store(jetstream, other.stream, b"%d" % seq)
        revision = jetstream.call(other.keys.put, "k", b"%d" % seq, revision)
        if seq % 7 == 0:
            broker.proxy.cut()
    jetstream.until(lambda: len(heard.messages) == 60 and keys.values()[-1:] == [b"60"])
    assert heard.messages == [(seq, b"%d" % seq) for seq in range(1, 61)]
    told = [int(value or b"0") for value in keys.values()]
    assert told == sorted(set(told))
