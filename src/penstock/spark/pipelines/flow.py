"""Runs a user's pipeline: reads its sources, calls its function, writes the result to its sink.

Invariant: a batch of a stream is in its sink once. A table knows the batches it has, and a write to
the broker is named by checkpoint and batch. A result that is computed as a whole replaces the one
before. The result's columns are checked against the sink before the first batch.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.model.errors import InvalidArgument
from penstock.spark.pipelines.rejects import keep_rejects
from penstock.spark.pipelines.targets import entry_refusals, largest_message, refusals
from penstock.spark.pipelines.user import FlowEndpoint, UserPipeline
from penstock.spark.sink_columns import check_for_cache, check_for_topics

if TYPE_CHECKING:
    from penstock.spark.running.run import Run

QUERY = "rows"
_PLACE = ("topic", "partition", "offset")
_REFUSED = f"{InvalidArgument.__module__}.{InvalidArgument.__qualname__}"
"""Spark's text of a task's failure has this name in it if the broker has refused rows."""


def start(user: UserPipeline, run: Run) -> None:
    if user.sink is None:
        run.report(
            f"{user.name} only feeds other pipelines: it has no sink, so there is nothing to run"
        )
        return
    if user.is_stream:
        frame = frame_of(user, run, as_stream=True)
        if not frame.isStreaming:
            raise InvalidArgument(
                f"the function {user.__name__} must return a stream made of its sources"
            )
        schema = _without_rejects(user, frame).schema
        check(user, schema)
        if user.sink.kind == "table":
            run.lake.table(user.sink.name, schema, user.partition_by).check()
        run.start(
            QUERY, frame, lambda rows, batch: _take(user, run, rows, batch), output_mode=user.mode
        )
    else:
        run.repeat(QUERY, _maker(user, run))


def frame_of(user: UserPipeline, run: Run, *, as_stream: bool) -> DataFrame:
    """Returns the function's result on its sources. Sources that are functions are called too."""
    frames = {
        name: _read(user, source, run, as_stream)
        if isinstance(source, FlowEndpoint)
        else frame_of(source, run, as_stream=as_stream)
        for name, source in user.sources.items()
    }
    own = {option.name for option in user.settings()}
    settings = {name: value for name, value in run.settings.items() if name in own}
    made = user.function(*frames.values(), **settings)
    if not isinstance(made, DataFrame):
        raise InvalidArgument(
            f"the function {user.__name__} returned {type(made).__name__}, not a DataFrame"
        )
    return made


def check(user: UserPipeline, schema: StructType) -> None:
    """Checks that the sink accepts these columns."""
    sink = user.sink
    if sink is None:
        return
    if sink.kind == "topic":
        check_for_topics(schema, topic=sink.name)
    elif sink.kind == "cache":
        check_for_cache(schema)
    for column in user.partition_by:
        if column not in schema.names:
            raise InvalidArgument(f"there is no column {column} to partition by")
    if user.rejects and user.rejects in schema.names:
        raise InvalidArgument(f"the result has two columns {user.rejects}")


def _read(user: UserPipeline, source: FlowEndpoint, run: Run, as_stream: bool) -> DataFrame:
    options = user.source_options
    if source.kind == "table":
        return run.lake.find(source.name).read()
    if source.kind == "parquet":
        return run.spark.read.parquet(source.name)
    where = {"log": "journal"} if source.kind == "journal" else {"topic": source.name}
    read: Callable[..., DataFrame] = run.stream if as_stream else run.read
    return read(**{**options, **where})


def _take(user: UserPipeline, run: Run, frame: DataFrame, batch: int) -> None:
    if user.rejects and user.sink is not None and user.sink.kind != "table":
        reason = F.col(f"`{user.rejects}`").cast("string")
        frame = frame.withColumn(user.rejects, F.coalesce(reason, _refusal(frame, user, run)))
    if user.rejects:
        frame.persist()
    try:
        if user.rejects:
            bad = frame.where(f"`{user.rejects}` is not null")
            keep_rejects(run, bad.withColumnRenamed(user.rejects, "error"), QUERY, batch)
        _put(user, run, _without_rejects(user, frame), batch)
    finally:
        if user.rejects:
            frame.unpersist()


