"""A standby of a broker: each record that the broker appends is applied to a second state.

It knows nothing but the log, so what the broker writes into its state without a record makes the
two differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.comparison import comparable
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.core.state import BrokerState, apply
from penstock.model.records import decode_record
from penstock.storage.checkpoint import load_checkpoint
from penstock.storage.recovery import walk_log
from tests.engine.harness import Broker


def recovered(broker: Broker) -> BrokerState:
    """The state that the disk alone gives: the last snapshot and the log behind it."""
    vfs = broker.disk.restarted()
    checkpoint = load_checkpoint(vfs, broker.directory, broker.limits)
    state: BrokerState = checkpoint.state
    walk_log(
        vfs,
        broker.directory,
        first_segment=checkpoint.first_segment,
        replay=lambda data, _: apply(state, decode_record(data)),
    )
    return state


def must_equal(state: BrokerState, broker: Broker) -> None:
    check(state)
    now_ms = broker.clock.now_ms()
    live = comparable(take_image(broker.state), now_ms)
    assert comparable(take_image(state), now_ms) == live


class Follower:
    """Begins with what is on the disk of a broker that has come to rest."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._state = recovered(broker)
        log = broker.log
        append, append_one = log.append, log.append_one

        def follow(records: Sequence[bytes]) -> int:
            position: int = append(records)
            self._apply(records)
            return position

        def follow_one(record: bytes) -> int:
            position: int = append_one(record)
            self._apply([record])
            return position

        log.append, log.append_one = follow, follow_one

    def _apply(self, records: Sequence[bytes]) -> None:
        for record in records:
            apply(self._state, decode_record(record))

    def compare(self) -> None:
        must_equal(self._state, self._broker)
