"""Keeps the latest value of every key of a topic in a cache or a table, and applies deletes.

The latest value is the one with the highest offset: offsets rise within a topic, even if a clock
goes back. A topic that was deleted and made again starts with 0 again, and is refused. Offsets of
two topics cannot be compared, so a table belongs to one topic and records which. Invariant: after a
batch, the target has the state of the topic's messages up to there, and a repeated batch changes
nothing. A table's rows lie in buckets by key, and a batch rewrites the buckets that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.model.errors import FailedPrecondition
from penstock.model.options import CACHE, Kind, Option, WrongValue, choice, parse_name, whole_number
from penstock.spark.lake.commits import writer_name
from penstock.spark.lake.files import Files
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.options import PATTERN_SIGNS
from penstock.spark.pipelines.names import is_own_table
from penstock.spark.pipelines.rejects import keep_rejects
from penstock.spark.pipelines.targets import entry_refusals, largest_message
from penstock.spark.running.pipeline import Pipeline, data_loss_option, max_rows_option
from penstock.spark.running.run import Run
from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

MAX_ROWS = 1_000_000
BUCKETS = 16

SCHEMA = struct(
    {
        "key": STRING,
        "value": STRING,
        "timestamp": TIMESTAMP,
        "partition": INTEGER,
        "offset": LONG,
        "bucket": STRING,
    }
)
ORIGIN = "_materialized.json"
_STATE = ("value", "timestamp", "partition", "offset", "is_deleted")


class Origin(msgspec.Struct, frozen=True):
    """The content of the file `ORIGIN` in a table: the topic that the table belongs to."""

    topic: str


@dataclass(frozen=True)
class MaterializeTarget:
    """A cache, as tenant/namespace/cache, or the name of a table."""

    kind: str
    name: str


def table(lake: Lake, name: str) -> Table:
    return lake.table(name, SCHEMA, ("bucket",))


# -- frames to frames ------------------------------------------------------------------------------


def states(messages: DataFrame, tombstone: str) -> DataFrame:
    """Returns what each message says about its key: a value, or that the key is deleted."""
    deletes = {"null": F.trim("value") == "null", "none": F.lit(False)}
    return messages.select(
        F.coalesce("key", F.lit("")).alias("key"),
        "value",
        "timestamp",
        "partition",
        "offset",
        deletes[tombstone].alias("is_deleted"),
    )


def latest(states: DataFrame) -> DataFrame:
    """Returns one row for each key with the number of its `messages`. The key may be deleted."""
    state = F.max_by(F.struct(*_STATE), "offset").alias("state")
    found = states.groupBy("key").agg(state, F.count(F.lit(1)).alias("messages"))
    return found.select("key", "state.*", "messages")


def bucket(key: str, buckets: int) -> Column:
    number = F.pmod(F.xxhash64(key), F.lit(buckets))
    return F.concat(number.cast("string"), F.lit(f"-of-{buckets}"))


def merged(there: DataFrame, changes: DataFrame, buckets: int) -> DataFrame:
    """Returns a table's rows with the latest changes. One task writes a bucket, as one file."""
    old = there.drop("bucket").withColumn("is_deleted", F.lit(False))
    both = old.unionByName(changes.select(*old.columns)).withColumn(
        "bucket", bucket("key", buckets)
    )
    state = F.max_by(F.struct(*_STATE), "offset").alias("state")
    grouped = both.repartition("bucket").groupBy("bucket", "key").agg(state)
    kept = grouped.where("not state.is_deleted").select("bucket", "key", "state.*")
    return kept.select(*SCHEMA.names)


def entries(changes: DataFrame, ttl_ms: int | None) -> DataFrame:
    """Returns the changes as a cache takes them: a null value deletes."""
    value = F.when(~F.col("is_deleted"), F.col("value")).alias("value")
    if ttl_ms is None:
        return changes.select("key", value)
    return changes.select("key", value, F.lit(ttl_ms).cast("long").alias("ttl_ms"))


# -- batches ---------------------------------------------------------------------------------------


