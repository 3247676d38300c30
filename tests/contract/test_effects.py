"""Section H: idempotent effects of consumers, driftq-61 and driftq-62."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import (
    assert_done,
    assert_invalid,
    assert_not_found,
    assert_refused,
    new_name,
)
from tests.contract.conftest import StartBroker


def values(broker: BrokerProcess, topic: str, count: int) -> list[str]:
    """Exactly `count` messages are in the topic; their values by offset."""
    with broker.consume(topic, group=new_name("audit")) as stream:
        items = stream.take(count)
        stream.expect_nothing(100)
    return [item.value for item in sorted(items, key=lambda item: item.offset)]


def keyed(key: str, tenant: str | None = None) -> dict[str, Any]:
    return {"idempotency_key": key} | ({} if tenant is None else {"tenant_id": tenant})


# -- driftq-61: the consumer's helper ----------------------------------------------------------


class Helper:
    """The four calls for one effect."""

    def __init__(self, broker: BrokerProcess, topic: str, key: str, tenant: str = "t") -> None:
        self.broker = broker
        self.scope = {"tenant_id": tenant, "topic": topic, "group": "g", "key": key}

    def call(self, verb: str, owner: str, **more: Any) -> httpx.Response:
        body = self.scope | {"owner": owner} | more
        return self.broker.client.post(f"/v1/idempotency/{verb}", json=body)

    def runs(self, owner: str, lease_ms: int = 60_000, last_error: str = "") -> None:
        reply = self.call("begin", owner, lease_ms=lease_ms)
        said = {"status": "RUN"} | ({"last_error": last_error} if last_error else {})
        assert (reply.status_code, reply.json()) == (200, said), reply.text

    def is_committed(self, owner: str, result: Any) -> None:
        reply = self.call("begin", owner, lease_ms=60_000)
        assert reply.status_code == 200, reply.text
        assert reply.json() == {"status": "COMMITTED", "result": result}


@pytest.fixture
def helper(broker: BrokerProcess, topic: str) -> Helper:
    return Helper(broker, topic, "k")


def test_begin_runs_and_after_commit_gives_the_result(helper: Helper) -> None:
    """driftq-61: to anybody, the committing owner included."""
    helper.runs("a")
    assert_done(helper.call("commit", "a", result="charged: 42 €"))
    helper.is_committed("a", "charged: 42 €")
    helper.is_committed("b", "charged: 42 €")


def test_while_one_owner_holds_it_others_are_refused(helper: Helper) -> None:
    """driftq-61"""
    helper.runs("a")
    assert_refused(helper.call("begin", "b", lease_ms=1000))
    assert_refused(helper.call("renew", "b", lease_ms=1000))
    assert_refused(helper.call("commit", "b", result="x"))
    assert_refused(helper.call("fail", "b", reason="x"))
    assert_done(helper.call("commit", "a", result="mine"))


def test_after_a_failure_anybody_may_run_it(helper: Helper) -> None:
    """driftq-61"""
    helper.runs("a")
    assert_done(helper.call("fail", "a", reason="upstream down"))
    helper.runs("b", last_error="upstream down")
    assert_refused(helper.call("commit", "a", result="x"))
    assert_done(helper.call("commit", "b", result="done"))


def test_after_its_lease_anybody_may_run_it_and_renew_moves_the_end(helper: Helper) -> None:
    """driftq-61"""
    before = time.monotonic()
    helper.runs("a", lease_ms=400)
    taken = eventually(
        lambda: helper.call("begin", "b", lease_ms=400).status_code, {200}.__contains__
    )
    assert taken == 200
    assert time.monotonic() - before >= 0.4
    renewed = time.monotonic()
    assert_done(helper.call("renew", "b", lease_ms=1200))
    assert_refused(helper.call("renew", "a", lease_ms=1200))
    eventually(lambda: helper.call("begin", "c", lease_ms=400).status_code, {200}.__contains__)
    assert time.monotonic() - renewed >= 1.2


def test_commit_renew_or_fail_of_what_nobody_began_is_409(helper: Helper) -> None:
    """driftq-61"""
    assert_refused(helper.call("renew", "a", lease_ms=1000))
    assert_refused(helper.call("commit", "a", result="x"))
    assert_refused(helper.call("fail", "a", reason="x"))


def test_tenant_topic_group_and_key_are_the_scope(broker: BrokerProcess, topic: str) -> None:
    """driftq-61"""
    helper = Helper(broker, topic, "k")
    helper.runs("a")
    assert_done(helper.call("commit", "a", result="x"))
    other_topic = broker.create_topic(new_name())
    changes = [{"tenant_id": "u"}, {"topic": other_topic}, {"group": "h"}, {"key": "l"}]
    for change in changes:
        body = helper.scope | change | {"owner": "a", "lease_ms": 1000}
        reply = broker.client.post("/v1/idempotency/begin", json=body)
        assert reply.json() == {"status": "RUN"}, change


def test_wrong_calls_of_the_helper_are_refused(helper: Helper) -> None:
    """driftq-61"""
    for missing in ("topic", "group", "key", "owner"):
        body = helper.scope | {"owner": "a", "lease_ms": 1000}
        for wrong in ("", 7):
            reply = helper.broker.client.post("/v1/idempotency/begin", json=body | {missing: wrong})
            assert_invalid(reply)
        del body[missing]
        assert_invalid(helper.broker.client.post("/v1/idempotency/begin", json=body))
    assert_invalid(helper.call("begin", "a", lease_ms=-1))
    assert_invalid(helper.call("begin", "a", lease_ms="long"))
    assert_invalid(helper.call("begin", "a", extra=1))
    assert_not_found(helper.call("begin", "a", topic="nowhere"))
    assert_not_found(helper.call("forget", "a"))


def test_an_effect_committed_for_the_group_means_no_delivery(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-61: to that group; others get the message."""
    helper = Helper(broker, topic, "k")
    helper.runs("a")
    assert_done(helper.call("commit", "a", result="x"))
    broker.put(topic, "done already", envelope=keyed("k", "t"))
    broker.put(topic, "another tenant's", envelope=keyed("k", "u"))
    with broker.consume(topic) as stream:
        assert stream.next().value == "another tenant's"
        stream.expect_nothing(100)
    assert values(broker, topic, 2) == ["done already", "another tenant's"]


