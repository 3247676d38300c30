"""Encodes the entries of a cache as rows, in pieces.

Blocking: runs on a thread, not on the event loop, and stops often to let the loop run. Must not
know which entries a cache has now: it gets those of one moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from penstock.core.cache import CacheEntry
from penstock.model.ranges import PIECE_BYTES
from penstock.storage.row_stream import STEP_ROWS, EncodedRows, Form

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.binary()),
        ("version", pa.int64()),
        ("expires_at", pa.timestamp("us", "UTC")),
    ]
)

PIECE_ENTRIES = 32_768
"""The most entries of a piece; it has fewer if they are large."""

Entries = tuple[Sequence[str], Sequence[CacheEntry]]
"""The keys of a cache, and the entry of each."""


def entry_piece(
    entries: Entries, at: int, end: int, now_ms: int, columns: Sequence[str], form: Form
) -> EncodedRows:
    """Returns entries from `at` to before `end`, as many as make a piece. Leaves out those that
    have expired."""
    keys, values = entries
    batches: list[pa.RecordBatch] = []
    start, nbytes = at, 0
    while at < end and at - start < PIECE_ENTRIES and nbytes < PIECE_BYTES:
        taken, found = _step(keys, values, at, end, now_ms)
        at += taken
        if found.num_rows:
            batches.append(found)
            nbytes += found.nbytes
        time.sleep(0)
    if not batches:
        return b"", at
    return form.body(pa.concat_batches(batches).select(columns)), at


def _step(
    keys: Sequence[str], values: Sequence[CacheEntry], at: int, end: int, now_ms: int
) -> tuple[int, pa.RecordBatch]:
    """Returns how many entries it looked at, and those that live: some, or a few large ones."""
    found: list[tuple[str, CacheEntry]] = []
    taken = nbytes = 0
    while at + taken < end and taken < STEP_ROWS and nbytes < PIECE_BYTES:
        key, entry = keys[at + taken], values[at + taken]
        taken += 1
        if not 0 < entry.ends() <= now_ms:
            found.append((key, entry))
            nbytes += len(entry.value)
    times = [entry.ends() * 1000 if entry.expires else None for _, entry in found]
    columns = [
        pa.array([key for key, _ in found], pa.string()),
        pa.array([entry.value for _, entry in found], pa.binary()),
        pa.array([entry.version for _, entry in found], pa.int64()),
        pa.array(times, pa.int64()).view(SCHEMA.field("expires_at").type),
    ]
    return taken, pa.record_batch(columns, schema=SCHEMA)
