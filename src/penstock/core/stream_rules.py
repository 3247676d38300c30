"""The rules of streams: how one is set, what may be published to it, when a reader lags."""

from __future__ import annotations

import sys

import msgspec

from penstock.model.errors import InvalidArgument, TooLarge
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_QUEUE_DEPTH, MAX_TXN_OPS, MIB, Limits
from penstock.model.streams import Publish
from penstock.model.tenancy import StreamConfig

BURST_EVENTS = 256
"""Events of one stream that fan out before its subscribers and other streams have their turn."""

BURST_BYTES = MIB

NEVER = sys.maxsize


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream behaves: its own configuration, and the broker's limits where that is silent."""

    event_queue_depth: int
    event_queue_bytes: int
    pub_queue_depth: int
    publish_queue_wait_timeout_ms: int
    lag_alert_events: int
    disconnect_slow_ms: int

    @property
    def burst_events(self) -> int:
        """No more than an empty buffer holds: who takes whenever it is woken loses nothing."""
        return min(BURST_EVENTS, self.event_queue_depth)

    @property
    def burst_bytes(self) -> int:
        return min(BURST_BYTES, self.event_queue_bytes)


def settings_of(config: StreamConfig, limits: Limits) -> StreamSettings:
    def chosen(own: int | None, brokers: int) -> int:
        return brokers if own is None else own

    return StreamSettings(
        event_queue_depth=chosen(config.event_queue_depth, limits.event_queue_depth),
        event_queue_bytes=chosen(config.event_queue_bytes, limits.event_queue_bytes),
        pub_queue_depth=chosen(config.pub_queue_depth, limits.pub_queue_depth),
        publish_queue_wait_timeout_ms=chosen(
            config.publish_queue_wait_timeout_ms, limits.publish_queue_wait_timeout_ms
        ),
        lag_alert_events=chosen(config.lag_alert_events, limits.lag_alert_events),
        disconnect_slow_ms=chosen(config.disconnect_slow_ms, limits.disconnect_slow_ms),
    )


def check_publish(command: Publish, limits: Limits) -> int:
    """Refuses what no stream takes; the bytes of all payloads."""
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
    """Refuses a buffer that a subscriber may not ask for."""
    if event_queue_depth is not None and not 0 < event_queue_depth <= MAX_QUEUE_DEPTH:
        raise InvalidArgument(f"event_queue_depth must be between 1 and {MAX_QUEUE_DEPTH}")


def alert_bounds(lag_alert_events: int) -> tuple[int, int]:
    """The alert begins with more events behind than the first, and ends with no more than the
    second. It is half of it, so that a reader on the edge does not ring at every event."""
    if not lag_alert_events:
        return NEVER, NEVER
    return lag_alert_events, lag_alert_events // 2