def test_a_message_waiting_for_its_retry_is_finished_by_the_commit(
    start_broker: StartBroker,
) -> None:
    """driftq-61: also after a crash."""
    broker = start_broker()
    topic = broker.create_topic("t")
    policy = {"retry_policy": {"max_attempts": 9, "backoff_ms": 300}}
    broker.put(topic, "v", envelope=keyed("k", "t") | policy)
    helper = Helper(broker, topic, "k")
    with broker.consume(topic) as stream:
        item = stream.next()
        helper.runs("o")
        assert_done(broker.nack(topic, item))
        assert_done(helper.call("commit", "o", result="x"))
        stream.expect_nothing(700)
    broker.restart(kill=True)
    helper.is_committed("other", "x")
    with broker.consume(topic) as stream:
        stream.expect_nothing()
        broker.put(topic, "next")
        assert stream.next().value == "next"


def test_a_plain_ack_commits_nothing(broker: BrokerProcess, topic: str) -> None:
    """driftq-61"""
    broker.put(topic, "v", envelope=keyed("k", "t"))
    with broker.consume(topic) as stream:
        assert_done(broker.ack(topic, stream.next()))
    Helper(broker, topic, "k").runs("a")


# -- driftq-62: a worker -----------------------------------------------------------------------


class Worker:
    """Does what the documents ask of a worker; `effects` counts how often the effect ran."""

    def __init__(self, broker: BrokerProcess, topic: str, owner: str, effects: list[str]) -> None:
        self.broker = broker
        self.topic = topic
        self.owner = owner
        self.effects = effects

    def handle(self, item: Any, lease_ms: int = 60_000, crash: str = "") -> str:
        """`crash` names the step after which the worker dies."""
        helper = Helper(self.broker, self.topic, item.envelope["idempotency_key"])
        begun = helper.call("begin", self.owner, lease_ms=lease_ms)
        if begun.status_code == 409:
            return "refused"
        assert begun.status_code == 200, begun.text
        if begun.json()["status"] == "RUN":
            self.effects.append(self.owner)
            if crash == "effect":
                return "crashed"
            assert_done(helper.call("commit", self.owner, result="ok"))
        if crash == "commit":
            return "crashed"
        assert_done(self.broker.ack(self.topic, item, owner=self.owner))
        return "acked"


def test_a_crash_after_the_commit_does_not_repeat_the_effect(start_broker: StartBroker) -> None:
    """driftq-62: nor does the redelivery, nor the broker's own crash."""
    broker = start_broker()
    topic = broker.create_topic("t")
    effects: list[str] = []
    broker.put(topic, "v", envelope=keyed("k", "t"))
    with broker.consume(topic, owner="a") as stream:
        worker = Worker(broker, topic, "a", effects)
        assert worker.handle(stream.next(), crash="commit") == "crashed"
    broker.restart(kill=True)
    with broker.consume(topic, owner="b") as stream:
        stream.expect_nothing()
        broker.put(topic, "the same again", envelope=keyed("k", "t"))
        stream.expect_nothing()
    assert effects == ["a"]


