"""Damaged WebSocket traffic, with fixed seeds: a clear refusal, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.fuzz import websocket


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(None, env=websocket.ENV) as process:
        yield process


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_websocket_sends_is_answered_or_ended_in_order(
    broker: BrokerProcess, seed: int
) -> None:
    assert websocket.fuzz(broker, seed, sessions=150) > 300