def start(run: Run) -> None:
    settings = run.settings
    target: MaterializeTarget = settings["to"]
    if target.kind == "table":
        _is_claimed(table(run.lake, target.name), settings["topic"])
    query = writer_name(f"{settings['topic']}.{target.kind}.{target.name}")
    messages = run.stream(
        topic=settings["topic"],
        columns="key,value,timestamp,partition,offset",
        maxRowsPerTrigger=settings["max_rows"],
        failOnDataLoss=settings["fail_on_data_loss"],
        failOnDeletedTopic=True,
    )

    def write(frame: DataFrame, batch: int) -> None:
        found = latest(states(frame, settings["tombstone"])).persist()
        changes = found.where("key != ''")
        try:
            _report_keyless(run, found, batch)
            if target.kind == "cache":
                _to_cache(run, changes, query, batch, target.name)
            else:
                of_topic = table(run.lake, target.name)
                _claim(of_topic, settings["topic"])
                _to_table(changes, of_topic, settings["buckets"])
        finally:
            found.unpersist()

    run.start(query, messages, write)


def _claim(target: Table, topic: str) -> None:
    """Records with the first batch that the table belongs to the topic. A table without a record,
    of an older version, belongs to the first topic that comes."""
    if not _is_claimed(target, topic):
        files = Files(target.spark, target.path)
        files.make_dirs("")
        files.write(ORIGIN, msgspec.json.encode(Origin(topic)).decode())


def _is_claimed(target: Table, topic: str) -> bool:
    """Returns whether this topic has claimed the table. Raises if it is another's, or not ours."""
    target.check()
    kept = Files(target.spark, target.path).read(ORIGIN)
    if kept is None:
        return False
    first = msgspec.json.decode(kept, type=Origin).topic
    if first != topic:
        raise FailedPrecondition(
            f"the table {target.path} has the latest values of topic {first!r}, and those of "
            f"{topic!r} would be mixed with them: give {topic!r} its own table"
        )
    return True


def _report_keyless(run: Run, found: DataFrame, batch: int) -> None:
    row = found.where("key = ''").select("messages").first()
    if row is not None:
        run.report(
            f"{run.name}: batch {batch} of {run.settings['topic']} has {row['messages']} messages "
            "without a key, which are left out"
        )


def _to_cache(run: Run, changes: DataFrame, query: str, batch: int, cache: str) -> None:
    """Puts the entries that the cache accepts, and the others into `rejects`: a topic accepts keys
    that a cache refuses, and one of them would fail its batch at every start."""
    refusal = F.coalesce(*entry_refusals(F.col("key"), F.col("value"), largest_message(run.broker)))
    checked = changes.withColumn("error", refusal)
    bad = checked.where("error is not null").withColumn("topic", F.lit(run.settings["topic"]))
    rejected = keep_rejects(run, bad, query, batch)
    if rejected:
        run.report(f"batch {batch}: {rejected} put aside in the table rejects")
    run.write(
        entries(checked.where("error is null"), run.settings["ttl_ms"]),
        txn=run.name,
        txnBatch=batch,
        cache=cache,
    )


def _to_table(changes: DataFrame, target: Table, buckets: int) -> None:
    there = target.read()
    if any(not one.endswith(f"-of-{buckets}") for (one,) in target.partitions()):
        target.replace(merged(there, changes, buckets))
        return
    touched_buckets = changes.select(bucket("key", buckets).alias("bucket")).distinct()
    touched = [row.bucket for row in touched_buckets.collect()]
    old = there.where(F.col("bucket").isin(touched))
    target.replace(merged(old, changes, buckets), [[one] for one in touched])


# -- options ---------------------------------------------------------------------------------------


def _target(text: str) -> MaterializeTarget:
    kind, _, name = text.partition(":")
    if kind == "cache":
        return MaterializeTarget(kind, CACHE.parse(name))
    if kind != "table" or "/" in name:
        raise WrongValue
    target = MaterializeTarget(kind, parse_name(name))
    if is_own_table(target.name):
        raise WrongValue("is a name that Penstock keeps for its own tables")
    return target


def _topic(text: str) -> str:
    if any(sign in text for sign in f",{PATTERN_SIGNS}"):
        raise WrongValue
    return parse_name(text)


PIPELINE = Pipeline(
    name="materialize",
    summary="The latest value of each key of a topic, into a cache or a table",
    start=start,
    options=(
        Option("topic", Kind("a topic", _topic), is_required=True),
        Option(
            "to",
            Kind("cache:tenant/namespace/cache, or table:name", _target),
            "where the values go; a table's name does not begin with _, and is none of Penstock's "
            "own tables",
            is_required=True,
        ),
        Option(
            "tombstone",
            choice("null", "none"),
            "which value deletes its key: JSON's null, or none",
            "null",
        ),
        Option("ttl_ms", whole_number(1, 2**53), "how long a cache keeps a value"),
        Option("buckets", whole_number(1, 10_000), "the parts of a table", str(BUCKETS)),
        max_rows_option(MAX_ROWS),
        data_loss_option("read"),
    ),
)
