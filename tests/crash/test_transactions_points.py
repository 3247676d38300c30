"""A broker that is killed at each named point inside a transaction with every kind of operation.

After a restart all of the transaction is there or nothing, and all of it if it was answered. The
sender repeats it in any case, and gets the first answer.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.client import Client, Delivery, EffectRef, StreamEvent
from penstock.client.results import Produced, PublishedAt
from penstock.client.sync_transactions import Transaction
from penstock.client.transactions import TransactionResult
from penstock.model.caching import Written
from penstock.model.errors import Unavailable
from penstock.server.routes.transaction_operations import OperationBody
from tests.broker_process import BrokerProcess
from tests.crash.broker_that_kills_itself import POINTS

ROOT = Path(__file__).resolve().parents[2]
ID = "killed"
EFFECT = EffectRef(topic="in", group="g", key="k", owner="worker")
LEASE_MS = 600_000
NOTHING = {
    "invoices": [],
    "labels": [],
    "amounts": [],
    "messages left": 2,
    "events left": 2,
    "effect": "PENDING",
    "entries": {"changed": b"before", "deleted": b"before"},
}
ALL = {
    "invoices": ["17 EUR"],
    "labels": ["label 1", "label 2"],
    "amounts": [b"17", b"18"],
    "messages left": 1,
    "events left": 1,
    "effect": "COMMITTED",
    "entries": {"changed": b"after", "counted": b"3"},
}


class KilledBroker(BrokerProcess):
    """Kills itself at `point` in the transaction ID. An empty point starts the plain broker."""

    point = ""

    def start(self) -> BrokerProcess:
        self.env |= {"PYTHONPATH": str(ROOT), "KILL_POINT": self.point, "KILL_TRANSACTION": ID}
        return super().start()

    def _command(self) -> list[str]:
        command = super()._command()
        if self.point:
            command[command.index("penstock")] = "tests.crash.broker_that_kills_itself"
        return command


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KilledBroker]:
    process = KilledBroker(tmp_path / "data", env={"PENSTOCK_SEGMENT_BYTES": "1048576"})
    try:
        yield process
    finally:
        process.close()


def prepare(client: Client) -> None:
    for topic in ("in", "invoices", "labels"):
        client.create_topic(topic)
    for stream, delivery in (("orders", "at_least_once"), ("amounts", "exactly_once")):
        client.create_stream("default", "default", stream, delivery=delivery)
    client.create_cache("default", "default", "entries", durable=True)
    for value in ("first", "second"):
        client.produce("in", value)
        client.stream("orders").publish(value)
    for key in ("changed", "deleted"):
        client.cache("entries").put(key, "before")
    client.begin_effect(EFFECT, LEASE_MS)


def every_operation(
    client: Client, messages: list[Delivery], events: list[StreamEvent]
) -> Transaction:
    tx = client.transaction(ID)
    changed = client.cache("entries").get("changed")
    assert changed is not None
    entries = tx.cache("entries")
    tx.produce("invoices", "17 EUR")
    tx.publish("amounts", "17", "18", producer_id="p", sequence=0)
    tx.ack(messages[0])
    entries.put("changed", "after", if_version=changed.version)
    tx.nack(messages[1], "no message")
    tx.ack(events[0])
    tx.nack(events[1], "no event")
    tx.produce("labels", "label 1")
    tx.commit_effect(EFFECT, "done")
    entries.incr("counted", 3)
    entries.delete("deleted")
    tx.produce("labels", "label 2")
    return tx


def operations_of(tx: Transaction) -> set[str]:
    body = json.loads(tx.call().body)
    return {operation["op"] for operation in body["operations"]}


def contents(client: Client, broker: BrokerProcess) -> dict[str, Any]:
    """Everything that the transaction changes and that can be read without changing it."""
    streams = "/v1/tenants/default/namespaces/default/streams"
    (named,) = broker.client.get(f"{streams}/orders/subscriptions").json()["named"]
    (group,) = client.describe_topic("in").groups
    with client.stream("amounts").subscribe(start="earliest", wait_s=0.5) as events:
        amounts = [event.payload for event in events]
    cache = client.cache("entries")
    found = {key: cache.get(key) for key in ("changed", "deleted", "counted")}
    return {
        "invoices": values(broker, "invoices"),
        "labels": values(broker, "labels"),
        "amounts": amounts,
        "messages left": group.partitions[0].lag,
        "events left": named["messages_behind"],
        "effect": client.look_up_effect(EFFECT).status,
        "entries": {key: entry.value for key, entry in found.items() if entry is not None},
    }


def values(broker: BrokerProcess, topic: str) -> list[str]:
    reply = broker.client.get(f"/v1/topics/{topic}/partitions/0/records?format=ndjson")
    assert reply.status_code == 200, reply.text
    return [json.loads(line)["value"] for line in reply.text.splitlines()]


def check_answer(results: list[TransactionResult]) -> None:
    changes = [result for result in results if isinstance(result, Written)]
    assert [result for result in results if not isinstance(result, Written)] == [
        Produced("invoices", 0, 0),
        PublishedAt(0),
        *[None] * 4,
        Produced("labels", 0, 0),
        None,
        Produced("labels", 0, 1),
    ]
    assert [(change.number, change.deleted) for change in changes] == [
        (None, None),
        (3, None),
        (None, True),
    ]
    versions = [change.version for change in changes]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(("point", "happens"), POINTS.items(), ids=POINTS.keys())
def test_a_kill_at_this_point_leaves_all_of_the_transaction_or_nothing(
    broker: KilledBroker, point: str, happens: bool
) -> None:
    """felix-123."""
    broker.point = point
    with ExitStack() as opened:
        client = opened.enter_context(Client(broker.start().url))
        prepare(client)
        assert broker.process is not None
        messages = client.consume("in", "g", owner="worker", lease_ms=LEASE_MS)
        deliveries = opened.enter_context(messages)
        orders = client.stream("orders")
        events = opened.enter_context(
            orders.subscribe(name="n", owner="worker", start="earliest", lease_ms=LEASE_MS)
        )
        tx = every_operation(
            client,
            [next(deliveries), next(deliveries)],
            [next(events), next(events)],
        )
        assert operations_of(tx) == {body.__struct_config__.tag for body in get_args(OperationBody)}
        answer: list[TransactionResult] | None = None
        try:
            answer = tx.commit()
        except Unavailable:
            assert point != "answered"
        assert broker.process.wait(30) == -signal.SIGKILL
    broker.kill()
    broker.point = ""
    with Client(broker.start().url) as client:
        assert contents(client, broker) == (ALL if happens else NOTHING)
        assert answer is None or happens
        repeated = client.send(tx.call())
        check_answer(repeated)
        assert answer is None or repeated == answer
        assert client.send(tx.call()) == repeated
        assert contents(client, broker) == ALL
        check_nacks(client)


def check_nacks(client: Client) -> None:
    with client.consume("in", "g", owner="worker") as deliveries:
        message = next(deliveries)
        assert (message.value, message.last_error) == ("second", "no message")
    with client.stream("orders").subscribe(name="n") as events:
        event = next(events)
        assert (event.payload, event.last_error) == (b"second", "no event")
