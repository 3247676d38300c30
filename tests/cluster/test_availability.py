"""A key stands still only while the store could be read, and only since it was seen."""

from __future__ import annotations

from penstock.cluster.availability import Standstill, StoreAvailability


def test_time_before_a_key_was_seen_does_not_count() -> None:
    """A watch tells of a renewal just before the next answer of the store."""
    now_ms = 0
    availability = StoreAvailability(750)
    standstill = Standstill(availability, lambda: now_ms)
    availability.answered(now_ms)
    now_ms = 450
    standstill.seen(7)
    for now_ms in (500, 1000, 1500):
        availability.answered(now_ms)
    assert standstill.lasted_ms(7) == 1050


def test_time_without_answers_does_not_count() -> None:
    now_ms = 0
    availability = StoreAvailability(750)
    standstill = Standstill(availability, lambda: now_ms)
    availability.answered(now_ms)
    standstill.seen(7)
    for now_ms in (500, 2000, 2500):
        availability.answered(now_ms)
    assert standstill.lasted_ms(7) == 1000
