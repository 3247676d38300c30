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

from penstock.client.calls import segment
from penstock.model.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
)
from penstock.spark.broker import Broker
from penstock.spark.options import SinkSettings
from penstock.spark.pieces import cut
from penstock.spark.sink_columns import as_sent, check_for_cache, check_for_topics
from penstock.spark.staging import ALREADY, CommitAnswer, ProducerBatch, StagedPart

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
        _check_target(settings)
        self._settings = settings
        self._producer = settings.txn or f"spark-{uuid.uuid4()}"
        self._batch = settings.txn_batch or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _stage(self._settings, self._producer, self._batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        is_only = self._settings.txn_batch is None
        with Broker(self._settings) as broker:
            staging = ProducerBatch(broker, self._producer, self._batch)
            staged = _staged(messages)
            answer = staging.commit(staged, once=is_only)
            if answer.status == ALREADY:
                _tell_of_others(staging, answer, staged)

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
        _check_target(settings)
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
            staging = ProducerBatch(broker, staged[0].producer, batchId)
            answer = staging.commit(staged)
            if answer.status == ALREADY:
                _check_lineage(staging)
                _tell_of_others(staging, answer, staged)

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


def _check_target(settings: SinkSettings) -> None:
    """Tasks would find out too, each several times, and say it with pages of Java's."""
    kind, name = ("cache", settings.cache) if settings.cache else ("topic", settings.topic)
    if not name:
        return
    path = f"/v1/topics/{segment(name)}/offsets"
    if kind == "cache":
        tenant, namespace, cache = map(segment, name.split("/"))
        path = f"/v1/tenants/{tenant}/namespaces/{namespace}/caches/{cache}"
    with Broker(settings) as broker:
        try:
            broker.call("GET", path)
        except NotFound:
            raise NotFound(f"{kind} {name!r} does not exist at {broker.url}") from None


def _check_lineage(staging: ProducerBatch) -> None:
    """A query that is started again repeats its last batch and no other. One that is further
    behind has lost its checkpoint, has an older one, or shares its producerId: its rows would all
    be taken for repetitions."""
    last = staging.last_committed()
    if last > staging.batch:
        raise FailedPrecondition(
            f"producer {staging.producer!r} has committed batch {last}, and this query is at "
            f"batch {staging.batch}: its checkpoint is older than what it has written, or is not "
            "that of the query which wrote those. Nothing of this batch was stored. Put the newest "
            "checkpoint back, or give this query a producerId of its own: what it reads is then "
            "stored again"
        )


def _tell_of_others(
    staging: ProducerBatch, answer: CommitAnswer, staged: Sequence[StagedPart]
) -> None:
    """What is stored once is what came first. Other rows under the same number are no error: a
    function that asks a model may say something else when its batch is repeated."""
    rows = sum(one.rows for one in staged)
    if answer.rows != rows and staging.last_committed() == staging.batch:
        log.warning(
            "batch %d of producer %s was stored before with %d rows, and has %d rows now, of which "
            "none is stored. If it is not the same batch, give this write a name of its own",
            *(staging.batch, staging.producer, answer.rows, rows),
        )


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise Internal("a writer's `write` runs in a task")
    return context


def _stage(
    settings: SinkSettings, producer: str, batch: int, batches: Iterator[pa.RecordBatch]
) -> StagedPart:
    target = {"cache": settings.cache} if settings.cache else {"topic": settings.topic}
    with Broker(settings) as broker:
        return ProducerBatch(broker, producer, batch).send(
            _task().partitionId(),
            cut(map(as_sent, batches)),
            {k: v for k, v in target.items() if v},
        )


def _staged(messages: list[Any]) -> list[StagedPart]:
    """A task that failed has no message."""
    return [message for message in messages if isinstance(message, StagedPart)]


def _drop(settings: SinkSettings, producer: str, batch: int) -> None:
    """What is left is dropped by the broker when the producer goes on; this is sooner."""
    try:
        with Broker(settings) as broker:
            ProducerBatch(broker, producer, batch).drop()
    except PenstockError as error:
        log.warning("batch %d of %s was not dropped: %s", batch, producer, error)
