"""Batches into pieces: every row once, in order, in bodies of a bounded size."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.spark.staging import RowPiece, cut

LIMIT = 10_000


def batch(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], names=["value"])


def contents(pieces: list[RowPiece]) -> list[str]:
    tables = [pa.ipc.open_stream(piece.body).read_all() for piece in pieces]
    assert [table.num_rows for table in tables] == [piece.rows for piece in pieces]
    return [value for table in tables for value in table.column("value").to_pylist()]


@pytest.mark.parametrize("size", [1, 100, 4_000, 9_999])
def test_every_row_is_in_one_piece_in_order(size: int):
    values = [f"{n}".rjust(size, ".") for n in range(300)]
    batches = [batch(*values[:5]), batch(*values[5:6]), batch(*values[6:])]
    pieces = list(cut(batches, LIMIT))
    assert contents(pieces) == values
    assert all(len(piece.body) <= 2 * LIMIT for piece in pieces)


def test_small_batches_share_a_piece():
    pieces = list(cut([batch("a"), batch("b"), batch("c")], LIMIT))
    assert [piece.rows for piece in pieces] == [3]


def test_many_tiny_batches_stay_below_the_limit_with_their_heads():
    values = [f"{n}" for n in range(1000)]
    pieces = list(cut(map(batch, values), LIMIT))
    assert contents(pieces) == values
    assert all(len(piece.body) <= 2 * LIMIT for piece in pieces)


def test_a_row_larger_than_a_piece_is_the_last_of_its_piece():
    large = "x" * (3 * LIMIT)
    pieces = list(cut([batch("a", large, "b")], LIMIT))
    assert contents(pieces) == ["a", large, "b"]
    assert [piece.rows for piece in pieces] == [2, 1]


def test_no_rows_are_no_pieces():
    assert list(cut([], LIMIT)) == []
    assert list(cut([batch("a").slice(1)], LIMIT)) == []


def test_a_slice_sends_its_own_rows_only():
    large = batch(*("v" * 1000 for _ in range(1000))).slice(500, 3)
    (piece,) = cut([large], LIMIT)
    assert piece.rows == 3
    assert len(piece.body) < LIMIT
