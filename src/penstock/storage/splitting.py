"""Cuts a range of rows into splits, mostly without reading the rows.

Rows are given as stored runs: a sealed batch, or a chunk that is not sealed. Invariant: splits are
in order and without gaps, each has at least one row and at most as many as asked for, and together
they hold every row below their end once. A run that fits into a split is not cut. Where a run is
cut, its positions are needed, which may read a file. Must not know what the rows are: messages of a
partition and events of the journal are cut in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from penstock.model.splits import Split, Splits


class StoredRun(msgspec.Struct, frozen=True, gc=False):
    """`rows` rows that are stored together, from position `first` to `last`. `positions` returns
    the positions of all of them, in order."""

    first: int
    last: int
    rows: int
    positions: Callable[[], Sequence[int]]


def split(
    runs: Iterable[StoredRun], start: int, end: int, rows: int, max_rows: int, max_splits: int
) -> Splits:
    """Cuts the range from `start` to before `end` into splits of at most `rows` rows. Returns at
    most `max_rows` rows and `max_splits` splits. `runs` are in order and may exceed the range."""
    builder = _SplitBuilder(start, rows, max_rows, max_splits)
    for run in _within(runs, start, end):
        if not builder.add(run):
            return builder.finish(builder.stopped_at)
    return builder.finish(end)


class _ClippedRun:
    """The `count` rows of a stored run that are in the range, from its row `_skip` on."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._known: Sequence[int] | None = None
        self._skip = 0
        self.count = run.rows

    def clip(self, start: int, end: int) -> None:
        """Limits the run to the range. Needs its positions only if the range cuts it."""
        run = self._run
        stop = bisect_left(self._positions(), end) if run.last >= end else run.rows
        if run.first < start:
            self._skip = bisect_left(self._positions(), start)
        self.count = stop - self._skip

    def at(self, row: int) -> int:
        """Returns the position of a row."""
        index = self._skip + row
        return self._positions()[index] if index else self._run.first

    def _positions(self) -> Sequence[int]:
        if self._known is None:
            self._known = self._run.positions()
        return self._known


class _SplitBuilder:
    """Fills one split after another until there are enough."""

    def __init__(self, start: int, rows: int, max_rows: int, max_splits: int) -> None:
        self.stopped_at = start
        self._splits: list[Split] = []
        self._start = start
        self._open_rows = 0
        self._rows = rows
        self._rows_left = max_rows
        self._splits_left = max_splits

    def add(self, run: _ClippedRun) -> bool:
        """Adds the run. Returns False if the limits were reached within it, at `stopped_at`."""
        taken = 0
        while taken < run.count:
            left = min(run.count - taken, self._rows_left)
            room = self._rows - self._open_rows
            # Rows that would fit into a split of their own are not cut to fill up another.
            if self._open_rows and (not room or room < left <= self._rows):
                self._close(run.at(taken))
                room = self._rows
            if not left or not self._splits_left:
                self.stopped_at = run.at(taken)
                return False
            count = min(left, room)
            self._open_rows += count
            self._rows_left -= count
            taken += count
        return True

    def finish(self, end: int) -> Splits:
        if self._open_rows:
            self._close(end)
        return Splits(self._splits, end)

    def _close(self, end: int) -> None:
        self._splits.append(Split(self._start, end, self._open_rows))
        self._splits_left -= 1
        self._start, self._open_rows = end, 0


def _within(runs: Iterable[StoredRun], start: int, end: int) -> Iterator[_ClippedRun]:
    for run in runs:
        if run.first >= end:
            return
        if run.last >= start:
            clipped = _ClippedRun(run)
            clipped.clip(start, end)
            yield clipped
