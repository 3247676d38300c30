"""Rules of streams: what may be published, how much fans out at once, and when a reader lags.

Must not know subscriptions or queues.
"""

from __future__ import annotations

import sys

from penstock.api.streams import StreamSettings
from penstock.model.errors import InvalidArgument, TooLarge
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_QUEUE_DEPTH, MAX_TXN_OPS, MIB, Limits
from penstock.model.streams import Publish

BURST_EVENTS = 256
"""Events of one stream that fan out before readers and other streams have their turn."""

BURST_BYTES = MIB

NEVER = sys.maxsize


def burst_events(settings: StreamSettings) -> int:
    """Returns at most what an empty buffer holds, so that a reader that keeps up loses nothing."""
    return min(BURST_EVENTS, settings.event_queue_depth)


def burst_bytes(settings: StreamSettings) -> int:
    return min(BURST_BYTES, settings.event_queue_bytes)


def check_publish(command: Publish, limits: Limits) -> int:
    """Raises unless the publish is within the limits. Returns the bytes of all payloads."""
    payloads = command.payloads
    if not 0 < len(payloads) <= MAX_BATCH_ITEMS:
        raise InvalidArgument(f"a publish has 1 to {MAX_BATCH_ITEMS} payloads, not {len(payloads)}")
    if len(command.invalidate) > MAX_TXN_OPS:
        raise TooLarge(f"a publish invalidates {MAX_TXN_OPS} keys at most")
    nbytes = sum(map(len, payloads))
    if nbytes > limits.max_message_bytes:
        largest = max(map(len, payloads))
        if largest > limits.max_message_bytes:
            raise TooLarge(
                f"a payload is {largest} bytes; max_message_bytes is {limits.max_message_bytes}"
            )
    return nbytes


def check_depth(event_queue_depth: int | None) -> None:
    """Raises if a subscriber asks for a buffer that is too large."""
    if event_queue_depth is not None and not 0 < event_queue_depth <= MAX_QUEUE_DEPTH:
        raise InvalidArgument(f"event_queue_depth must be between 1 and {MAX_QUEUE_DEPTH}")


def alert_bounds(lag_alert_events: int) -> tuple[int, int]:
    """Returns two bounds: the alert begins above the first and ends at the second. The second is
    half of the first, so that a reader at the limit does not cause an alert at every event."""
    if not lag_alert_events:
        return NEVER, NEVER
    return lag_alert_events, lag_alert_events // 2
