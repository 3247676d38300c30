"""Clients of a durable stream, a named subscription of it, and transactions that publish to it.

An event is STORED once an answer said so or somebody saw it. What is acked in one round does not
come again in a later one; what is not acked comes until it is; retention removes nothing before
that. A transaction publishes an event, produces a message with the same text and acks an event: all
of it is there, or nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import dataclass
from typing import Any

from tests.soak.process import SoakBroker
from tests.soak.queue_load import Setting
from tests.soak.queue_model import ABSENT, REFUSED, STORED, UNKNOWN, QueueModel
from tests.soak.wire import Answer, Lines, Wire

BASE = "/v1/tenants/default/namespaces/default"
STREAM = "kept"
PATH = f"{BASE}/streams/{STREAM}"
NAME = "billing"
TOPIC = "pairs"
LEASES_MS = (150, 1500)
RETENTION_BYTES = 20_000
DRAIN_S = 120.0


@dataclass(slots=True, eq=False)
class Published:
    text: str
    state: str = UNKNOWN
    offset: int | None = None


@dataclass(slots=True, eq=False)
class Pair:
    """A transaction. `acks` is the offset of the event that it acks, or None."""

    event: Published
    acks: int | None


class StreamModel:
    def __init__(self, model: QueueModel) -> None:
        self.model = model
        self.events: dict[str, Published] = {}
        self.at: dict[int, Published] = {}
        self.ack_sent: set[int] = set()
        self.acked: dict[int, int] = {}
        """The round in which an ack of this offset was known to have happened."""
        self.pairs: list[Pair] = []
        """Those of this round."""
        self.pairs_next = 0

    def new(self, text: str) -> Published:
        event = self.events[text] = Published(text)
        return event

    def answered(self, events: list[Published], answer: Answer) -> None:
        """Takes the answer to a publish, or to a transaction."""
        if answer.status == 200:
            for event in events:
                event.state = STORED
        else:
            self.model.claim(answer.status in (429, 503), f"a publish was refused: {answer}")
            for event in events:
                event.state = REFUSED

    def found(self, offset: int, text: str) -> None:
        """Somebody saw an event: it was published, and is at no other place."""
        claim, event = self.model.claim, self.events.get(text)
        if event is None:
            claim(False, f"nobody published {text!r}, which is at {offset}")
            return
        claim(event.state not in (REFUSED, ABSENT), f"was {event.state}, and is there: {event}")
        there = self.at.setdefault(offset, event)
        claim(there is event, f"at {offset} was {there}, and is {event}")
        claim(event.offset in (None, offset), f"{event} is also at {offset}")
        event.offset, event.state = offset, STORED

    def delivered(self, line: dict[str, Any]) -> int:
        offset = int(line["offset"])
        self.found(offset, text_of(line))
        acked_in = self.acked.get(offset, self.model.round)
        is_again = acked_in < self.model.round
        self.model.claim(not is_again, f"event {offset} came again; acked in round {acked_in}")
        self.model.counts["events of a name"] += 1
        return offset

    def ack_answered(self, offset: int, status: int) -> None:
        self.model.claim(status in (204, 409, 503), f"ack of event {offset} is {status}")
        if status == 204:
            self.acked.setdefault(offset, self.model.round)


def text_of(line: dict[str, Any]) -> str:
    return base64.b64decode(line["payload"]).decode()


def _payload(event: Published) -> str:
    return base64.b64encode(event.text.encode()).decode()


class StreamLoad:
    """The clients of one round. `_waiting` has events that wait to be settled."""

    def __init__(self, setting: Setting, stream: StreamModel) -> None:
        self._setting = setting
        self._stream = stream
        self._model = setting.model
        self._rng = setting.new_rng()
        self._waiting: list[dict[str, Any]] = []

    def works(self) -> list[Any]:
        return [
            *(self._publish() for _ in range(2)),
            *(self._consume(f"o{self._model.round}-{n}") for n in range(2)),
            self._settle(),
            self._transact(),
        ]

    def _new(self) -> Published:
        size = int(600 * self._rng.random() ** 3)
        return self._stream.new(f"{self._model.round}-{next(self._setting.numbers)} {'x' * size}")

    async def _publish(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                events = [self._new() for _ in range(self._rng.randint(1, 5))]
                body = {"payloads": [_payload(event) for event in events]}
                answer = await wire.ask("POST", f"{PATH}/publish_batch", body)
                self._stream.answered(events, answer)
                if answer.status == 200:
                    for number, event in enumerate(events, answer.json["offset"]):
                        self._stream.found(number, event.text)
                self._model.counts["events stored"] += answer.status == 200 and len(events)
                await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def _consume(self, owner: str) -> None:
        query = {"name": NAME, "owner": owner, "heartbeat_ms": 200, "prefetch": 20}
        query["lease_ms"] = self._rng.choice(LEASES_MS)
        async with Wire(self._setting.port) as wire:
            lines = await wire.lines(f"{PATH}/subscribe", query)
            if not isinstance(lines, Lines):
                self._model.claim(lines.status == 503, f"{PATH}/subscribe: {lines}")
                return
            while found := await lines.read():
                for line in found:
                    if line["type"] == "event":
                        self._stream.delivered(line)
                        if self._rng.random() < 0.9:
                            self._waiting.append(line | {"owner": owner})

    async def _settle(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                if not self._waiting:
                    await asyncio.sleep(0.02)
                    continue
                line = self._waiting.pop(self._rng.randrange(len(self._waiting)))
                offset, choice = line["offset"], self._rng.random()
                if choice < 0.7:
                    self._stream.ack_sent.add(offset)
                    answer = await wire.ask("POST", f"{PATH}/ack", _naming(line))
                    self._stream.ack_answered(offset, answer.status)
                else:
                    how = "nack" if choice < 0.85 else "release"
                    more: dict[str, Any] = {"delay_ms": 20} if how == "nack" else {}
                    answer = await wire.ask("POST", f"{PATH}/{how}", _naming(line) | more)
                    is_right = answer.status in (204, 409, 503)
                    self._model.claim(is_right, f"{how} of event {offset}: {answer}")

    async def _transact(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                await self._transact_once(wire)
                await asyncio.sleep(self._rng.uniform(0, 0.1))

    async def _transact_once(self, wire: Wire) -> None:
        event = self._new()
        operations: list[dict[str, Any]] = [
            {"op": "publish", "stream": STREAM, "payloads": [_payload(event)]},
            {"op": "produce", "topic": TOPIC, "value": event.text},
        ]
        acks = None
        if self._waiting and self._rng.random() < 0.7:
            line = self._waiting.pop()
            acks = line["offset"]
            self._stream.ack_sent.add(acks)
            operations.append({"op": "event_ack", "stream": STREAM} | _naming(line))
        self._stream.pairs.append(Pair(event, acks))
        answer = await wire.ask("POST", "/v1/transactions", {"operations": operations})
        if answer.status == 409 and acks is not None:
            # Its lease had ended, or it was done already.
            event.state = REFUSED
            return
        self._stream.answered([event], answer)
        if answer.status == 200:
            self._model.counts["transactions"] += 1
            if acks is not None:
                self._stream.acked.setdefault(acks, self._model.round)


def _naming(line: dict[str, Any]) -> dict[str, Any]:
    members = {name: line[name] for name in ("owner", "offset", "delivery_id")}
    return {"name": NAME} | members


class StreamChecks:
    """What is there at rest."""

    def __init__(self, broker: SoakBroker, stream: StreamModel) -> None:
        self._broker = broker
        self._stream = stream
        self._model = stream.model

    def set_up(self) -> None:
        client = self._broker.client
        for path, body in (
            (f"{BASE}/streams", {"name": STREAM, "delivery": "at_least_once"}),
            ("/v1/topics", {"name": TOPIC}),
            (f"{PATH}/subscriptions/{NAME}/progress", {"next": 0}),
        ):
            reply = client.post(path, json=body)
            assert reply.status_code in (200, 201), reply.text

    def limit(self, is_limited: bool) -> None:
        """Retention acts while clients work."""
        body = {"retention_bytes": RETENTION_BYTES if is_limited else None}
        reply = self._broker.client.patch(PATH, json=body)
        assert reply.status_code == 200, reply.text

    def check(self, *, with_drain: bool) -> None:
        claim, stream = self._model.claim, self._stream
        ends = self._broker.client.get(f"{PATH}/offsets").json()
        first, end = ends["earliest"], ends["next"]
        rows = self._rows(f"{PATH}/records?format=ndjson&start={first}")
        offsets = [row["offset"] for row in rows]
        claim(offsets == list(range(first, end)), f"{first} to {end} has {offsets[:20]}…")
        for row in rows:
            stream.found(row["offset"], text_of(row))
        for offset in stream.at:
            is_kept = offset in stream.ack_sent or offset >= first
            claim(is_kept, f"event {offset} was removed and never acked; {first} is the first")
        seen = {event.text for event in stream.at.values()}
        for text, event in stream.events.items():
            claim(event.state != STORED or text in seen, f"acknowledged and lost: {event}")
            if text not in seen and event.state == UNKNOWN:
                event.state = ABSENT
        self._check_pairs(seen)
        if with_drain:
            self._drain()

    def _check_pairs(self, seen: set[str]) -> None:
        stream = self._stream
        path = f"/v1/topics/{TOPIC}/partitions/0/records?format=ndjson&start={stream.pairs_next}"
        rows = self._rows(path)
        there = {row["value"] for row in rows}
        sent = {pair.event.text for pair in stream.pairs}
        self._model.claim(there <= sent, f"in {TOPIC}, and nobody sent it: {there - sent}")
        for pair in stream.pairs:
            is_whole = (pair.event.text in there) == (pair.event.text in seen)
            self._model.claim(is_whole, f"half of a transaction: {pair}")
            if pair.event.text in there and pair.acks is not None:
                stream.acked.setdefault(pair.acks, self._model.round)
        stream.pairs.clear()
        stream.pairs_next = max((row["offset"] + 1 for row in rows), default=stream.pairs_next)

    def _drain(self) -> None:
        """Takes all that the name has not finished: whatever is stored was acked, then or now."""
        client, stream = self._broker.client, self._stream
        until = time.monotonic() + DRAIN_S
        query = f"name={NAME}&owner=drain&heartbeat_ms=100"
        with client.stream("GET", f"{PATH}/subscribe?{query}") as feed:
            for text in feed.iter_lines():
                line = json.loads(text) if text.strip() else {}
                if line.get("type") == "event":
                    offset = stream.delivered(line)
                    stream.ack_sent.add(offset)
                    reply = client.post(f"{PATH}/ack", json=_naming(line | {"owner": "drain"}))
                    stream.ack_answered(offset, reply.status_code)
                elif self._behind() == 0:
                    break
                self._model.claim(time.monotonic() < until, f"{self._behind()} events do not come")
                if self._model.violations:
                    return
        lost = [offset for offset in stream.at if offset not in stream.ack_sent]
        self._model.claim(not lost, f"finished and never acked: {lost[:20]}")
        self._model.counts["names drained"] += 1

    def _behind(self) -> int:
        named = self._broker.client.get(f"{PATH}/subscriptions").json()["named"]
        (found,) = [each for each in named if each["name"] == NAME]
        return int(found["messages_behind"])

    def _rows(self, path: str) -> list[dict[str, Any]]:
        reply = self._broker.client.get(path)
        assert reply.status_code == 200, reply.text
        return [json.loads(line) for line in reply.text.splitlines()]