def test_two_workers_at_once_run_the_effect_once(broker: BrokerProcess, topic: str) -> None:
    """driftq-62: the lease ended under the first, and both have the message in hand."""
    effects: list[str] = []
    broker.put(topic, "v", envelope=keyed("k", "t"))
    with (
        broker.consume(topic, owner="a", lease_ms=150) as one,
        broker.consume(topic, owner="b", lease_ms=150) as two,
    ):
        both = {}
        for stream, owner in [(one, "a"), (two, "b")]:
            both[owner] = stream.next()
        barrier = threading.Barrier(2)
        outcomes: dict[str, int] = {}

        def begin(owner: str) -> None:
            body = Helper(broker, topic, "k").scope | {"owner": owner, "lease_ms": 60_000}
            with broker.new_client() as client:
                barrier.wait()
                outcomes[owner] = client.post("/v1/idempotency/begin", json=body).status_code

        threads = [threading.Thread(target=begin, args=(owner,)) for owner in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes.values()) == [200, 409]
    winner = next(owner for owner, status in outcomes.items() if status == 200)
    effects.append(winner)
    helper = Helper(broker, topic, "k")
    assert_done(helper.call("commit", winner, result="ok"))
    helper.is_committed("a", "ok")
    helper.is_committed("b", "ok")


def test_a_crash_between_effect_and_commit_repeats_the_effect(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-62: what no broker can prevent."""
    effects: list[str] = []
    broker.put(topic, "v", envelope=keyed("k", "t"))
    with broker.consume(topic, owner="a", lease_ms=300) as stream:
        item = stream.next()
        assert Worker(broker, topic, "a", effects).handle(item, 200, crash="effect") == "crashed"
    with broker.consume(topic, owner="b") as stream:
        again = stream.next()
        worker = Worker(broker, topic, "b", effects)
        outcome = eventually(lambda: worker.handle(again), lambda seen: seen != "refused")
    assert outcome == "acked"
    assert effects == ["a", "b"]


# -- looking up an effect ------------------------------------------------------------------------


def looked_up(broker: BrokerProcess, scope: dict[str, Any]) -> httpx.Response:
    return broker.client.get("/v1/idempotency", params=scope)


def test_an_effect_can_be_looked_up_by_anybody(broker: BrokerProcess, helper: Helper) -> None:
    """driftq-61: status, owner, what is left of the lease, the result."""
    assert_not_found(looked_up(broker, helper.scope))
    helper.runs("w1", lease_ms=60_000)
    pending = looked_up(broker, helper.scope).json()
    assert 0 < pending.pop("lease_ms") <= 60_000
    assert pending == {"status": "PENDING", "owner": "w1", "result": "", "last_error": ""}
    assert_done(helper.call("commit", "w1", result="receipt 42"))
    assert looked_up(broker, helper.scope).json() == {
        "status": "COMMITTED",
        "owner": "w1",
        "lease_ms": 0,
        "result": "receipt 42",
        "last_error": "",
    }
    assert_not_found(looked_up(broker, helper.scope | {"tenant_id": "another"}))
    assert_not_found(looked_up(broker, helper.scope | {"topic": "nowhere"}))
    assert_invalid(looked_up(broker, helper.scope | {"key": ""}))


def test_why_an_effect_failed_is_said_until_it_is_committed(start_broker: StartBroker) -> None:
    """driftq-61: by the look-up, and by the next begin; after a restart too."""
    broker = start_broker()
    topic = broker.create_topic("t")
    helper = Helper(broker, topic, "k")
    helper.runs("w1")
    assert_done(helper.call("fail", "w1", reason="card declined"))
    broker.restart(kill=True)
    failed = looked_up(broker, helper.scope).json()
    assert (failed["status"], failed["last_error"]) == ("FAILED", "card declined")
    begun = helper.call("begin", "w2", lease_ms=60_000)
    assert begun.json() == {"status": "RUN", "last_error": "card declined"}
    assert_done(helper.call("renew", "w2", lease_ms=60_000))
    pending = looked_up(broker, helper.scope).json()
    found = (pending["status"], pending["owner"], pending["last_error"])
    assert found == ("PENDING", "w2", "card declined")
    assert_done(helper.call("commit", "w2", result="paid"))
    done = looked_up(broker, helper.scope).json()
    assert (done["status"], done["result"], done["last_error"]) == ("COMMITTED", "paid", "")
