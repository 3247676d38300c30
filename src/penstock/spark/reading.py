"""Reads slices of a log as record batches. Runs on the executors.

Invariant: every row of a slice is read once and in order, or an error is raised. A read that breaks
off continues after the last row it yielded, and waits for a broker that is away. Must not know how
slices were planned.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.model.errors import NotFound, OutOfRange, PenstockError
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import log_of, span_of
from penstock.spark.losses import Losses
from penstock.spark.options import SourceSettings
from penstock.spark.planning import TaskSlice
from penstock.spark.schemas import Shape, requested_columns


@dataclass(frozen=True)
class RowRequest:
    """The query for every slice of a read. `filters` are query parameters of range routes."""

    settings: SourceSettings
    schema: StructType
    filters: Mapping[str, str | int] = field(default_factory=dict)

    def query(self, one: TaskSlice, at: int) -> dict[str, str | int]:
        columns = requested_columns(self.settings.log, self.schema)
        chosen = {"columns": ",".join(columns)} if columns else {}
        if self.settings.log == "records":
            # Null columns are made here. Sent, they would be about half of all bytes.
            chosen["nulls"] = "omit"
        return one.place.between(at, one.end) | chosen | dict(self.filters)


def read(request: RowRequest, todo: tuple[TaskSlice, ...]) -> Iterator[pa.RecordBatch]:
    _freeze_loaded_modules()
    with BrokerConnection(request.settings) as broker:
        for one in todo:
            yield from _read_slice(broker, request, one)


def _read_slice(
    broker: BrokerConnection, request: RowRequest, one: TaskSlice
) -> Iterator[pa.RecordBatch]:
    place = one.place
    shape = Shape(request.settings.log, request.schema, place.topic, place.partition)
    retry_time = broker.retry_time()
    at = one.start
    while at < one.end:
        try:
            with broker.rows(place.rows_path, request.query(one, at)) as stream:
                for batch in stream:
                    if batch.num_rows:
                        at = shape.last_position(batch) + 1
                        retry_time.renew()
                        yield shape.fit(batch)
            return
        except (OutOfRange, NotFound) as error:
            at = _position_after_loss(broker, request.settings, one, at, error)
        except PenstockError as error:
            retry_time.wait_after(error)


def _position_after_loss(
    broker: BrokerConnection,
    settings: SourceSettings,
    one: TaskSlice,
    at: int,
    error: PenstockError,
) -> int:
    """Returns where to continue, if the settings allow rows to be lost."""
    losses = Losses.of(settings)
    try:
        spans = log_of(broker, settings).spans(one.place.topic)
    except NotFound:
        losses.deleted(str(one.place))
        return one.end
    span = span_of(spans, one.place)
    if span is None:
        losses.replaced(one.place.topic, {one.place: at})
        return one.end
    start, end = losses.between(one.place, at, one.end, span)
    if (start, end) == (at, one.end):
        raise error
    # Rows that replaced those of the slice are read by the next batch.
    return start if end == one.end else one.end


@functools.cache
def _freeze_loaded_modules() -> None:
    """Keeps loaded modules out of garbage collections, which Spark's workers make after every task:
    to visit all modules takes longer than to read 100,000 rows."""
    gc.freeze()
