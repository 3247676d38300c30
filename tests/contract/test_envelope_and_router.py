"""Section G: envelope and router, driftq-53 to driftq-56."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import assert_done, assert_not_found, assert_nothing_stored, new_name
from tests.contract.conftest import StartBroker
from tests.contract.http_router import HttpRouter
from tests.ndjson import Item
from tests.tls_proxy import Certificate, tls_proxy


def first_item(broker: BrokerProcess, topic: str) -> Item:
    with broker.consume(topic, group=new_name("audit")) as stream:
        return stream.next()


# -- driftq-53: the envelope -------------------------------------------------------------------


def test_every_field_arrives_with_every_delivery_and_survives_a_restart(
    start_broker: StartBroker,
) -> None:
    """driftq-53"""
    broker = start_broker()
    topic = broker.create_topic("t", 2)
    deadline = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    envelope = {
        "run_id": "run_123",
        "step_id": "step_7",
        "parent_step_id": "step_3",
        "tenant_id": "tenant_a",
        "idempotency_key": "tenant_a:run_123:step_7",
        "target_topic": topic,
        "partition_override": 0,
        "deadline": deadline,
        "retry_policy": {"max_attempts": 50, "backoff_ms": 1, "max_backoff_ms": 2},
    }
    broker.put(topic, "v", "k", envelope)
    with broker.consume(topic) as stream:
        for _ in range(3):
            item = stream.next()
            assert item.envelope == envelope
            assert_done(broker.nack(topic, item))
    for kill in (True, False):
        broker.restart(kill=kill)
        with broker.consume(topic) as stream:
            item = stream.next()
            assert item.envelope == envelope
            assert item.attempts > 3
        assert first_item(broker, topic).envelope == envelope


@pytest.mark.parametrize(
    "deadline", ["2099-12-21T12:00:00Z", "2099-12-21T12:00:00.123Z", "2099-12-21T12:00:00+05:30"]
)
def test_a_deadline_keeps_its_instant(broker: BrokerProcess, topic: str, deadline: str) -> None:
    """driftq-53"""
    broker.put(topic, "v", envelope={"deadline": deadline})
    envelope = first_item(broker, topic).envelope
    assert envelope is not None
    assert datetime.fromisoformat(envelope["deadline"]) == datetime.fromisoformat(deadline)
    assert re.search(r"(Z|[+-]\d\d:\d\d)$", envelope["deadline"])


# -- driftq-54: a router -----------------------------------------------------------------------

CALLABLES = '''
import asyncio
import time


def answer(topic, message):
    """The value says what the router does; the key and envelope prove that it saw them."""
    value = message["value"]
    if value == "none":
        return None
    if value == "raise":
        raise RuntimeError("the brain is offline")
    if value == "label":
        run = (message.get("envelope") or {}).get("run_id", "")
        return {"label": "saw " + topic, "meta": {"key": message["key"], "run": run}}
    if value == "move":
        return {"label": "moved", "target_topic": "target", "partition_override": 2}
    if value == "partition":
        return {"label": "placed", "partition_override": 1}
    return {
        "unknown target": {"label": "x", "target_topic": "nowhere"},
        "partition out of range": {"label": "x", "partition_override": 99},
        "negative partition": {"label": "x", "partition_override": -1},
        "label of another type": {"label": 7},
        "meta of another type": {"label": "x", "meta": {"score": 0.9}},
        "meta is a list": {"label": "x", "meta": ["a"]},
        "partition of another type": {"label": "x", "partition_override": "1"},
        "label is half a surrogate pair": {"label": "\\udcff"},
        "meta is half a surrogate pair": {"label": "x", "meta": {"\\udcff": "\\udcff"}},
        "a string": "target",
        "a number": 5,
        "a list": [1],
        "unknown member": {"label": "x", "fanout": ["a", "b"]},
    }[value]


def route(topic, message):
    if message["value"] == "hang":
        time.sleep(3)
        return {"label": "too late"}
    return answer(topic, message)


async def route_async(topic, message):
    if message["value"] == "hang":
        await asyncio.sleep(60)
        return {"label": "too late"}
    return answer(topic, message)
'''

NONSENSE = [
    "raise", "unknown target", "partition out of range", "negative partition",
    "label of another type", "meta of another type", "meta is a list",
    "partition of another type", "label is half a surrogate pair", "meta is half a surrogate pair",
    "a string", "a number", "a list",
]  # fmt: skip


@pytest.fixture(scope="module", params=["route", "route_async"])
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """A broker with a router: a plain function once, a coroutine function once."""
    home = tmp_path_factory.mktemp("routed")
    (home / "contract_router.py").write_text(CALLABLES)
    process = BrokerProcess(
        None,
        "--router", f"contract_router:{request.param}", "--router-timeout-ms", "300",
        env={"PYTHONPATH": str(home)},
    )  # fmt: skip
    try:
        process.start()
        process.create_topic("target", 3)
        yield process
    finally:
        process.close()


def test_a_router_sees_topic_and_message_and_its_label_and_meta_come_back(
    routed: BrokerProcess,
) -> None:
    """driftq-54"""
    topic = routed.create_topic(new_name())
    routed.put(topic, "label", "the key", {"run_id": "the run"})
    item = first_item(routed, topic)
    assert item.routing == {
        "label": f"saw {topic}",
        "meta": {"key": "the key", "run": "the run"},
    }
    members = list(item.members)
    assert members[members.index("last_error") + 1 :] == ["routing", "envelope", "delivery_id"]


def test_a_router_beats_the_producer(routed: BrokerProcess) -> None:
    """driftq-54: and the reply still names the topic that was asked for."""
    asked, elsewhere = routed.create_topic(new_name()), routed.create_topic(new_name())
    envelope = {"target_topic": elsewhere, "partition_override": 0}
    reply = routed.produce(asked, "move", "k", envelope)
    assert reply.status_code == 200
    assert reply.json() == {"status": "produced", "topic": asked}
    with routed.consume("target", group="g") as stream:
        item = stream.next()
        assert_done(routed.ack("target", item))
    assert (item.partition, item.value, item.routing) == (2, "move", {"label": "moved"})
    assert_not_stored(routed, asked)
    assert_not_stored(routed, elsewhere)


def assert_not_stored(routed: BrokerProcess, topic: str) -> None:
    routed.put(topic, "none")
    item = first_item(routed, topic)
    assert (item.offset, item.value) == (0, "none")


def test_the_producer_beats_hashing_and_the_router_beats_both(routed: BrokerProcess) -> None:
    """driftq-54"""
    topic = routed.create_topic(new_name(), 4)
    routed.put(topic, "none", "a key", {"partition_override": 3})
    assert first_item(routed, topic).partition == 3
    topic = routed.create_topic(new_name(), 4)
    routed.put(topic, "partition", "a key", {"partition_override": 3})
    assert first_item(routed, topic).partition == 1


def test_a_router_that_returns_nothing_changes_nothing(routed: BrokerProcess) -> None:
    """driftq-54"""
    topic = routed.create_topic(new_name())
    routed.put(topic, "none")
    assert "routing" not in first_item(routed, topic).members


def test_the_routers_decision_survives_a_restart(start_broker: StartBroker, tmp_path: Path) -> None:
    """driftq-54"""
    (tmp_path / "contract_router.py").write_text(CALLABLES)
    broker = start_broker("--router", "contract_router:route", env={"PYTHONPATH": str(tmp_path)})
    topic = broker.create_topic("t")
    broker.put(topic, "label", "k")
    broker.restart(kill=True)
    assert first_item(broker, topic).routing == {
        "label": "saw t",
        "meta": {"key": "k", "run": ""},
    }


# -- driftq-55: a router that fails ------------------------------------------------------------


def router_failures(broker: BrokerProcess) -> float:
    """The sum of the counters about router failures."""
    text = broker.client.get("/metrics").text
    samples = re.findall(r"^penstock_router\w*_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    failed = re.findall(
        r"^penstock_router\w*(?:fail|error)\w*_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE
    )
    assert samples, "no penstock_router…_total in /metrics"
    return sum(map(float, failed))


@pytest.mark.parametrize("value", [*NONSENSE, "hang"])
def test_a_router_that_fails_leaves_the_message_unrouted(routed: BrokerProcess, value: str) -> None:
    """driftq-55: the producer's own controls stay in force, and the failure is counted."""
    asked, target = routed.create_topic(new_name()), routed.create_topic(new_name(), 2)
    before = router_failures(routed)
    reply = routed.produce(asked, value, "k", {"target_topic": target, "partition_override": 1})
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"status": "produced", "topic": asked}
    item = first_item(routed, target)
    assert (item.value, item.partition) == (value, 1)
    assert "routing" not in item.members
    assert router_failures(routed) == before + 1


