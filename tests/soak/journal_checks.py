"""The journal beside what clients saw: nothing that happened is missing, nothing is told twice.

It is read on from where the last look ended, so each row is looked at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.soak.process import SoakBroker
from tests.soak.queue_model import QueueModel, Topic
from tests.soak.read_paths import fresh_positions

Told = dict[str, set[tuple[Any, ...]]]


class JournalChecks:
    def __init__(self, broker: SoakBroker, model: QueueModel) -> None:
        self._broker = broker
        self._model = model
        self._next: int | None = None
        self._last = -1
        self._told: dict[str, Told] = {}

    def check(self) -> None:
        for row in self._new_rows():
            self._take(row)
        for name in set(self._told) - set(self._model.topics):
            del self._told[name]
        for topic in self._model.topics.values():
            self._compare(topic, self._told.get(topic.name, {}))
        self._model.counts["journal looks"] += 1

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        client = self._broker.client
        found = fresh_positions(client)
        start = found["earliest"] if self._next is None else self._next
        self._model.claim(found["next"] >= start, f"the journal went back: {found}, was {start}")
        query = {"from": start, "to": found["next"], "format": "ndjson"}
        reply = client.get("/v1/journal", params=query)
        assert reply.status_code == 200, reply.text
        self._next = found["next"]
        for line in reply.text.splitlines():
            yield json.loads(line)

    def _take(self, row: dict[str, Any]) -> None:
        position, kind = row["position"], row["kind"]
        self._model.claim(position > self._last, f"{row} after position {self._last}")
        self._last = position
        self._model.counts["journal rows"] += 1
        if row["topic"] not in self._model.topics:
            return
        told = self._told.setdefault(row["topic"], {}).setdefault(kind, set())
        place: tuple[Any, ...] = (row.get("group"), row["offset"])
        if kind in ("delivered", "returned", "nacked", "timed_out"):
            place = (*place, row["attempt"])
        # A delivery that never left counts no attempt, so the next one has its number again.
        is_new = place not in told or kind in ("delivered", "returned")
        self._model.claim(is_new, f"the journal tells it twice: {row}")
        told.add(place)

    def _compare(self, topic: Topic, told: Told) -> None:
        claim = self._model.claim
        produced = {offset for _, offset in told.get("produced", set())}
        known = set(topic.values)
        claim(known <= produced, f"{topic.name}: not in the journal: {_few(known - produced)}")
        if not topic.has_retention:
            claim(produced <= known, f"{topic.name}: only there: {_few(produced - known)}")
        for name, group in topic.groups.items():
            given = {p for p in told.get("delivered", set()) if p[0] == name}
            seen = {(name, o, n) for o, story in group.stories.items() for n in story.attempts}
            claim(seen <= given, f"{topic.name}: deliveries not told: {_few(seen - given)}")
            acked = {p for p in told.get("acked", set()) if p[0] == name}
            ended = acked | {
                p for k in ("skipped", "dead_lettered") for p in told.get(k, set()) if p[0] == name
            }
            done = {(name, o) for o, s in group.stories.items() if s.acked_in is not None}
            claim(done <= ended, f"{topic.name}: acks not told: {_few(done - ended)}")
            asked = {(name, o) for o, story in group.stories.items() if story.ack_sent}
            claim(acked <= asked, f"{topic.name}: acks of nobody: {_few(acked - asked)}")


def _few(found: set[Any]) -> list[Any]:
    return sorted(found)[:10]
