"""route: sends the messages of an intake topic to the topics that a user's function names.

    penstock pipeline run route --set topic=intake --set function=rules.py:label --set to=work

A batch has these steps: the function's verdicts are stored in the lake, once; the routed rows are
written to the broker under the batch's number, and rows that cannot be routed are added to
`rejects`; the stored verdicts are removed. A repeated batch uses the stored verdicts, so a function
that answers differently the second time changes nothing, and no write happens twice. Verdicts with
an unusable target are not stored: nothing was sent by them, and the function is asked again when it
is corrected.

Invariant: every message of the intake is in one target or in the rejects, once. Must not know what
the function does, or how it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.errors import InvalidArgument
from penstock.model.options import TEXT, TOPIC, Kind, Option, WrongValue, choice, parse_name
from penstock.spark.lake.files import Files
from penstock.spark.logs import is_among
from penstock.spark.pipelines.functions import TAKES, FunctionKind, UserFunction, inspect_text, load
from penstock.spark.pipelines.names import path_name
from penstock.spark.pipelines.rejects import keep_rejects
from penstock.spark.pipelines.targets import (
    ENVELOPE,
    ENVELOPE_FIELDS,
    as_sent,
    largest_message,
    partitions_of,
    refusals,
)
from penstock.spark.pipelines.verdicts import judged
from penstock.spark.running.pipeline import Pipeline, data_loss_option, max_rows_option
from penstock.spark.running.run import Run
from penstock.spark.schemas import INTEGER, LONG, STRING, struct

FOLDER = "_routed"
LABEL = "{label}"
MAX_ROWS = 100_000

_IS_GOOD = "error is null"

POSITION = {"source_topic": STRING, "partition": INTEGER, "offset": LONG}
ROUTED = struct({**POSITION, "target": STRING, "error": STRING, **ENVELOPE_FIELDS})


def _check(settings: Mapping[str, Any]) -> None:
    """Checks the function by the text of its file, where the command is given."""
    spec: str = settings["function"]
    _check_target(settings["to"], inspect_text(spec), spec.rpartition(":")[2].strip())


def _check_target(to: str | None, kind: FunctionKind | None, name: str) -> None:
    if kind == "series" and to is None:
        raise InvalidArgument(
            f"pipeline route, option to is required: {name} returns labels, and no topics"
        )


def _start(run: Run) -> None:
    settings = run.settings
    function = load(settings["function"])
    _check_target(settings["to"], function.kind, function.name)
    route = Route(run, settings["topic"], function, settings["to"], settings["unrouted"])
    source = run.stream(
        topic=settings["topic"],
        startingOffsets=settings["start"],
        maxRowsPerTrigger=settings["max_rows"],
        group=settings["group"],
        failOnDataLoss=settings["fail_on_data_loss"],
    )
    run.start(route.query, source, route.write)


@dataclass(frozen=True)
class Route:
    """`to` is a topic, or a template of one with a label. None: the function returns topics."""

    run: Run
    intake: str
    function: UserFunction
    to: str | None
    unrouted: str | None

    @property
    def query(self) -> str:
        return path_name(self.intake)

    def write(self, frame: DataFrame, batch: int) -> None:
        """Writes a batch of the intake; Spark may repeat it."""
        run = self.run
        # With another checkpoint, the same number is another batch.
        name = f"{FOLDER}/{self.query}/{run.query_id()}-{batch}"
        stored = run.lake.table(name, ROUTED)
        max_bytes = largest_message(run.broker)
        # The frame is computed only if nothing is stored.
        stored.append_checked(
            routed(frame, self.function, self.to, self.unrouted, max_bytes),
            "route",
            0,
            self._check_verdicts,
        )
        rows = stored.read()
        found = _summed(rows)
        if found.targets:
            self._send(rows.filter(_IS_GOOD), found.targets, batch)
        if found.rejected:
            rejected = rows.filter(f"not ({_IS_GOOD})").withColumnRenamed("source_topic", "topic")
            keep_rejects(run, rejected, self.query, batch)
            run.report(f"batch {batch}: {found.rejected} put aside in the table rejects")
        Files(run.spark, run.lake.path).delete(name)

    def _check_verdicts(self, verdicts: DataFrame) -> None:
        self._partitions(_summed(verdicts).targets)

    def _partitions(self, targets: Sequence[str]) -> dict[str, int]:
        """Returns how many partitions each target has. Raises if a target cannot be used."""
        circle = [
            topic for topic in targets if is_among(topic, map(str.strip, self.intake.split(",")))
        ]
        if circle:
            raise InvalidArgument(
                f"topic {circle[0]!r} is a target of the route and its intake: its messages "
                "would go round for ever"
            )
        return partitions_of(self.run.broker, targets)

    def _send(self, rows: DataFrame, targets: Sequence[str], batch: int) -> None:
        # Checked again: the verdicts of a repeated batch may be old.
        partitions = self._partitions(targets)
        ordered = rows.orderBy("source_topic", "offset")
        sent = as_sent(ordered, "target", partitions, datetime.now(UTC))
        self.run.write(sent, f"{self.run.name}-{self.query}", txnBatch=batch)


def _summed(verdicts: DataFrame) -> Row:
    is_good = F.expr(_IS_GOOD)
    return verdicts.agg(
        F.collect_set(F.when(is_good, F.col("target"))).alias("targets"),
        F.count_if(~is_good).alias("rejected"),
    ).collect()[0]


def routed(
    records: DataFrame,
    function: UserFunction,
    to: str | None,
    unrouted: str | None,
    max_bytes: int | None = None,
) -> DataFrame:
    """Returns the messages as `ROUTED`, each with a target or an error. `records` has the columns
    of format("penstock"). A function of frames may leave out columns and rows. `max_bytes` is the
    broker's limit for key and value together."""
    if function.kind == "frame":
        rows = _framed(records, function)
    else:
        rows = judged(records, function).select(
            F.col("topic").alias("source_topic"),
            "partition",
            "offset",
            *(name for name in ENVELOPE if name not in ("value", "routing_label", "routing_meta")),
            F.coalesce("verdict_value", "value").alias("value"),
            F.col("verdict_label").alias("routing_label"),
            F.col("verdict_meta").alias("routing_meta"),
            F.trim("verdict_topic").alias("verdict_topic"),
            "error",
        )
    rows = rows.withColumn("partition_override", F.lit(None).cast("int"))
    target = _target(F.col("verdict_topic"), F.col("routing_label"), to, unrouted)
    rows = rows.withColumn("target", F.when(F.col("error").isNull(), target))
    return rows.withColumn(
        "error", F.coalesce("error", _no_target(to), *refusals(F.col("target"), max_bytes))
    ).select(*ROUTED.names)


