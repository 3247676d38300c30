"""The sink: a DataFrame's rows into topics or a cache, each once, in batch and streaming writes.

Who runs what: Spark makes a writer on the driver, for every batch anew, and sends a copy to each
task; `write` runs there, `commit` and `abort` run on the driver in a process of their own. So a
writer keeps nothing between calls, and the schema is refused before a task has started.

A batch is named by its producer and its number. Streaming: the producer is the option `producerId`
or the query's id, which lives in the checkpoint; Spark tells tasks both in properties. Batch: the
producer is the option `txn`, or a name of its own, and the number the option `txnBatch`, or 0 for a
producer that writes no other.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.model.errors import FailedPrecondition, Internal, InvalidArgument, PenstockError
from penstock.spark.broker import Broker
from penstock.spark.options import SinkSettings
from penstock.spark.pieces import cut
from penstock.spark.sink_columns import as_sent, check_for_cache, check_for_topics
from penstock.spark.staging import ALREADY, Staged, Staging

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Properties of a streaming query's tasks; the first is the same after every restart."""

log = logging.getLogger(__name__)


class BatchSink(DataSourceArrowWriter):
    """df.write.format("penstock").mode("append")"""

    def __init__(self, settings: SinkSettings, schema: StructType, overwrite: bool) -> None:
        _check(settings, schema)
        if overwrite:
            raise InvalidArgument(
                "the sink only adds: use mode('append'). To start over, delete the topic or the "
                "cache's entries first"
            )
        self._settings = settings
        self._producer = settings.txn or f"spark-{uuid.uuid4()}"
        self._batch = settings.txn_batch or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _stage(self._settings, self._producer, self._batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        is_only = self._settings.txn_batch is None
        with Broker(self._settings) as broker:
            staging = Staging(broker, self._producer, self._batch)
            staging.commit(_staged(messages), once=is_only)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _drop(self._settings, self._producer, self._batch)


class StreamSink(DataSourceStreamArrowWriter):
    """df.writeStream.format("penstock")"""

    def __init__(self, settings: SinkSettings, schema: StructType, overwrite: bool) -> None:
        _check(settings, schema)
        if overwrite:
            raise InvalidArgument(
                "the sink only adds, and outputMode('complete') replaces everything with every "
                "batch: use outputMode('append'). To keep one row a key, write each batch into "
                "a cache with foreachBatch"
            )
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _task()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            raise InvalidArgument("the sink writes micro-batches; use another trigger")
        producer = self._settings.producer_id or f"spark-{query}"
        return _stage(self._settings, producer, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        staged = _staged(messages)
        if not staged:
            raise Internal("Spark has committed a batch without a task")
        with Broker(self._settings) as broker:
            staging = Staging(broker, staged[0].producer, batchId)
            answer = staging.commit(staged)
            if answer.status == ALREADY and self._settings.producer_id:
                _check_lineage(staging)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        producers = [self._settings.producer_id, *(one.producer for one in _staged(messages))]
        producer = next(filter(None, producers), None)
        if producer is not None:
            _drop(self._settings, producer, batchId)


def _check(settings: SinkSettings, schema: StructType) -> None:
    if settings.cache:
        check_for_cache(schema)
    else:
        check_for_topics(schema, topic=settings.topic)


def _check_lineage(staging: Staging) -> None:
    """A query that is started again repeats its last batch and no other. One that is further
    behind has lost its checkpoint, or shares its producerId: its rows would all be taken for
    repetitions."""
    last = staging.last_committed()
    if last > staging.batch:
        raise FailedPrecondition(
            f"producerId {staging.producer!r} has committed batch {last}, and this query is at "
            f"batch {staging.batch}: it has another checkpoint than the query that wrote those. "
            "Nothing of this batch was stored; give this query a producerId of its own"
        )


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise Internal("a writer's `write` runs in a task")
    return context


def _stage(
    settings: SinkSettings, producer: str, batch: int, batches: Iterator[pa.RecordBatch]
) -> Staged:
    target = {"cache": settings.cache} if settings.cache else {"topic": settings.topic}
    with Broker(settings) as broker:
        return Staging(broker, producer, batch).send(
            _task().partitionId(),
            cut(map(as_sent, batches)),
            {k: v for k, v in target.items() if v},
        )


def _staged(messages: list[Any]) -> list[Staged]:
    """A task that failed has no message."""
    return [message for message in messages if isinstance(message, Staged)]


def _drop(settings: SinkSettings, producer: str, batch: int) -> None:
    """What is left is dropped by the broker when the producer goes on; this is sooner."""
    try:
        with Broker(settings) as broker:
            Staging(broker, producer, batch).drop()
    except PenstockError as error:
        log.warning("batch %d of %s was not dropped: %s", batch, producer, error)
