"""Cuts batches of rows into pieces of about the same size, however large or small the batches are.

Invariant: the pieces hold every row once, in order. A piece is no larger than twice `limit`, or
`limit` and one row. Must not know where pieces go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

PIECE_BYTES = 8 << 20
"""Far below the largest body that a broker accepts, and large enough that one sync for each piece
costs little."""


class RowPiece(NamedTuple):
    """Rows as the bytes of an Arrow IPC stream."""

    rows: int
    body: bytes


def cut(batches: Iterable[pa.RecordBatch], limit: int = PIECE_BYTES) -> Iterator[RowPiece]:
    """Yields the rows as Arrow IPC streams. All batches have the schema of the first; empty batches
    are left out."""
    open_piece: _OpenPiece | None = None
    for batch in batches:
        for part in _no_larger_than(limit, batch):
            open_piece = open_piece or _OpenPiece(part.schema)
            if open_piece.add(part) >= limit:
                yield open_piece.close()
                open_piece = None
    if open_piece is not None:
        yield open_piece.close()


class _OpenPiece:
    """Counts the bytes written, not the bytes of the rows: of many small batches, most bytes are
    headers."""

    def __init__(self, schema: pa.Schema) -> None:
        self._out = pa.BufferOutputStream()
        self._stream = pa.ipc.new_stream(self._out, schema)
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> int:
        """Returns the bytes written so far."""
        self._stream.write_batch(batch)
        self._rows += batch.num_rows
        return int(self._out.tell())

    def close(self) -> RowPiece:
        self._stream.close()
        return RowPiece(self._rows, self._out.getvalue().to_pybytes())


def _no_larger_than(limit: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    if batch.nbytes <= limit or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _no_larger_than(limit, batch.slice(0, half))
    yield from _no_larger_than(limit, batch.slice(half))
