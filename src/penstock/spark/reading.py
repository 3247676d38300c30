"""Slices of a log as record batches. Runs on the executors.

Invariant: every row of a slice once and in order, or an error. A read that breaks off goes on
behind the last row it gave, and a broker that is away is waited for. Must not know how slices came
about.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.model.errors import NotFound, OutOfRange, PenstockError
from penstock.spark.broker import Broker
from penstock.spark.logs import log_of, span_of
from penstock.spark.losses import Losses
from penstock.spark.options import SourceSettings
from penstock.spark.planning import TaskSlice
from penstock.spark.schemas import Shape, asked_of_broker


@dataclass(frozen=True)
class RowRequest:
    """What every slice of a read is asked for; `filters` are parameters of the broker's ranges."""

    settings: SourceSettings
    schema: StructType
    filters: Mapping[str, str | int] = field(default_factory=dict)

    def query(self, one: TaskSlice, at: int) -> dict[str, str | int]:
        columns = asked_of_broker(self.settings.log, self.schema)
        chosen = {"columns": ",".join(columns)} if columns else {}
        if self.settings.log == "records":
            # Nulls are made here: sent, they would be about half of all bytes.
            chosen["nulls"] = "omit"
        return one.place.between(at, one.end) | chosen | dict(self.filters)


def read(request: RowRequest, todo: tuple[TaskSlice, ...]) -> Iterator[pa.RecordBatch]:
    _spare_the_collector()
    with Broker(request.settings) as broker:
        for one in todo:
            yield from _read_slice(broker, request, one)


def _read_slice(broker: Broker, request: RowRequest, one: TaskSlice) -> Iterator[pa.RecordBatch]:
    place = one.place
    shape = Shape(request.settings.log, request.schema, place.topic, place.partition)
    patience = broker.patience()
    at = one.start
    while at < one.end:
        try:
            with broker.rows(place.rows_path, request.query(one, at)) as stream:
                for batch in stream:
                    if batch.num_rows:
                        at = shape.last_position(batch) + 1
                        patience.renew()
                        yield shape.fit(batch)
            return
        except (OutOfRange, NotFound) as error:
            at = _behind_loss(broker, request.settings, one, at, error)
        except PenstockError as error:
            patience.bear(error)


def _behind_loss(
    broker: Broker, settings: SourceSettings, one: TaskSlice, at: int, error: PenstockError
) -> int:
    """Where to go on, if the loss may be passed over."""
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
    # Of what has taken the place of the slice nothing is read: the next batch begins there.
    return start if end == one.end else one.end


@functools.cache
def _spare_the_collector() -> None:
    """Once in a worker. Spark's workers collect garbage after every task, and looking through all
    the modules that are loaded takes longer than reading some 100,000 rows."""
    gc.freeze()
