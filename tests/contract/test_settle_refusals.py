"""Section D: what ack, nack and extend refuse, driftq-31."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker_process import BrokerProcess, settle_body
from tests.contract.checks import (
    assert_done,
    assert_invalid,
    assert_not_found,
    assert_refused,
)
from tests.contract.conftest import MakeTopic
from tests.ndjson import Item


def item_at(partition: Any, offset: Any) -> Item:
    return Item({"partition": partition, "offset": offset}, b"", 0.0)


MISSING = object()

BAD_FIELDS = [
    ("topic", MISSING), ("topic", ""), ("topic", "  "), ("topic", 1),
    ("group", MISSING), ("group", ""), ("group", "\t"), ("group", 1),
    ("owner", MISSING), ("owner", ""), ("owner", " "), ("owner", 1),
    ("partition", MISSING), ("partition", -1), ("partition", 2), ("partition", 1000),
    ("partition", 0.5), ("partition", "zero"), ("partition", None), ("partition", True),
    ("offset", MISSING), ("offset", -1), ("offset", 0.5), ("offset", "first"),
    ("offset", None), ("offset", True), ("extra", 1),
]  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/ack", "/v1/nack", "/v1/extend"])
def test_wrong_fields_are_400_and_change_nothing(
    broker: BrokerProcess, make_topic: MakeTopic, route: str
) -> None:
    """driftq-31"""
    topic = make_topic(2)
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        good = settle_body(topic, stream.next(), "g", "o")
        if route == "/v1/extend":
            good["lease_ms"] = 60_000
        for name, wrong in BAD_FIELDS:
            body = {k: v for k, v in good.items() if k != name}
            if wrong is not MISSING:
                body[name] = wrong
            try:
                assert_invalid(broker.client.post(route, json=body))
            except AssertionError as failure:
                raise AssertionError(f"{name}={wrong!r}") from failure
        assert_done(broker.client.post(route, json=good))


@pytest.mark.parametrize("route", ["/v1/ack", "/v1/nack"])
def test_wrong_fields_in_the_query_are_400(
    broker: BrokerProcess, make_topic: MakeTopic, route: str
) -> None:
    """driftq-31"""
    topic = make_topic(2)
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        good = settle_body(topic, stream.next(), "g", "o")
        for name, wrong in BAD_FIELDS:
            if name == "extra" or wrong in (1, None, True):
                continue
            query = {k: v for k, v in good.items() if k != name}
            if wrong is not MISSING:
                query[name] = wrong
            try:
                assert_invalid(broker.client.post(route, params=query))
            except AssertionError as failure:
                raise AssertionError(f"{name}={wrong!r}") from failure
        assert_done(broker.client.post(route, params=good))


@pytest.mark.parametrize("route", ["/v1/ack", "/v1/nack"])
def test_an_offset_that_is_not_there_is_409(
    broker: BrokerProcess, make_topic: MakeTopic, route: str
) -> None:
    """driftq-31: in the other partition, or past the end."""
    topic = make_topic(2)
    broker.put(topic, "0", envelope={"partition_override": 0})
    broker.put(topic, "1", envelope={"partition_override": 1})
    with broker.consume(topic) as stream:
        stream.take(2)
        for partition, offset in [(1, 0), (0, 1), (0, 2), (1, 10**12)]:
            body = settle_body(topic, item_at(partition, offset), "g", "o")
            assert_refused(broker.client.post(route, json=body))


@pytest.mark.parametrize("route", ["/v1/ack", "/v1/nack", "/v1/extend"])
def test_an_unknown_topic_is_404(broker: BrokerProcess, route: str) -> None:
    """driftq-31"""
    body = settle_body("nowhere", item_at(0, 0), "g", "o")
    if route == "/v1/extend":
        body["lease_ms"] = 1000
    assert_not_found(broker.client.post(route, json=body))