def _put(user: UserPipeline, run: Run, frame: DataFrame, batch: int) -> None:
    sink = user.sink
    if sink is None:
        return
    if sink.kind == "table":
        table = run.lake.table(sink.name, frame.schema, user.partition_by)
        if user.mode == "complete":
            table.replace(frame)
        else:
            table.append(frame, user.name, batch)
        return
    try:
        run.write(frame, user.name, txnBatch=batch, **{sink.kind: sink.name})
    except Exception as error:
        if not user.rejects and _REFUSED in str(error):
            _blame_row(user, run, frame, error)
        raise


def _refusal(frame: DataFrame, user: UserPipeline, run: Run) -> Column:
    """Returns why the broker would refuse the row, and with it the batch; null if it would not."""
    max_bytes = largest_message(run.broker)
    if user.sink is not None and user.sink.kind == "cache":
        key, value = F.col("key").cast("string"), F.col("value").cast("binary")
        ttl_ms = F.col("ttl_ms") if "ttl_ms" in frame.columns else F.lit(None)
        is_negative = F.when(ttl_ms < 0, F.lit("the ttl_ms is negative"))
        return F.coalesce(*entry_refusals(key, value, max_bytes), is_negative)
    topic = user.sink.name if user.sink else ""
    return F.coalesce(*refusals(F.lit(topic), max_bytes, frame.columns))


def _blame_row(user: UserPipeline, run: Run, frame: DataFrame, error: Exception) -> None:
    """Raises what is wrong with the first bad row, if that is why the broker refused the batch."""
    why = _refusal(frame, user, run).alias("why")
    key = F.col("key").cast("string") if "key" in frame.columns else F.lit(None)
    found = frame.select(why, key.alias("key")).where("why is not null").first()
    if found is None:
        return
    of_key = "without a key" if found.key is None else f"with key {found.key[:100]!r}"
    raise InvalidArgument(
        f"a row {of_key} cannot be written: {found.why}. Leave such rows out, or keep them in "
        "the table rejects with rejects='column' of @pipeline"
    ) from error


def _maker(user: UserPipeline, run: Run) -> Callable[[], int]:
    """Returns a function that computes the result again and returns its number of rows. To the
    broker, the results of one run are batches of one producer: they are stored in order, and a run
    of weeks leaves one producer to remember. A run with `once` writes one batch only."""
    producer, times = f"{user.name}-{uuid.uuid4().hex}", itertools.count()

    def make() -> int:
        rows = _without_rejects(user, frame_of(user, run, as_stream=False))
        check(user, rows.schema)
        sink = user.sink
        if sink is not None and sink.kind == "table":
            return run.lake.table(sink.name, rows.schema, user.partition_by).replace(rows)
        batch = None if run.once else next(times)
        seen = Observation()
        counted = rows.observe(seen, F.count(F.lit(1)).alias("rows"))
        run.write(counted, producer, txnBatch=batch, cache=sink.name if sink else "")
        return int(seen.get["rows"])

    return make


def _without_rejects(user: UserPipeline, frame: DataFrame) -> DataFrame:
    """Returns the rows for the sink. The columns topic, partition and offset are for rejects only;
    topics and caches do not take them."""
    if not user.rejects:
        return frame
    if user.rejects not in frame.columns:
        raise InvalidArgument(
            f"the result has no column {user.rejects}, which option rejects names"
        )
    rows = frame.where(f"`{user.rejects}` is null").drop(user.rejects)
    return rows if user.sink is None or user.sink.kind == "table" else rows.drop(*_PLACE)
