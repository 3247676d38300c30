"""Splits have every row once, are cut as asked, and read rows only where they must."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.splits import Split, Splits
from penstock.storage.splitting import StoredRun, split

MANY = 10**9


class Stored:
    """Pieces of the given positions, and which of them were read."""

    def __init__(self, *pieces: Sequence[int]) -> None:
        self.read: list[int] = []
        self.pieces = [self._piece(index, list(held)) for index, held in enumerate(pieces)]
        self.positions = [position for held in pieces for position in held]

    def _piece(self, index: int, held: list[int]) -> StoredRun:
        def positions() -> Sequence[int]:
            self.read.append(index)
            return held

        return StoredRun(held[0], held[-1], len(held), positions)

    def split(
        self, start: int, end: int, rows: int, max_rows: int = MANY, max_splits: int = MANY
    ) -> Splits:
        return split(self.pieces, start, end, rows, max_rows, max_splits)

    def count(self, start: int, end: int) -> int:
        return bisect_left(self.positions, end) - bisect_left(self.positions, start)


def ranges(found: Splits) -> list[tuple[int, int, int]]:
    return [(each.start, each.end, each.rows) for each in found.splits]


def test_whole_runs_are_joined_without_reading_them():
    stored = Stored([0, 2, 4], [5, 7], [8, 9, 11, 13])
    assert ranges(stored.split(0, 14, 5)) == [(0, 8, 5), (8, 14, 4)]
    assert stored.read == []


def test_a_run_that_fits_into_a_split_is_not_cut():
    stored = Stored([0, 1, 2], [3, 4, 5], [6, 7, 8])
    assert ranges(stored.split(0, 9, 5)) == [(0, 3, 3), (3, 6, 3), (6, 9, 3)]
    assert stored.read == []


def test_a_run_that_is_too_large_is_cut_and_read_once():
    stored = Stored([0, 1], range(10, 30, 2), [40])
    assert ranges(stored.split(0, 50, 4)) == [(0, 14, 4), (14, 22, 4), (22, 40, 4), (40, 50, 1)]
    assert stored.read == [1]


def test_ranges_without_rows_belong_to_a_neighbour():
    stored = Stored([10], [20], [30])
    assert ranges(stored.split(0, 100, 1)) == [(0, 20, 1), (20, 30, 1), (30, 100, 1)]


def test_a_range_without_rows_has_no_splits_and_is_covered():
    assert Stored([0], [50]).split(10, 40, 5) == Splits([], 40)
    assert Stored().split(7, 7, 5) == Splits([], 7)


def test_the_range_cuts_the_runs_at_its_ends():
    stored = Stored([0, 2, 4], [6, 8], [10, 12, 14])
    assert ranges(stored.split(3, 11, 100)) == [(3, 11, 4)]
    assert stored.read == [0, 2]


def test_max_rows_is_exact_and_next_says_where_to_continue():
    stored = Stored([0, 2, 4], [6, 8, 10])
    found = stored.split(0, 11, 3, max_rows=4)
    assert found == Splits([Split(0, 6, 3), Split(6, 8, 1)], 8)
    assert ranges(stored.split(found.next, 11, 3)) == [(8, 11, 2)]


def test_max_rows_equal_to_all_rows_covers_the_range():
    assert Stored([0, 2]).split(0, 9, 5, max_rows=2) == Splits([Split(0, 9, 2)], 9)


def test_max_splits_end_the_answer():
    stored = Stored(range(10))
    assert stored.split(0, 10, 1, max_splits=3) == Splits(
        [Split(0, 1, 1), Split(1, 2, 1), Split(2, 3, 1)], 3
    )


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    positions = sorted(draw(st.sets(st.integers(0, 60), max_size=40)))
    cuts = sorted(draw(st.sets(st.integers(1, 39), max_size=6)))
    edges = [0, *(cut for cut in cuts if cut < len(positions)), len(positions)]
    held = [positions[a:b] for a, b in pairwise(edges)]
    return Stored(*(piece for piece in held if piece))


@settings(max_examples=500, deadline=None)
@given(
    stores(),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 8),
)
def test_splits_have_every_row_once_and_respect_every_limit(
    stored: Stored, start: int, length: int, rows: int, max_rows: int, max_splits: int
):
    end = start + length
    found = stored.split(start, end, rows, max_rows, max_splits)
    at, total = start, 0
    for each in found.splits:
        assert each.start == at < each.end
        assert each.rows == stored.count(each.start, each.end)
        assert 1 <= each.rows <= rows
        at, total = each.end, total + each.rows
    assert len(found.splits) <= max_splits
    assert total <= max_rows
    assert start <= found.next <= end
    assert found.next == at or not found.splits
    wanted = stored.count(start, end)
    if found.next < end:
        assert total == max_rows or len(found.splits) == max_splits
        assert stored.count(start, found.next) == total
        assert wanted > total
    else:
        assert total == wanted
    if len(found.splits) < max_splits:
        assert total == min(max_rows, wanted)
    for one, two in pairwise(found.splits):
        assert one.rows + two.rows > rows, "two splits could have been one"
