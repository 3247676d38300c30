"""Encodes rows of a partition, or of the journal, as a stream of bytes, in pieces.

Invariant: `head`, the pieces and `tail` of a form make one valid stream, in Arrow's IPC format or
as lines of JSON. A small sealed batch that is wanted whole is sent as it is on disk, after its
checksum was verified. A large one is cut by rows, so that no piece is much larger than PIECE_BYTES
unless a single row is. Blocking: runs on a thread, not on the event loop. Must not know which rows
are live, who reads, or how far readers are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import reduce
from typing import Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.access import VisibleTopics
from penstock.model.errors import InvalidArgument
from penstock.model.journal import JournalSelection
from penstock.model.limits import MIB
from penstock.model.ranges import PIECE_BYTES, RowBytes, Selection
from penstock.model.records import Stored
from penstock.storage.columns import SCHEMA, complete, to_batch
from penstock.storage.history_reader import StoredBatch, integers, row_at

STEP_ROWS = 512
"""Rows converted at a time. The thread that converts them blocks the event loop meanwhile."""

RAW_BYTES = 4 * MIB
"""A sealed batch up to this size is sent as it is on disk, since cutting it would cost more."""

EncodedRows = tuple[RowBytes, int]
"""Bytes of rows, and the offset or position where the following rows begin."""

_encode_lines = msgspec.json.Encoder().encode_lines


Ref = TypeVar("Ref", bound=StoredBatch, contravariant=True)


class SealedRows(Protocol[Ref]):
    """Reads sealed batches. Their rows have the columns of `schema` and are sorted by `order`."""

    schema: pa.Schema
    order: str

    def raw(self, ref: Ref, /) -> bytes:
        """Returns the batch as it is on disk: one message of an Arrow stream."""
        ...

    def batch(self, ref: Ref, /) -> pa.RecordBatch: ...


def may_want(selection: Selection, ref: StoredBatch) -> bool:
    """Returns False if no row of the batch is in the selected time range."""
    is_late = selection.to_ms is not None and ref.first_ts >= selection.to_ms
    return not is_late and (selection.from_ms is None or ref.last_ts >= selection.from_ms)


def schema_of(selection: Selection, schema: pa.Schema = SCHEMA) -> pa.Schema:
    """Returns the selected columns, in the schema's order."""
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
        column = batch.column(name)
        if name in selection.null_means:
            column = pc.fill_null(column, selection.null_means[name])
        batch = batch.filter(pc.equal(column, value))
    if isinstance(selection, JournalSelection) and selection.visible is not None:
        batch = _within(batch, selection, selection.visible)
    if selection.from_ms is not None:
        batch = batch.filter(pc.greater_equal(_times(batch), selection.from_ms * 1000))
    if selection.to_ms is not None:
        batch = batch.filter(pc.less(_times(batch), selection.to_ms * 1000))
    return batch.select(schema_of(selection, batch.schema).names)


def _within(
    batch: pa.RecordBatch, selection: JournalSelection, visible: VisibleTopics
) -> pa.RecordBatch:
    """Returns the rows of the journal whose topic or stream may be seen."""
    columns = {
        name: pc.fill_null(batch.column(name), null)
        for name, null in (*selection.null_means.items(), ("topic", ""), ("resource_kind", ""))
    }
    table = pa.table(columns)
    allowed = [
        row
        for row in table.group_by(list(columns)).aggregate([]).to_pylist()
        if row["topic"]
        and visible.includes(
            (row["tenant"], row["namespace"]), row["topic"], kind=row["resource_kind"]
        )
    ]
    wanted = pa.array([False] * batch.num_rows, pa.bool_())
    for row in allowed:
        same = (pc.equal(column, row[name]) for name, column in columns.items())
        wanted = pc.or_(wanted, reduce(pc.and_, same))
    return batch.filter(wanted)


def _is_everything(selection: Selection) -> bool:
    return selection == type(selection)()


class Form(Protocol):
    """A format of rows on the wire."""

    name: str

    def head(self, schema: pa.Schema) -> bytes: ...

    def body(self, batch: pa.RecordBatch) -> RowBytes: ...

    def tail(self) -> bytes: ...


class ArrowForm:
    name = "arrow"

    def head(self, schema: pa.Schema) -> bytes:
        return bytes(schema.serialize())

    def body(self, batch: pa.RecordBatch) -> RowBytes:
        # Not Arrow's own buffer: its allocator keeps memory that another thread frees.
        data: bytes = batch.serialize().to_pybytes()
        return data

    def tail(self) -> bytes:
        return b"\xff\xff\xff\xff\x00\x00\x00\x00"


class LineForm:
    """Lines of JSON: a row is an object with the columns that are not null. Times are RFC 3339."""

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
    """Returns unused memory of Arrow's allocator, which otherwise keeps tens of MiB after a thread
    has made many pieces and others have freed them."""
    pa.default_memory_pool().release_unused()


def sealed_piece(
    source: SealedRows[Ref], ref: Ref, start: int, end: int, selection: Selection, form: Form
) -> EncodedRows:
    """Returns the batch's rows from `start` to before `end`, as many as make a piece."""
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
    read: Callable[[], list[Stored]], stop: int, selection: Selection, form: Form
) -> EncodedRows:
    """Returns unsealed messages before `stop`. They are of one partition and in order."""
    messages = read()
    batches = []
    for first in range(0, len(messages), STEP_ROWS):
        batches.append(complete(to_batch(messages[first : first + STEP_ROWS])))
        _let_others_go()
    if not batches:
        return b"", stop
    return _encoded(pa.concat_batches(batches), selection, form), stop


def no_rows(stop: int) -> EncodedRows:
    """Returns a piece without rows. The following rows begin at `stop`."""
    return b"", stop


def _rows_within(batch: pa.RecordBatch, at: int, last: int, max_bytes: int) -> int:
    """Returns how many rows from `at` to before `last` fit into about `max_bytes`; at least one."""
    average: int = max(1, batch.nbytes // max(1, batch.num_rows))
    rows = min(last - at, max(1, max_bytes // average))
    while rows > 1 and batch.slice(at, rows).nbytes > 2 * max_bytes:
        rows //= 2
    return rows


def _encoded(batch: pa.RecordBatch, selection: Selection, form: Form) -> RowBytes:
    """Encodes the selected rows. Returns no bytes if there are none."""
    wanted = _selected(batch, selection)
    return form.body(wanted) if wanted.num_rows else b""


def _times(batch: pa.RecordBatch) -> pa.Array:
    return batch.column("timestamp").view(pa.int64())


def _without_nulls(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if value is not None}


def _let_others_go() -> None:
    time.sleep(0)