def _framed(rows: DataFrame, function: UserFunction) -> DataFrame:
    """Calls a function of frames, with the intake's `topic` renamed: it may return its own."""
    made = function.callable()(rows.withColumnRenamed("topic", "source_topic"))
    where = f"function {function.name} of {function.path}"
    if not isinstance(made, DataFrame):
        raise InvalidArgument(f"{where} returned {type(made).__name__}, not a DataFrame")
    if "value" not in made.columns:
        raise InvalidArgument(f"{where} returned rows without the column value")
    if "topic" not in made.columns and "routing_label" not in made.columns:
        raise InvalidArgument(
            f"{where} returned rows without the column topic or routing_label; they need one"
        )
    columns = [
        (F.col(name) if name in made.columns else F.lit(None)).cast(kind).alias(name)
        for name, kind in (POSITION | ENVELOPE_FIELDS).items()
    ]
    topic = F.trim("topic") if "topic" in made.columns else F.lit(None)
    return made.select(
        *columns, topic.cast(STRING).alias("verdict_topic"), F.lit(None).cast(STRING).alias("error")
    )


def _target(topic: Column, label: Column, to: str | None, unrouted: str | None) -> Column:
    """Returns the topic of the function, else the one made of its label, else `unrouted`."""
    given = F.when(topic != "", topic)
    has_label = F.coalesce(label, F.lit("")) != ""
    if to is not None:
        made = F.replace(F.lit(to), F.lit(LABEL), label) if LABEL in to else F.lit(to)
        given = F.coalesce(given, F.when(has_label, made))
    if unrouted is not None:
        given = F.coalesce(given, F.when(~has_label, F.lit(unrouted)))
    return given


def _no_target(to: str | None) -> Column:
    reason = "the function returned no topic and no label"
    if to is None:
        reason += ", or a label, and the option to is not set"
    return F.when(F.col("target").isNull(), F.lit(reason))


# -- options ---------------------------------------------------------------------------------------


def _template(text: str) -> str:
    if "{" in text.replace(LABEL, "") or "}" in text.replace(LABEL, ""):
        raise WrongValue
    return parse_name(text)


PIPELINE = Pipeline(
    "route",
    "Messages of an intake topic to the topics that a function of yours names",
    _start,
    (
        Option(
            "topic",
            TOPIC.described("a topic, several with commas between, or a pattern"),
            "the intake",
            is_required=True,
        ),
        Option("function", TEXT.described(TAKES), is_required=True),
        Option("to", Kind("a topic, or a template of one like work.{label}", _template)),
        Option("unrouted", TOPIC, "for messages without a label"),
        Option("start", choice("earliest", "latest"), "where the first run begins", "earliest"),
        max_rows_option(MAX_ROWS),
        Option(
            "group",
            TEXT.described("a group of the intake"),
            "the route publishes its progress as the progress of this group",
        ),
        data_loss_option("routed, and without a topic that was deleted"),
    ),
    _check,
)
