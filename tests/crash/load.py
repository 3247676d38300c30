"""Producers and consumers that hurry until the broker is gone, and tell the ledger all of it.

Everything random comes from the seed; when things happen does not. Every task ends by itself when
its connection breaks, and what it was waiting for then stays unknown.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from typing import Any

from tests.crash.ledger import PARTITIONS, TOPIC, Item, Ledger, Sent
from tests.crash.wire import Connection, Lost, Reply

GROUPS = ("billing", "search")
LONG_LEASE_MS = 600_000
"""Longer than any test: such a delivery is held until it is settled or the broker is killed."""
SHORT_LEASE_MS = 60
BATCH_ITEMS = 40
ROUND_ITEMS = 120
"""What each writer sends at most in a round: the data must stay small enough to be audited."""

ACK, NACK, HOLD = "ack", "nack", "hold"
_CHOICES = (ACK, NACK, HOLD)


def fnv1a_32(text: str) -> int:
    digest = 0x811C9DC5
    for byte in text.encode():
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    return digest


async def until_lost(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Lost:
        return


class Producer:
    """One connection that sends messages, one by one or in batches."""

    def __init__(self, ledger: Ledger, port: int, name: str, rng: random.Random) -> None:
        self._ledger = ledger
        self._port = port
        self._name = name
        self._rng = rng
        self._number = 0

    async def run(self, *, in_batches: bool) -> None:
        async with Connection(self._port) as connection:
            while self._number < ROUND_ITEMS:
                if in_batches:
                    await self._send_batch(connection)
                else:
                    await self._send_one(connection)

    async def _send_one(self, connection: Connection) -> None:
        message = self._next()
        reply = await self._post(connection, "/v1/produce", [message], message.body())
        if reply.status == 200:
            self._ledger.answered(message)
        else:
            self._ledger.claim(False, f"a produce was refused: {reply}")

    async def _send_batch(self, connection: Connection) -> None:
        messages = [self._next() for _ in range(self._rng.randint(1, BATCH_ITEMS))]
        bodies = [message.body() for message in messages]
        reply = await self._post(connection, "/v1/produce/batch", messages, bodies)
        self._ledger.claim(reply.status == 200, f"a batch was refused: {reply}")
        results = json.loads(reply.body).get("results", [])
        self._ledger.claim(len(results) == len(messages), f"{len(messages)} sent, {reply}")
        for message, result in zip(messages, results, strict=False):
            self._ledger.stored(message, result)

    async def _post(
        self, connection: Connection, path: str, messages: list[Sent], body: object
    ) -> Reply:
        try:
            return await connection.post(path, body)
        except Lost:
            unknown = (m for m in messages if m.is_idempotent and not m.is_answered)
            self._ledger.unanswered.extend(dict.fromkeys(unknown))
            raise

    def _next(self) -> Sent:
        """A new message, or one to be repeated, whether its first answer was seen or not."""
        self._number += 1
        if self._ledger.unanswered and self._rng.random() < 0.5:
            return self._ledger.unanswered.pop()
        if self._rng.random() < 0.05:
            drawn = self._ledger.sent.get(self._rng.choice(list(self._ledger.sent) or [""]))
            if drawn is not None and drawn.is_idempotent and drawn.is_answered:
                return drawn
        return self._new()

    def _new(self) -> Sent:
        rng = self._rng
        name = f"{self._name}-{self._number}"
        padding = rng.choice("aä€ \\") * int(1200 * rng.random() ** 2)
        key = rng.choice(("", f"user:{rng.randint(1, 50)}"))
        envelope: dict[str, Any] = {}
        partition = fnv1a_32(key) % PARTITIONS if key else 0
        if rng.random() < 0.4:
            envelope |= {"run_id": f"run-{name}", "tenant_id": rng.choice("ab")}
        if rng.random() < 0.3:
            envelope["idempotency_key"] = f"key-{name}"
        if rng.random() < 0.2:
            partition = envelope["partition_override"] = rng.randrange(PARTITIONS)
        if rng.random() < 0.3:
            policy = {"max_attempts": rng.randint(1, 6), "backoff_ms": rng.randint(1, 40)}
            envelope["retry_policy"] = policy | {"max_backoff_ms": rng.randint(40, 100)}
        value = f"{name}:{padding}"
        message = Sent(value, key, partition, envelope, self._name, self._number)
        self._ledger.sent[value] = message
        return message


class Consumer:
    """One stream and the acks and nacks for it, on a connection of their own.

    `drains`: acks all it is given, with a lease that does not end.
    """

    def __init__(
        self,
        ledger: Ledger,
        port: int,
        group: str,
        owner: str,
        rng: random.Random,
        *,
        drains: bool = False,
    ) -> None:
        self._ledger = ledger
        self._port = port
        self._group = group
        self._owner = owner
        self._rng = rng
        self._drains = drains
        self._is_leased = drains or rng.random() < 0.6
        self._to_settle: list[tuple[str, Item]] = []
        self._changed = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(until_lost(self._read()))
            tasks.create_task(until_lost(self._settle()))

    async def _read(self) -> None:
        parameters = {
            "topic": TOPIC,
            "group": self._group,
            "owner": self._owner,
            "lease_ms": LONG_LEASE_MS if self._is_leased else SHORT_LEASE_MS,
            "prefetch": self._rng.randint(10, 100),
        }
        try:
            async with Connection(self._port) as connection:
                stream = await connection.open_stream(parameters)
                while items := await stream.read():
                    for item in items:
                        self._take(item)
                    self._changed.set()
        finally:
            self._has_ended = True
            self._changed.set()

    def _take(self, item: Item) -> None:
        message = self._ledger.delivered(self._group, item)
        weights = (30, 60, 10) if message and message.max_attempts else (75, 10, 15)
        choice = ACK if self._drains else self._rng.choices(_CHOICES, weights)[0]
        if choice != HOLD:
            self._to_settle.append((choice, item))

    async def _settle(self) -> None:
        """In any order, some in batches. What is held is never settled: the kill releases it."""
        async with Connection(self._port) as connection:
            while not self._has_ended:
                await self._changed.wait()
                self._changed.clear()
                while self._to_settle:
                    await self._settle_some(connection)

    async def _settle_some(self, connection: Connection) -> None:
        self._rng.shuffle(self._to_settle)
        choice, item = self._to_settle.pop()
        if choice == NACK:
            await self._nack(connection, item)
        elif self._rng.random() < 0.5 and not self._drains:
            await self._ack(connection, [item], in_batch=False)
        else:
            acks, rest = [item], []
            for pair in self._to_settle:
                if pair[0] == ACK and len(acks) < BATCH_ITEMS:
                    acks.append(pair[1])
                else:
                    rest.append(pair)
            self._to_settle = rest
            await self._ack(connection, acks, in_batch=True)

    async def _ack(self, connection: Connection, items: list[Item], *, in_batch: bool) -> None:
        for item in items:
            self._ledger.acking(self._group, item)
        bodies = [settlement(self._group, self._owner, item) for item in items]
        try:
            if in_batch:
                statuses = await ack_batch(connection, bodies)
            else:
                statuses = [(await connection.post("/v1/ack", bodies[0])).status]
        except Lost:
            self._ledger.unknown_acks += [(self._group, self._owner, item) for item in items]
            raise
        for item, status in zip(items, statuses, strict=True):
            self._ledger.ack_answered(self._group, item, status, is_leased=self._is_leased)

    async def _nack(self, connection: Connection, item: Item) -> None:
        reason = f"{self._owner} refused {item['attempts']}"
        body = settlement(self._group, self._owner, item) | {"reason": reason, "delay_ms": 0}
        status = (await connection.post("/v1/nack", body)).status
        self._ledger.nack_answered(self._group, item, reason, status, is_leased=self._is_leased)


async def repeat_acks(ledger: Ledger, port: int) -> None:
    """Those that a kill left unanswered; refused where somebody else has the message by now."""
    async with Connection(port) as connection:
        while ledger.unknown_acks:
            group, owner, item = ledger.unknown_acks[-1]
            reply = await connection.post("/v1/ack", settlement(group, owner, item))
            ledger.unknown_acks.remove((group, owner, item))
            ledger.ack_answered(group, item, reply.status, is_leased=False)


async def read_all(port: int, topic: str, group: str, count: int) -> list[Item]:
    """So many messages of a topic, in the order in which a group without a past is given them."""
    items: list[Item] = []
    where = {"topic": topic, "group": group, "owner": group}
    async with Connection(port) as connection, Connection(port) as settling:
        stream = await connection.open_stream(where | {"lease_ms": LONG_LEASE_MS})
        while len(items) < count:
            came = await stream.read()
            assert came, f"the stream ended after {len(items)} of {count} items"
            items += came
            bodies = [settlement(group, group, item, topic) for item in came]
            assert set(await ack_batch(settling, bodies)) == {204}
    return items


async def ack_batch(connection: Connection, bodies: list[dict[str, Any]]) -> list[int]:
    """The status of each."""
    reply = await connection.post("/v1/ack/batch", bodies)
    assert reply.status == 200, reply
    results = json.loads(reply.body)["results"]
    return [204 if result.get("status") == "acked" else result["code"] for result in results]


def settlement(group: str, owner: str, item: Item, topic: str = TOPIC) -> dict[str, Any]:
    """Names this very delivery: a late ack of an earlier one must be refused."""
    named = {name: item[name] for name in ("partition", "offset", "delivery_id")}
    return {"topic": topic, "group": group, "owner": owner} | named
