"""A histogram of seconds; an observation costs one bisect."""

from __future__ import annotations

from bisect import bisect_left

from penstock.api.metrics import HistogramCounts

BOUNDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    2.5,
    10.0,
)


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(BOUNDS, list(self.counts), self.total)
