"""Clients of topics that do everything at random until the broker is gone, and tell the model.

All choices come from the seed; when things happen does not. A client ends by itself when its
connection breaks; what it was waiting for then stays unknown.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from tests.crash.load import fnv1a_32
from tests.soak.queue_model import STORED, Item, QueueModel, Sent, Topic
from tests.soak.wire import Answer, Lines, Lost, Wire

LONG_LEASE_MS = 3_600_000
"""Longer than any round and any jump of the clock: such a delivery is held until it is settled."""
SHORT_LEASE_MS = 80
BATCH_ITEMS = 20

Work = Coroutine[Any, Any, None]
ACK, NACK, EXTEND, RELEASE, HOLD = "ack", "nack", "extend", "release", "hold"


class Features(NamedTuple):
    """What the broker under the soak can do; an older one is soaked without it."""

    can_release: bool
    can_delay_nacks: bool
    can_nack_as_dead: bool
    topics_limit_attempts: bool


class Setting:
    """What all clients of a round share. `is_order_certain`: no stream was closed in this life of
    the broker, so nothing came back unwritten that may be given later."""

    def __init__(
        self, model: QueueModel, port: int, rng: random.Random, features: Features
    ) -> None:
        self.model = model
        self.features = features
        self.port = port
        self.rng = rng
        self.is_order_certain = True
        self.is_over = False
        self.numbers = iter(range(1, 10**9))

    def new_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def goes_on(self) -> bool:
        return not self.is_over and not self.model.violations


async def until_lost(work: Work) -> None:
    try:
        await work
    except Lost:
        return


class Producer:
    """Sends to one topic: single messages, batches, and Arrow rows in staged writes."""

    def __init__(self, setting: Setting, topic: Topic, name: str) -> None:
        self._setting = setting
        self._model = setting.model
        self._topic = topic
        self._name = name
        self._rng = setting.new_rng()

    async def run(self) -> None:
        ways: list[Callable[[Wire], Work]] = [self._send_one, self._send_batch, self._write_rows]
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                await self._rng.choices(ways, (5, 5, 1))[0](wire)
                await asyncio.sleep(self._rng.choice((0, 0, 0.01, 0.05)))

    async def _send_one(self, wire: Wire) -> None:
        message = self._next()
        answer = await self._ask(wire, "POST", "/v1/produce", self._body(message), [message])
        if answer.status == 200:
            self._model.stored(self._topic, message)
        else:
            self._refused(answer, [message])

    async def _send_batch(self, wire: Wire) -> None:
        messages = [self._next() for _ in range(self._rng.randint(1, BATCH_ITEMS))]
        bodies = [self._body(message) for message in messages]
        answer = await self._ask(wire, "POST", "/v1/produce/batch", bodies, messages)
        if answer.status != 200:
            self._refused(answer, messages)
            return
        for message, result in zip(messages, answer.json["results"], strict=True):
            if "error" in result:
                self._refused(Answer(result["code"], b""), [message])
            else:
                self._model.stored(self._topic, message, result)

    async def _write_rows(self, wire: Wire) -> None:
        """Two pieces of rows and their commit; sent again as it is while no answer says why."""
        messages = [self._new(for_rows=True) for _ in range(self._rng.randint(2, BATCH_ITEMS))]
        path = f"/v1/writes/{self._name}-{next(self._setting.numbers)}/1"
        half = len(messages) // 2
        for piece, part in enumerate((messages[:half], messages[half:])):
            where = f"{path}/0/{piece}?topic={quote(self._topic.name)}"
            answer = await self._ask(wire, "PUT", where, _arrow(part), messages)
            if answer.status != 200:
                self._refused(answer, messages)
                return
        parts = {"parts": [{"part": 0, "attempt": "", "pieces": 2, "rows": len(messages)}]}
        for _ in range(20):
            answer = await self._ask(wire, "POST", f"{path}/commit", parts, messages)
            if answer.status != 202:
                break
        if answer.status == 200:
            self._model.counts["rows written"] += len(messages)
            for message in messages:
                self._model.stored(self._topic, message)
        elif answer.status == 503:
            # The commit may be durable and the storing of its rows unfinished: the next start
            # finishes it, so they are there or not.
            self._model.counts["refused"] += len(messages)
        elif answer.status != 202:
            self._refused(answer, messages)

    async def _ask(
        self, wire: Wire, method: str, path: str, body: Any, messages: list[Sent]
    ) -> Answer:
        try:
            return await wire.ask(method, path, body)
        except Lost:
            again = (m for m in messages if m.is_idempotent and m.state != STORED)
            self._topic.unanswered.extend(dict.fromkeys(again))
            raise

    def _refused(self, answer: Answer, messages: list[Sent]) -> None:
        is_excused = answer.status in (429, 503)
        self._model.claim(is_excused, f"a produce to {self._topic.name} was refused: {answer}")
        for message in messages:
            self._model.refused(message)

    def _body(self, message: Sent) -> dict[str, Any]:
        body = {"topic": self._topic.name, "key": message.key, "value": message.value}
        return body | {"envelope": message.envelope} if message.envelope else body

    def _next(self) -> Sent:
        """A new message, or one to be sent again, whether its first answer was seen or not."""
        if self._topic.unanswered and self._rng.random() < 0.5:
            return self._topic.unanswered.pop()
        if self._rng.random() < 0.03 and self._topic.sent:
            drawn = self._topic.sent[self._rng.choice(list(self._topic.sent))]
            if drawn.is_idempotent and drawn.state == STORED:
                return drawn
        return self._new()

    def _new(self, *, for_rows: bool = False) -> Sent:
        rng, partitions = self._rng, self._topic.partitions
        name = f"{self._name}-{next(self._setting.numbers)}"
        padding = rng.choice("aä€ \\") * int(1500 * rng.random() ** 3)
        key = rng.choice(("", f"user:{rng.randint(1, 50)}"))
        envelope: dict[str, Any] = {}
        partition = fnv1a_32(key) % partitions if key else 0
        if rng.random() < 0.3:
            envelope |= {"run_id": f"run-{name}", "tenant_id": rng.choice("ab")}
        if rng.random() < 0.2 and not for_rows:
            envelope["idempotency_key"] = f"key-{name}"
        if rng.random() < 0.2:
            partition = envelope["partition_override"] = rng.randrange(partitions)
        if rng.random() < 0.3:
            policy = {"max_attempts": rng.randint(1, 4), "backoff_ms": rng.randint(1, 40)}
            envelope["retry_policy"] = policy | {"max_backoff_ms": rng.randint(40, 100)}
        limit = envelope.get("retry_policy", {}).get("max_attempts") or self._topic.max_attempts
        value = f"{name}:{padding}"
        message = Sent(value, key, partition, envelope, limit, may_come_later=for_rows)
        self._topic.sent[message.value] = message
        return message


def _arrow(messages: list[Sent]) -> bytes:
    columns: dict[str, list[Any]] = {
        "key": [message.key for message in messages],
        "value": [message.value for message in messages],
    }
    for name in ("run_id", "tenant_id", "partition_override"):
        columns[name] = [message.envelope.get(name) for message in messages]
    for name in ("max_attempts", "backoff_ms", "max_backoff_ms"):
        columns[f"retry_{name}"] = [
            message.envelope.get("retry_policy", {}).get(name) for message in messages
        ]
    types = [pa.int64() if n.startswith(("retry", "part")) else pa.string() for n in columns]
    batch = pa.record_batch(
        [pa.array(values, kind) for values, kind in zip(columns.values(), types, strict=True)],
        names=list(columns),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


class Consumer:
    """One stream of a group, and what settles its deliveries on a connection of its own."""

    def __init__(self, setting: Setting, topic: Topic, group: str, owner: str) -> None:
        self._setting = setting
        self._model = setting.model
        self._topic = topic
        self._group_name = group
        self._group = topic.groups[group]
        self._owner = owner
        self._rng = setting.new_rng()
        self._is_leased = self._rng.random() < 0.6
        self._to_settle: list[tuple[str, Item]] = []
        self._changed = asyncio.Event()
        self._has_ended = False
        self._last_first: dict[int, int] = {}

    @property
    def _where(self) -> str:
        return f"{self._topic.name}/{self._group_name}"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(until_lost(self._read()))
            tasks.create_task(until_lost(self._settle()))

    async def _read(self) -> None:
        parameters = {
            "topic": self._topic.name,
            "group": self._group_name,
            "owner": self._owner,
            "lease_ms": LONG_LEASE_MS if self._is_leased else SHORT_LEASE_MS,
            "prefetch": self._rng.randint(5, 60),
            "heartbeat_ms": 200,
        }
        try:
            async with Wire(self._setting.port) as wire:
                lines = await wire.lines("/v1/consume", parameters)
                if not isinstance(lines, Lines):
                    self._model.claim(lines.status == 503, f"{self._where}: no stream: {lines}")
                    return
                while items := await lines.read():
                    for item in items:
                        self._take(item)
                    self._changed.set()
        finally:
            self._has_ended = True
            self._changed.set()

    def _take(self, item: Item) -> None:
        message = self._model.delivered(self._topic, self._group_name, item)
        partition, offset = item["partition"], item["offset"]
        if item["attempts"] == 1:
            last = self._last_first.get(partition, -1)
            text = f"{self._where}: first delivery of {offset} after that of {last}"
            is_excused = self._group.story(offset).is_released or not self._setting.is_order_certain
            self._model.claim(offset > last or is_excused, text)
            self._last_first[partition] = max(last, offset)
        mortal = message is not None and message.max_attempts
        releases = 5 if self._setting.features.can_release else 0
        weights = (30, 50, 5, releases, 10) if mortal else (70, 10, 5, releases, 10)
        choice = self._rng.choices((ACK, NACK, EXTEND, RELEASE, HOLD), weights)[0]
        if choice != HOLD:
            self._to_settle.append((choice, item))

    async def _settle(self) -> None:
        async with Wire(self._setting.port) as wire:
            while not self._has_ended:
                await self._changed.wait()
                self._changed.clear()
                while self._to_settle and not self._setting.is_over:
                    await self._settle_some(wire)

    async def _settle_some(self, wire: Wire) -> None:
        self._rng.shuffle(self._to_settle)
        choice, item = self._to_settle.pop()
        if choice == NACK:
            await self._nack(wire, item)
        elif choice == EXTEND:
            await self._extend(wire, item)
        elif choice == RELEASE:
            await self._release(wire, item)
        elif self._rng.random() < 0.5:
            await self._ack_one(wire, item)
        else:
            acks = [item, *(each for what, each in self._to_settle if what == ACK)][:BATCH_ITEMS]
            self._to_settle = [pair for pair in self._to_settle if pair[1] not in acks]
            await self._ack_batch(wire, acks)

    async def _ack_one(self, wire: Wire, item: Item) -> None:
        self._acking(item)
        answer = await wire.ask("POST", "/v1/ack", self._naming(item))
        self._ack_answered(item, answer.status)

    async def _ack_batch(self, wire: Wire, items: list[Item]) -> None:
        for item in items:
            self._acking(item)
        answer = await wire.ask("POST", "/v1/ack/batch", [self._naming(item) for item in items])
        if answer.status != 200:
            self._model.claim(answer.status == 503, f"{self._where}: ack of a batch: {answer}")
            return
        for item, result in zip(items, answer.json["results"], strict=True):
            self._ack_answered(item, 204 if "error" not in result else result["code"])

    async def _nack(self, wire: Wire, item: Item) -> None:
        reason = f"{self._owner} refused {item['attempts']}"
        features, story = self._setting.features, self._group.story(item["offset"])
        body = self._naming(item) | {"reason": reason}
        is_dead = features.can_nack_as_dead and self._rng.random() < 0.1
        if is_dead:
            body["dead"] = True
            story.may_be_given_up = True
        elif features.can_delay_nacks and self._rng.random() < 0.3:
            body["delay_ms"] = self._rng.choice((0, 20, 200))
        answer = await wire.ask("POST", "/v1/nack", body)
        self._model.nack_answered(self._where, story, item, reason, answer.status, self._is_leased)
        if is_dead and answer.status == 204:
            story.is_given_up = True
            self._model.counts["nacked as dead"] += 1

    async def _release(self, wire: Wire, item: Item) -> None:
        """Whether it is answered or not, the same attempt may come again."""
        self._group.story(item["offset"]).is_released = True
        answer = await wire.ask("POST", "/v1/release", self._naming(item))
        expected = (204, 503) if self._is_leased else (204, 409, 503)
        self._model.claim(answer.status in expected, f"{self._where}: release: {answer}")
        self._model.counts["released"] += answer.status == 204

    async def _extend(self, wire: Wire, item: Item) -> None:
        body = self._naming(item) | {"lease_ms": LONG_LEASE_MS}
        answer = await wire.ask("POST", "/v1/extend", body)
        expected = (204, 503) if self._is_leased else (204, 409, 503)
        self._model.claim(answer.status in expected, f"{self._where}: extend: {answer}")
        self._model.counts["extended"] += answer.status == 204

    def _acking(self, item: Item) -> None:
        story = self._group.story(item["offset"])
        story.ack_sent = max(story.ack_sent, item["attempts"])

    def _ack_answered(self, item: Item, status: int) -> None:
        story = self._group.story(item["offset"])
        self._model.ack_answered(self._where, story, item, status, self._is_leased)

    def _naming(self, item: Item) -> dict[str, Any]:
        named = {name: item[name] for name in ("partition", "offset", "delivery_id")}
        return {
            "topic": self._topic.name,
            "group": self._group_name,
            "owner": self._owner,
        } | named
