"""Damaged WebSocket traffic, with fixed seeds: a clear refusal, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.server.message_actions import MESSAGES
from tests.broker_process import BrokerProcess
from tests.fuzz import websocket


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """With a disk: in memory there are no durable streams."""
    with BrokerProcess(tmp_path_factory.mktemp("fuzz"), env=websocket.ENV) as process:
        yield process


def test_every_message_is_among_those_that_are_damaged() -> None:
    """Named subscriptions and numbered publishes have members that no example has."""
    assert {each["type"] for each in websocket.MESSAGES} == {each.type for each in MESSAGES}
    members = {(each["type"], name) for each in websocket.MESSAGES for name in each}
    assert members >= {
        ("subscribe", "name"), ("subscribe", "start"), ("subscribe", "lease_ms"),
        ("publish", "sequence"), ("publish_batch", "sequence"), ("event_ack", "offset"),
        ("event_nack", "delay_ms"),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_websocket_sends_is_answered_or_ended_in_order(
    broker: BrokerProcess, seed: int
) -> None:
    steps, types = websocket.fuzz(broker, seed, sessions=150)
    assert steps > 300
    assert types >= {"event", "event_batch", "subscribed", "subscribe_cursor_error", "error"}
