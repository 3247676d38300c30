"""Rows of a partition, or of the journal, as a stream of bytes, in pieces that are read off the
loop.

Invariant: `head`, the pieces and `tail` of a form are together one stream, in Arrow's IPC format or
as lines of JSON. A sealed batch that is wanted whole leaves as it is on disk, after its checksum
was found to hold, if it is small; a large one is cut by rows, so that no piece is much larger than
PIECE_BYTES unless a single row is. Blocking. Must not know what is live, who reads, or how far
they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MIB
from penstock.model.ranges import PIECE_BYTES, RowBytes, Selection
from penstock.model.records import Message
from penstock.storage.columns import SCHEMA, complete, to_batch
from penstock.storage.history_reader import integers, row_at

STEP_ROWS = 512
"""Rows converted in one go: a thread that does so holds up the loop meanwhile."""

RAW_BYTES = 4 * MIB
"""A sealed batch up to this size is sent as it is on disk; cutting it would cost more."""

Rows = tuple[RowBytes, int]
"""Rows in their form, and where those behind them begin: an offset, or a position."""

_encode_lines = msgspec.json.Encoder().encode_lines


class SealedBatch(Protocol):
    """Of the rows of a batch: the first and the last by what they rise by, and the least and the
    greatest time in ms."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...

    @property
    def first_ts(self) -> int: ...

    @property
    def last_ts(self) -> int: ...

    @property
    def length(self) -> int: ...


Ref = TypeVar("Ref", bound=SealedBatch, contravariant=True)


class SealedRows(Protocol[Ref]):
    """Reads sealed batches, whose rows have the columns of `schema` and rise by `order`."""

    schema: pa.Schema
    order: str

    def raw(self, ref: Ref, /) -> bytes:
        """The batch as it is on disk: one message of an Arrow stream."""
        ...

    def batch(self, ref: Ref, /) -> pa.RecordBatch: ...


def may_want(selection: Selection, ref: SealedBatch) -> bool:
    """Could a row of the batch be wanted, by its times?"""
    is_late = selection.to_ms is not None and ref.first_ts >= selection.to_ms
    return not is_late and (selection.from_ms is None or ref.last_ts >= selection.from_ms)


def schema_of(selection: Selection, schema: pa.Schema = SCHEMA) -> pa.Schema:
    """The columns in the schema's order, whatever the order they were asked for in."""
    wanted = set(selection.columns)
    unknown = wanted - set(schema.names)
    if unknown:
        raise InvalidArgument(
            f"unknown columns {', '.join(sorted(unknown))}; there are {', '.join(schema.names)}"
        )
    return pa.schema([field for field in schema if not wanted or field.name in wanted])


def _selected(batch: pa.RecordBatch, selection: Selection) -> pa.RecordBatch:
    if _is_everything(selection):
        return batch
    for name, value in selection.texts().items():
        batch = batch.filter(pc.equal(batch.column(name), value))
    if selection.from_ms is not None:
        batch = batch.filter(pc.greater_equal(_times(batch), selection.from_ms * 1000))
    if selection.to_ms is not None:
        batch = batch.filter(pc.less(_times(batch), selection.to_ms * 1000))
    return batch.select(schema_of(selection, batch.schema).names)


def _is_everything(selection: Selection) -> bool:
    return selection == type(selection)()


class Form(Protocol):
    """How rows look on the wire."""

    name: str

    def head(self, schema: pa.Schema) -> bytes: ...

    def body(self, batch: pa.RecordBatch) -> RowBytes: ...

    def tail(self) -> bytes: ...


class ArrowForm:
    name = "arrow"

    def head(self, schema: pa.Schema) -> bytes:
        return bytes(schema.serialize())

    def body(self, batch: pa.RecordBatch) -> RowBytes:
        # Not Arrow's own buffer: what one thread allocates there and another lets go of stays with
        # the process.
        data: bytes = batch.serialize().to_pybytes()
        return data

    def tail(self) -> bytes:
        return b"\xff\xff\xff\xff\x00\x00\x00\x00"


class LineForm:
    """A row is an object of its columns that are not null; a time is RFC 3339."""

    name = "ndjson"

    def head(self, schema: pa.Schema) -> bytes:
        return b""

    def body(self, batch: pa.RecordBatch) -> RowBytes:
        lines = []
        for first in range(0, batch.num_rows, STEP_ROWS):
            rows = batch.slice(first, STEP_ROWS).to_pylist(maps_as_pydicts="strict")
            lines.append(_encode_lines([_without_nulls(row) for row in rows]))
            _let_others_go()
        return b"".join(lines)

    def tail(self) -> bytes:
        return b""


FORMS: dict[str, Form] = {form.name: form for form in (ArrowForm(), LineForm())}


def release_memory() -> None:
    """For a thread that has made many pieces. Others let them go, and Arrow's allocator then keeps
    tens of MiB in which there is nothing."""
    pa.default_memory_pool().release_unused()


def sealed_piece(
    source: SealedRows[Ref], ref: Ref, start: int, end: int, selection: Selection, form: Form
) -> Rows:
    """The batch's rows from `start` on, and before `end`, as many as make a piece."""
    is_whole = start <= ref.first and ref.last < end
    is_small = ref.length <= RAW_BYTES
    if is_whole and is_small and form.name == "arrow" and _is_everything(selection):
        return source.raw(ref), end
    batch = source.batch(ref)
    at, last = row_at(batch, start, source.order), row_at(batch, end, source.order)
    columns = batch.select(schema_of(selection, batch.schema).names)
    found: list[RowBytes] = []
    left = PIECE_BYTES
    while at < last and left > 0:
        rows = _rows_within(columns, at, last, left)
        data = _encoded(batch.slice(at, rows), selection, form)
        at += rows
        if data:
            found.append(data)
            left -= len(data)
        _let_others_go()
    next_ = integers(batch, source.order, "q")[at] if at < last else end
    return found[0] if len(found) == 1 else b"".join(found), next_


def message_piece(
    read: Callable[[], list[Message]], stop: int, selection: Selection, form: Form
) -> Rows:
    """Messages up to `stop` that are not sealed yet; they are of one partition and in order."""
    messages = read()
    batches = []
    for first in range(0, len(messages), STEP_ROWS):
        batches.append(complete(to_batch(messages[first : first + STEP_ROWS])))
        _let_others_go()
    if not batches:
        return b"", stop
    return _encoded(pa.concat_batches(batches), selection, form), stop


def no_rows(stop: int) -> Rows:
    """A piece without rows; those behind it begin at `stop`."""
    return b"", stop


def _rows_within(batch: pa.RecordBatch, at: int, last: int, max_bytes: int) -> int:
    """How many rows from `at` on, and before `last`, have `max_bytes` or less; one at least."""
    average: int = max(1, batch.nbytes // max(1, batch.num_rows))
    rows = min(last - at, max(1, max_bytes // average))
    while rows > 1 and batch.slice(at, rows).nbytes > 2 * max_bytes:
        rows //= 2
    return rows


def _encoded(batch: pa.RecordBatch, selection: Selection, form: Form) -> RowBytes:
    """Nothing for no rows."""
    wanted = _selected(batch, selection)
    return form.body(wanted) if wanted.num_rows else b""


def _times(batch: pa.RecordBatch) -> pa.Array:
    return batch.column("timestamp").view(pa.int64())


def _without_nulls(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if value is not None}


def _let_others_go() -> None:
    time.sleep(0)