def test_a_router_that_hangs_holds_up_nobody_else(routed: BrokerProcess) -> None:
    """driftq-55: more of them than any pool has threads."""
    topic = routed.create_topic(new_name())
    statuses: list[int] = []

    def hang() -> None:
        with routed.new_client() as client:
            body = {"topic": topic, "value": "hang"}
            statuses.append(client.post("/v1/produce", json=body).status_code)

    threads = [threading.Thread(target=hang) for _ in range(40)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    assert routed.client.get("/v1/healthz").status_code == 200
    assert routed.client.get("/v1/topics").status_code == 200
    assert time.monotonic() - started < 1.5
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40


# -- driftq-54, driftq-55 over HTTP ------------------------------------------------------------


def test_an_http_router_is_asked_and_obeyed(
    start_broker: StartBroker, http_router: HttpRouter
) -> None:
    """driftq-54"""
    broker = start_broker("--router", http_router.url, memory=True)
    asked = broker.create_topic("asked")
    target = broker.create_topic("target", 3)
    http_router.says(
        {
            "label": "finance:classification",
            "target_topic": target,
            "partition_override": 2,
            "meta": {"score": "0.92"},
        }
    )
    reply = broker.produce(asked, "v", "k", {"run_id": "r"})
    assert reply.json() == {"status": "produced", "topic": asked}
    assert http_router.asked == [
        {"topic": asked, "message": {"key": "k", "value": "v", "envelope": {"run_id": "r"}}}
    ]
    item = first_item(broker, target)
    assert item.partition == 2
    assert item.routing == {"label": "finance:classification", "meta": {"score": "0.92"}}
    http_router.says({"label": "only a label", "target_topic": None, "partition_override": None})
    broker.put(asked, "stays")
    item = first_item(broker, asked)
    assert (item.value, item.routing) == ("stays", {"label": "only a label"})


def test_a_router_may_have_a_certificate_that_ssl_cert_file_names(
    start_broker: StartBroker, http_router: HttpRouter, certificate: Certificate
) -> None:
    http_router.says({"label": "over TLS"})
    with tls_proxy(urlsplit(http_router.url).port or 0, certificate) as url:
        trusted = {"SSL_CERT_FILE": str(certificate.file)}
        broker = start_broker("--router", f"{url}/route", memory=True, env=trusted)
        topic = broker.create_topic("t")
        broker.put(topic, "v")
        assert first_item(broker, topic).routing == {"label": "over TLS"}


def test_an_http_router_that_fails_leaves_the_message_unrouted(
    start_broker: StartBroker, http_router: HttpRouter
) -> None:
    """driftq-55"""
    broker = start_broker("--router", http_router.url, "--router-timeout-ms", "300", memory=True)
    answers: list[tuple[int, bytes]] = [
        (500, b"{}"),
        (404, b'{"label":"x"}'),
        (302, b""),
        (200, b"not json"),
        (200, b""),
        (200, b"[]"),
        (200, b'{"label":1}'),
        (200, b'{"label":"x","target_topic":"nowhere"}'),
        (200, b'{"label":"x","partition_override":7}'),
        (200, b'{"label":"' + b"x" * 2**21),
    ]
    for n, answer in enumerate(answers):
        topic = broker.create_topic(f"t{n}")
        before = router_failures(broker)
        http_router.answer = lambda _, answer=answer: answer  # type: ignore[misc]
        broker.put(topic, "v")
        assert "routing" not in first_item(broker, topic).members, answer
        assert router_failures(broker) == before + 1, answer
    http_router.says({"label": "too late"})
    http_router.delay_s = 1.5
    topic = broker.create_topic("slow")
    started = time.monotonic()
    broker.put(topic, "v")
    assert 0.3 <= time.monotonic() - started < 1.4
    assert "routing" not in first_item(broker, topic).members
    http_router.close()
    topic = broker.create_topic("gone")
    broker.put(topic, "v")
    assert "routing" not in first_item(broker, topic).members


# -- driftq-56: no router, and dead letters ----------------------------------------------------


def test_without_a_router_there_is_no_routing(broker: BrokerProcess, topic: str) -> None:
    """driftq-56"""
    broker.put(topic, "v", "k", {"run_id": "r"})
    assert "routing" not in first_item(broker, topic).members


def test_a_client_may_not_send_routing(broker: BrokerProcess, topic: str) -> None:
    """driftq-56"""
    body = {"topic": topic, "value": "v", "routing": {"label": "x"}}
    assert broker.client.post("/v1/produce", json=body).status_code == 400
    assert_nothing_stored(broker, topic)


def test_dead_letters_are_never_routed(start_broker: StartBroker, http_router: HttpRouter) -> None:
    """driftq-56"""
    broker = start_broker("--router", http_router.url, memory=True)
    topic = broker.create_topic("t")
    broker.create_topic("elsewhere")
    broker.put(topic, "poison", envelope={"retry_policy": {"max_attempts": 1}})
    http_router.says({"label": "wrong way", "target_topic": "elsewhere"})
    asked = len(http_router.asked)
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    copy = first_item(broker, "dlq.t")
    assert copy.value == "poison"
    assert "routing" not in copy.members
    assert len(http_router.asked) == asked


def test_an_unknown_topic_is_404_even_when_the_router_has_no_say(routed: BrokerProcess) -> None:
    """driftq-55"""
    assert_not_found(routed.produce("nowhere", "none"))
