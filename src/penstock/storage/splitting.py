"""Cuts a range of rows into splits, by what is known of its pieces without reading their rows.

A piece is a run of rows that is stored together: a sealed batch, or a chunk of what is not sealed.
Invariant: splits are neighbours and in order, each has at least one row and at most as many as
asked for, and together they have every row below their end once. A piece is kept whole where it
fits into a split. Where it is cut, its positions are asked for, which may read a file. Must not
know what the rows are: messages of a partition and events of the journal are cut alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from penstock.model.splits import Split, Splits


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`rows` rows, the first and last of which are at these positions. `positions` gives the
    positions of all of them, rising."""

    first: int
    last: int
    rows: int
    positions: Callable[[], Sequence[int]]


def split(
    pieces: Iterable[Piece], start: int, end: int, rows: int, max_rows: int, max_splits: int
) -> Splits:
    """The range from `start` to before `end` in splits of at most `rows` rows; no more than
    `max_rows` and `max_splits` in all. Pieces are in order, and may go beyond the range."""
    cut = _Cut(start, rows, max_rows, max_splits)
    for run in _within(pieces, start, end):
        if not cut.takes(run):
            return cut.ended(cut.stopped_at)
    return cut.ended(end)


class _Run:
    """The rows of a piece that are in the range: `count` of them, from the piece's row `skip`."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._known: Sequence[int] | None = None
        self._skip = 0
        self.count = piece.rows

    def clip(self, start: int, end: int) -> None:
        """Only a piece that an end of the range cuts is asked for its positions."""
        piece = self._piece
        stop = bisect_left(self._positions(), end) if piece.last >= end else piece.rows
        if piece.first < start:
            self._skip = bisect_left(self._positions(), start)
        self.count = stop - self._skip

    def at(self, row: int) -> int:
        """The position of one of its rows."""
        index = self._skip + row
        return self._positions()[index] if index else self._piece.first

    def _positions(self) -> Sequence[int]:
        if self._known is None:
            self._known = self._piece.positions()
        return self._known


class _Cut:
    """Grows the last split until it is full, and begins another, until there are enough."""

    def __init__(self, start: int, rows: int, max_rows: int, max_splits: int) -> None:
        self.stopped_at = start
        self._splits: list[Split] = []
        self._start = start
        self._open_rows = 0
        self._rows = rows
        self._rows_left = max_rows
        self._splits_left = max_splits

    def takes(self, run: _Run) -> bool:
        """Takes the run in. False when it stopped before the run's end, at `stopped_at`."""
        taken = 0
        while taken < run.count:
            left = min(run.count - taken, self._rows_left)
            room = self._rows - self._open_rows
            # What would fit into a split of its own is not cut to fill up another.
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

    def ended(self, end: int) -> Splits:
        if self._open_rows:
            self._close(end)
        return Splits(self._splits, end)

    def _close(self, end: int) -> None:
        self._splits.append(Split(self._start, end, self._open_rows))
        self._splits_left -= 1
        self._start, self._open_rows = end, 0


def _within(pieces: Iterable[Piece], start: int, end: int) -> Iterator[_Run]:
    for piece in pieces:
        if piece.first >= end:
            return
        if piece.last >= start:
            run = _Run(piece)
            run.clip(start, end)
            yield run
