"""Counts the events that named subscriptions hand to their subscribers.

Invariant: an event counts when it is handed to the transport, as for plain subscriptions; what goes
back to its group unwritten does not. Must not know groups.
"""

from __future__ import annotations

from typing import Any

from penstock.api.consumers import Sink
from penstock.api.metrics import StreamCounts


class CountedSink:
    """A consumer's sink, in front of which the events are counted for the stream."""

    __slots__ = ("_counts", "_sink")

    def __init__(self, sink: Sink, counts: StreamCounts) -> None:
        self._sink = sink
        self._counts = counts

    def write(self, items: list[Any]) -> None:
        self._counts.delivered += len(items)
        self._sink.write(items)

    def end(self, reason: str) -> None:
        self._sink.end(reason)
