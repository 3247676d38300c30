"""Appends many new messages to the log with few calls, each applied as soon as it is decided.

Invariant: a message that is applied is in the log when the batch ends, also after an error.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.core.state import BrokerState, apply_message
from penstock.engine.window import Added, Window
from penstock.model.limits import KIB
from penstock.model.records import Stored, encode_record
from penstock.storage.log import RECORD_OVERHEAD_BYTES

if TYPE_CHECKING:
    from penstock.engine.ledger import Ledger

BATCH_BYTES = 256 * KIB
"""The bytes that are gathered before they are appended, unless one message is larger."""

PRODUCE_LATER = "produce goes on when there is room"


class AppendBatch:
    """New messages that are appended together; used in a `with`.

    Each gets its room in the log and is applied when it is stored, so that the next is decided with
    it in view and appending all of them at the end does not fail. `partitions` are those that got
    messages, with the ids of their topics.
    """

    __slots__ = (
        "_encoded",
        "_ledger",
        "_nbytes",
        "_room",
        "_runs",
        "_state",
        "_window",
        "partitions",
    )

    def __init__(self, ledger: Ledger, state: BrokerState, window: Window) -> None:
        self.partitions: set[tuple[int, int]] = set()
        self._ledger = ledger
        self._state = state
        self._window = window
        self._room = 0
        self._begin()

    def _begin(self) -> None:
        self._nbytes = 0
        self._encoded: list[bytes] = []
        self._runs: defaultdict[tuple[int, int], list[Added]] = defaultdict(list)

    def __enter__(self) -> AppendBatch:
        return self

    def __exit__(self, *_: object) -> None:
        """Appends after an error too: what is applied must be in the log."""
        if self._ledger.failure is None:
            self._append()

    def store(self, message: Stored, size: int) -> None:
        data = encode_record(message)
        nbytes = len(data) + RECORD_OVERHEAD_BYTES
        if self._nbytes + nbytes > self._room:
            self._make_room(nbytes)
        try:
            apply_message(self._state, message, size)
            start = self._nbytes
            self._nbytes = start + nbytes
            self._encoded.append(data)
            self._runs[message.topic_id, message.partition].append((message, size, start))
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error

    def _make_room(self, nbytes: int) -> None:
        self._append()
        room = max(nbytes, BATCH_BYTES)
        if not self._ledger.log.has_room(room):
            if not self._ledger.log.has_room(nbytes):
                raise self._ledger.no_room(PRODUCE_LATER)
            room = nbytes
        self._room = room

    def _append(self) -> None:
        if self._encoded:
            try:
                start = self._ledger.append(self._encoded)
                for run in self._runs.values():
                    self._window.add_run(run, start)
            except BaseException as error:
                raise self._ledger.stop_serving(error, is_appended=True) from error
            self.partitions.update(self._runs)
            self._begin()
        self._room = 0
