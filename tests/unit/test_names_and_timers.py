"""Two structures that must not grow with what passes through them."""

from __future__ import annotations

from typing import Any

from penstock.core.groups import Unfinished
from penstock.engine.leases import DeliveryLease, Timers
from penstock.model import names
from penstock.model.names import clean_name

HOUR_MS = 3600 * 1000


def entry(offset: int) -> DeliveryLease:
    progress: Any = None
    return DeliveryLease(Unfinished(progress, offset, 0, None, ""))


def test_a_padded_name_is_cleaned_and_not_remembered() -> None:
    """driftq-69: a megabyte of blanks around a name would stay in memory."""
    names._remembered.cache_clear()
    for padding in (200, 10_000, 1_000_000):
        for side in (" " * padding + "orders", "orders" + " " * padding):
            assert clean_name(side, "topic") == "orders"
    assert names._remembered.cache_info().currsize == 0
    assert clean_name(" orders ", "topic") == "orders"
    assert names._remembered.cache_info().currsize == 1


def test_times_that_were_cleared_leave_nothing_behind_a_far_one() -> None:
    """driftq-69: one message is out for hours, and a hundred thousand others are acked."""
    timers = Timers()
    far = entry(0)
    timers.set(far, HOUR_MS)
    for n in range(1, 100_001):
        acked = entry(n)
        timers.set(acked, HOUR_MS + 10 * n)
        timers.clear(acked)
    assert len(timers._buckets) == 1
    assert len(timers._ticks) < 2000
    assert timers.next_ms() == HOUR_MS
    assert timers.due(3 * HOUR_MS) == [far]
    assert timers.next_ms() is None
    assert not timers._buckets
    assert not timers._ticks


def test_a_time_set_again_leaves_no_empty_bucket() -> None:
    timers = Timers()
    one = entry(0)
    for n in range(1000):
        timers.set(one, HOUR_MS + 10 * n)
    assert len(timers._buckets) == 1
    assert timers.next_ms() == HOUR_MS + 9990
    assert timers.due(HOUR_MS + 9980) == []
    assert timers.due(HOUR_MS + 9990) == [one]
