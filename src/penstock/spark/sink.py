"""The sink of format("penstock"): writes rows to topics, a stream or a cache, each once.

Spark makes a writer on the driver for every batch, and sends a copy to each task, which calls
`write`. `commit` and `abort` run on the driver, in a process of their own. So a writer keeps
nothing between calls. A wrong schema is refused before a task starts.

A batch is named by its producer and its number. In streaming writes, the producer is the option
`producerId` or the query's id, which is kept in the checkpoint; tasks read both from properties
that Spark sets. In batch writes, the producer is the option `txn` or a new name, and the number is
the option `txnBatch`, or 0 for a producer with one batch only.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.model.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PenstockError,
)
from penstock.spark.broker import BrokerConnection
from penstock.spark.existence import Target, check_exists
from penstock.spark.options import SinkSettings
from penstock.spark.sink_columns import (
    as_sent,
    check_for_cache,
    check_for_stream,
    check_for_topics,
)
from penstock.spark.staging import ALREADY, CommitAnswer, ProducerBatch, StagedPart, cut

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
        check_exists(settings, *_target(settings))
        self._settings = settings
        self._producer = settings.txn or f"spark-{uuid.uuid4()}"
        self._batch = settings.txn_batch or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _stage(self._settings, self._producer, self._batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        is_only = self._settings.txn_batch is None
        with BrokerConnection(self._settings) as broker:
            producer_batch = ProducerBatch(broker, self._producer, self._batch)
            staged = _staged(messages)
            answer = producer_batch.commit(staged, once=is_only)
            if answer.status == ALREADY:
                _warn_of_other_rows(producer_batch, answer, staged)

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
        check_exists(settings, *_target(settings))
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
        with BrokerConnection(self._settings) as broker:
            producer_batch = ProducerBatch(broker, staged[0].producer, batchId)
            answer = producer_batch.commit(staged)
            if answer.status == ALREADY:
                _check_is_repetition(producer_batch)
                _warn_of_other_rows(producer_batch, answer, staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        producers = [self._settings.producer_id, *(one.producer for one in _staged(messages))]
        producer = next(filter(None, producers), None)
        if producer is not None:
            _drop(self._settings, producer, batchId)


def _check(settings: SinkSettings, schema: StructType) -> None:
    if settings.cache:
        check_for_cache(schema)
    elif settings.stream:
        check_for_stream(schema)
    else:
        check_for_topics(schema, topic=settings.topic)


def _target(settings: SinkSettings) -> tuple[Target, str]:
    """Returns the kind of target and its name, which is empty if each row names its topic."""
    if settings.cache:
        return "cache", settings.cache
    if settings.stream:
        return "stream", settings.stream
    return "topic", settings.topic


def _check_is_repetition(producer_batch: ProducerBatch) -> None:
    """Refuses a query that is more than one batch behind its producer. A restarted query repeats
    its last batch only. One that is further behind has lost its checkpoint, has an older one, or
    shares its producerId, and all of its rows would be taken for repetitions."""
    last = producer_batch.last_committed()
    if last > producer_batch.batch:
        raise FailedPrecondition(
            f"producer {producer_batch.producer!r} has committed batch {last}, and this query "
            f"is at batch {producer_batch.batch}: its checkpoint is older than what it has "
            "written, or belongs to another query. Nothing of this batch was stored. Put the "
            "newest checkpoint back, or give this query a producerId of its own: its rows are "
            "then stored again"
        )


def _warn_of_other_rows(
    producer_batch: ProducerBatch, answer: CommitAnswer, staged: Sequence[StagedPart]
) -> None:
    """Warns if a repeated batch has another number of rows: the first ones stay. That is no error,
    because a function that asks a model may answer differently the second time."""
    rows = sum(one.rows for one in staged)
    if answer.rows != rows and producer_batch.last_committed() == producer_batch.batch:
        log.warning(
            "batch %d of producer %s was stored before with %d rows; the %d rows of now are not "
            "stored. If it is not the same batch, give this write a name of its own",
            *(producer_batch.batch, producer_batch.producer, answer.rows, rows),
        )


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise Internal("a writer's `write` runs in a task")
    return context


def _stage(
    settings: SinkSettings, producer: str, batch: int, batches: Iterator[pa.RecordBatch]
) -> StagedPart:
    kind, name = _target(settings)
    with BrokerConnection(settings) as broker:
        return ProducerBatch(broker, producer, batch).send(
            _task().partitionId(), cut(map(as_sent, batches)), {kind: name} if name else {}
        )


def _staged(messages: list[Any]) -> list[StagedPart]:
    """Leaves out failed tasks, which have no message."""
    return [message for message in messages if isinstance(message, StagedPart)]


def _drop(settings: SinkSettings, producer: str, batch: int) -> None:
    """Drops the staged rows at once. Without this the broker keeps them until the producer's next
    batch."""
    try:
        with BrokerConnection(settings) as broker:
            ProducerBatch(broker, producer, batch).drop()
    except PenstockError as error:
        log.warning("batch %d of %s was not dropped: %s", batch, producer, error)
