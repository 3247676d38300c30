"""The golden sample: agent runs played on a real broker, and its whole journal afterwards.

What happens is the same each time, one call after another; when it happens is real time, so what is
computed from it is compared with a plain computation over `Golden.rows`, never with constants.

| run | what becomes of it |
|---|---|
| run-01 | plan, then fetch and rank, then report: all well |
| run-02 | fetch fails once, waits for its back-off, succeeds |
| run-03 | the lease of crunch ends, the second attempt succeeds |
| run-04, run-05 | charge is dead-lettered; the reasons differ in numbers |
| run-06 | notify is dead-lettered at once, for another reason |
| run-07 | its only step has a parent that nobody has seen |
| run-08 | two steps are each other's parent |
| run-09 | fetch is being worked at, rank waits in a topic that nobody reads |
| run-10 | the last attempt of crunch ends with its lease: dead-lettered by a timeout |
| run-11 | three messages are one step, with two parents; one is dead-lettered, and read |
| run-12 | failed once, and waits an hour for its retry |
| run-13 | two messages whose effects were committed: skipped, one of them after a failure |
| run-14 | messages without a step, and one that only has a tenant |
| run-15 | a digest that one group finishes and another, sleepers, takes and never acks |

Beside them messages without an envelope, and a topic without a group (audit). Nobody changes the
broker: who needs that plays on one of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.client import Client, Delivery, EffectRef, Envelope, NewMessage, RetryPolicy
from penstock.client.sync import Deliveries
from penstock.model.errors import PenstockError
from tests.broker_process import BrokerProcess, eventually

HOUR_MS = 3_600_000
SHORT_MS = 60
ROUTER = "tests.spark.pipelines.golden_labels:route"
TOPICS = {"plans": 1, "work": 2, "reports": 1, "crunch": 1, "payments": 2, "audit": 1, "digests": 1}
TIMES = ("timestamp", "retry_at", "produced_at", "delivered_at")
COLUMNS = (
    "position", "timestamp", "kind", "topic", "partition", "offset", "group", "owner", "attempt",
    "reason", "run_id", "step_id", "parent_step_id", "tenant_id", "routing_label", "retry_at",
    "produced_at", "delivered_at", "tenant", "namespace", "resource_kind",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Golden:
    """`rows`: the journal in its order, every column there, None for what is null."""

    broker: BrokerProcess
    rows: list[Row]

    @property
    def second_part(self) -> datetime:
        """Messages of before are touched no more from then on."""
        moment: datetime = self.of_run("run-15")[0]["timestamp"]
        return moment

    def of_run(self, run_id: str) -> list[Row]:
        return [row for row in self.rows if row["run_id"] == run_id]


def play(broker: BrokerProcess) -> Golden:
    """On a broker that was started with `--router ROUTER` and has nothing yet. A second."""
    with Client(broker.url, timeout_s=90) as client, ExitStack() as streams:
        for topic, partitions in TOPICS.items():
            client.create_topic(topic, partitions)
        scene = _Scene(client, streams)
        for act in (_well, _failures, _leases, _shapes, _skipped, _beside):
            act(scene)
        return Golden(broker, journal_rows(client))


def journal_rows(client: Client) -> list[Row]:
    end = client.journal_offsets(fresh=True).next
    return [_whole(row) for row in client.journal(to=end)]


def _whole(row: Row) -> Row:
    told = {name: row.get(name) for name in COLUMNS}
    for name in TIMES:
        if name in row:
            told[name] = datetime.fromisoformat(row[name])
    return told


class _Scene:
    """One consumer for each group, open to the end; it takes what comes, one at a time."""

    def __init__(self, client: Client, streams: ExitStack) -> None:
        self.client = client
        self._streams = streams
        self._open: dict[tuple[str, str], Iterator[Delivery]] = {}

    def put(
        self,
        topic: str,
        run: str = "",
        step: str = "",
        parent: str = "",
        *,
        tenant: str = "acme",
        key: str = "",
        attempts: int = 0,
        backoff_ms: int = 0,
        idempotency_key: str = "",
    ) -> None:
        policy = RetryPolicy(attempts, backoff_ms) if attempts else None
        envelope = Envelope(
            run_id=run,
            step_id=step,
            parent_step_id=parent,
            tenant_id=tenant,
            idempotency_key=idempotency_key,
            retry_policy=policy,
        )
        self.client.produce(topic, f"{run or 'no run'} {step}", key=key, envelope=envelope)

    def take(self, topic: str, group: str) -> Delivery:
        stream = self._open.get((topic, group))
        if stream is None:
            opened = self._stream(topic, group, f"{group}-1", HOUR_MS)
            stream = self._open[topic, group] = self._streams.enter_context(opened)
        return next(stream)

    def do(self, topic: str, group: str) -> None:
        self.client.ack(self.take(topic, group))

    def fail(self, topic: str, group: str, reason: str) -> None:
        self.client.nack(self.take(topic, group), reason)

    def commit(self, topic: str, group: str, key: str) -> None:
        effect = EffectRef(topic=topic, group=group, key=key, owner="x", tenant_id="acme")
        self.client.begin_effect(effect)
        self.client.commit_effect(effect, "done")

    def lapse(self, topic: str, group: str) -> None:
        """Somebody takes a message, goes away, and lets the lease end."""
        with self._stream(topic, group, f"{group}-gone", SHORT_MS, prefetch=1) as stream:
            next(stream)
        eventually(lambda: self._in_flight(topic, group), lambda count: count == 0)

    def _stream(
        self, topic: str, group: str, owner: str, lease_ms: int, prefetch: int = 0
    ) -> Deliveries:
        return self.client.consume(
            topic, group, owner=owner, lease_ms=lease_ms, prefetch=prefetch, wait_s=20
        )

    def _in_flight(self, topic: str, group: str) -> int:
        groups = {known.name: known for known in self.client.describe_topic(topic).groups}
        known = groups[group]
        return known.consumers + sum(progress.in_flight for progress in known.partitions)


def _well(scene: _Scene) -> None:
    scene.put("plans", "run-01", "plan", key="large-1")
    scene.do("plans", "planners")
    scene.put("work", "run-01", "fetch", "plan", key="large-1")
    scene.put("work", "run-01", "rank", "plan", key="b")
    scene.do("work", "workers")
    scene.do("work", "workers")
    scene.put("reports", "run-01", "report", "rank")
    scene.do("reports", "writers")


def _failures(scene: _Scene) -> None:
    scene.put("plans", "run-02", "plan", tenant="globex")
    scene.put("work", "run-02", "fetch", "plan", tenant="globex", attempts=3, backoff_ms=40)
    scene.do("plans", "planners")
    scene.fail("work", "workers", "the source is away")
    scene.do("work", "workers")
    for run, reason in (
        ("run-04", "timeout after 31 ms for order 8841"),
        ("run-05", "timeout after 7 ms for order 90172"),
    ):
        scene.put("plans", run, "plan", tenant="globex")
        scene.do("plans", "planners")
        scene.put("payments", run, "charge", "plan", tenant="globex", key=run, attempts=2)
        scene.fail("payments", "cashiers", "timeout after 2 ms for order 1")
        scene.fail("payments", "cashiers", reason)
    scene.put("payments", "run-06", "notify", attempts=1)
    scene.fail("payments", "cashiers", "no user 7f3a9c1e-0b52-4d0e-9a41-5d2f8c6e1b77")
    scene.put("work", "run-12", "fetch", attempts=3, backoff_ms=HOUR_MS)
    scene.fail("work", "workers", "come again in an hour")


def _leases(scene: _Scene) -> None:
    scene.put("crunch", "run-10", "crunch", tenant="globex", attempts=1)
    scene.lapse("crunch", "crunchers")
    scene.put("crunch", "run-03", "crunch", attempts=5)
    scene.lapse("crunch", "crunchers")
    scene.do("crunch", "crunchers")


def _shapes(scene: _Scene) -> None:
    scene.put("work", "run-07", "merge", "nobody")
    scene.do("work", "workers")
    for step, parent in (("a", "b"), ("b", "a")):
        scene.put("work", "run-08", step, parent)
        scene.do("work", "workers")
    scene.put("work", "run-09", "fetch", tenant="globex")
    scene.take("work", "workers")
    scene.put("audit", "run-09", "rank", "fetch", tenant="globex")
    for step in ("left", "right"):
        scene.put("plans", "run-11", step)
        scene.do("plans", "planners")
    for parent, key in (("left", "a"), ("right", "large-b"), ("right", "c")):
        scene.put("work", "run-11", "join", parent, key=key, attempts=2)
    scene.fail("work", "workers", "first one, once")
    scene.fail("work", "workers", "second one, twice")
    for _ in range(3):
        delivery = scene.take("work", "workers")
        if delivery.last_error == "second one, twice":
            scene.client.nack(delivery, "second one, twice")
        else:
            scene.client.ack(delivery)
    scene.do("dlq.work", "people")


def _skipped(scene: _Scene) -> None:
    scene.commit("reports", "writers", "r-13")
    scene.put("reports", "run-13", "report", idempotency_key="r-13")
    scene.put("reports", "run-13", "again", "report", idempotency_key="r-14", attempts=5)
    delivery = scene.take("reports", "writers")
    scene.commit("reports", "writers", "r-14")
    scene.client.nack(delivery, "forgot to ack")


def _beside(scene: _Scene) -> None:
    time.sleep(0.005)  # a moment that lies between all that was and all that comes
    scene.put("digests", "run-15", "digest")
    scene.do("digests", "readers")
    scene.take("digests", "sleepers")
    scene.put("work", "run-14", tenant="initech")
    scene.put("work", tenant="initech")
    scene.do("work", "workers")
    scene.do("work", "workers")
    scene.put("audit", "run-14", tenant="initech")
    plain = [NewMessage("work", f"plain {n}", key=f"k{n}") for n in range(4)]
    for outcome in scene.client.produce_batch(plain):
        if isinstance(outcome, PenstockError):
            raise outcome
    scene.fail("work", "workers", "no envelope, and no policy: at once again")
    for _ in range(4):
        scene.do("work", "workers")
