"""How eagerly segments are sealed."""

from __future__ import annotations

from typing import Any

from penstock.engine.sealing import MANY_SEGMENTS, PATIENT_NICE, URGENT_NICE
from penstock.storage.wal import Wal
from tests.engine.harness import Broker, on_disk
from tests.engine.inline_sealing import InlineSealer


def test_sealing_stands_back_until_segments_pile_up() -> None:
    broker = on_disk()
    broker.topic("t")
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    sealer: Any = sealing._sealer
    assert isinstance(sealer, InlineSealer)
    broker.produce("t", "first")
    broker.seal()
    assert sealer.nices == [PATIENT_NICE]
    sealer.is_held = True
    for closed in range(1, MANY_SEGMENTS + 1):
        close_a_segment(broker, closed)
    sealer.is_held = False
    sealing.run()
    broker.settle()
    assert sealer.nices == [PATIENT_NICE, URGENT_NICE]


def close_a_segment(broker: Broker, closed: int) -> None:
    broker.produce("t", "value")
    log = broker.log
    assert isinstance(log, Wal)
    log.roll()
    broker.scheduler.run_until(lambda: len(log.closed_segments()) == closed)
