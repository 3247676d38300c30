"""replay: sends stored messages to a topic again, from history, dead letters or the lake.

    penstock pipeline run replay --once --set topic=dlq.orders --set reason='no memory'
    penstock pipeline run replay --once --set topic=dlq.orders --set apply=true

Invariant: nothing is sent without `apply`, and a message that was sent under a replay's name is not
sent again under it. `replays.py` keeps that; `selection.py` selects the messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.errors import InvalidArgument, NotFound
from penstock.model.limits import MAX_OFFSET
from penstock.model.names import is_dead_letter_topic
from penstock.model.options import (
    MOMENT,
    TEXT,
    TOPIC,
    TRUE_OR_FALSE,
    Kind,
    Option,
    WrongValue,
    list_of,
    moment_at,
    number,
    parse_name,
    pattern,
    whole_number,
)
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import RecordLog, is_among, is_pattern
from penstock.spark.pipelines.archive import archived, records_table
from penstock.spark.pipelines.names import path_name
from penstock.spark.pipelines.replays import Pace, Pending, Replay
from penstock.spark.pipelines.selection import Criteria, chosen, marked
from penstock.spark.pipelines.targets import largest_message, partitions_of, refusals
from penstock.spark.running.pipeline import BROKER_OR_LAKE, Pipeline
from penstock.spark.running.run import Run
from penstock.spark.schemas import columns_of

SAMPLES = 5
SAMPLE_CHARS = 80

MIN_RATE = 0.1
"""A run cannot be stopped while it waits to send the next message."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def _check(settings: Mapping[str, Any]) -> None:
    if settings["to"] is None and not all(map(is_dead_letter_topic, settings["topic"])):
        raise InvalidArgument(
            "pipeline replay, option to is required: only dead letters, of topics like dlq.orders, "
            "say which topic they are from"
        )
    _check_not_endless(settings, datetime.now(UTC))


def _start(run: Run) -> None:
    settings = run.settings
    name = settings["name"] or default_name(settings["topic"], settings["to"])
    pace = Pace(settings["rate"])
    run.repeat("replay", lambda: _replay(run, Replay(run, name), pace))


def _replay(run: Run, replay: Replay, pace: Pace) -> int:
    """Sends what is left to send. Returns the number of rows sent."""
    settings = run.settings
    if settings["to"] is not None:
        partitions_of(run.broker, [settings["to"]])
    rows = chosen(_records(run, settings["topic"]), criteria_of(settings, datetime.now(UTC)))
    rows = _sendable(run, rows.filter(F.col("target").isNotNull()))
    if not settings["apply"]:
        return _show_plan(run, replay, rows)
    sent = 0
    pending = replay.pending()
    if pending is not None:
        run.report(f"replay {replay.name}: {unfinished(pending)}; it is finished first")
        sent += replay.send(pending, pace)
    pending = replay.select(rows, pace, settings["limit"])
    if pending is None:
        run.report(f"replay {replay.name}: nothing is left to send")
        return sent
    to = ", ".join(pending.targets)
    run.report(f"replay {replay.name}: {pending.rows} selected, to be sent to {to}")
    return sent + replay.send(pending, pace)


def _sendable(run: Run, rows: DataFrame) -> DataFrame:
    """Leaves out and reports rows that the broker would refuse, as after a lowered limit or from
    another broker: one such row would fail its chunk at every try."""
    refusal = F.coalesce(*refusals(F.col("target"), largest_message(run.broker)))
    checked = rows.withColumn("refusal", refusal)
    found = checked.where("refusal is not null").groupBy("refusal").count().orderBy("refusal")
    for row in found.collect():
        run.report(f"{row['count']} left out, the broker would refuse them: {row.refusal}")
    return checked.where("refusal is null").drop("refusal")


def criteria_of(settings: Mapping[str, Any], now: datetime) -> Criteria:
    return Criteria(
        since=moment_at(settings["since"], now),
        until=moment_at(settings["until"], now),
        **{
            name: settings[name] for name in ("to", "run", "tenant", "reason", "where", "keep_keys")
        },
    )


def default_name(topics: Sequence[str], to: str | None) -> str:
    """Makes a name of source and target that can be part of a path."""
    text = f"{'+'.join(topics)}-to-{'origin' if to is None else to}"
    return text if re.fullmatch(_NAME, text) else path_name(text)


# -- where messages are ----------------------------------------------------------------------------


def _records(run: Run, topics: tuple[str, ...]) -> DataFrame:
    """Reads the topics. A topic given by name must exist, and a pattern must match one."""
    if run.settings["from"] == "lake":
        return _archived(run, topics)
    with BrokerConnection(run.broker) as broker:
        records = RecordLog(broker, topics)
        found = records.find()
        for topic in filter(records.is_named, found):
            records.spans(topic)
    if not found:
        raise NotFound(f"no topic at {run.broker.url} matches {', '.join(topics)}")
    return run.read(topic=",".join(found), pushdown="true")


def _archived(run: Run, topics: tuple[str, ...]) -> DataFrame:
    rows = archived(run, records_table(run.lake))
    there = sorted(row.topic for row in rows.select("topic").distinct().collect())
    found = [topic for topic in there if is_among(topic, topics)]
    for topic in topics:
        if not found or (not is_pattern(topic) and topic not in found):
            raise NotFound(
                f"the lake {run.lake.path} has no messages of {topic!r}; it has those of "
                f"{', '.join(there) or 'no topic'}"
            )
    return rows.filter(F.col("topic").isin(found))


def _check_not_endless(settings: Mapping[str, Any], now: datetime) -> None:
    """Refuses a target that is also a source, unless `until` is in the past: copies in the source
    look like any other message, and only their time tells them from the originals."""
    to, until = settings["to"], settings["until"]
    if to is None or not is_among(to, settings["topic"]):
        return
    if not isinstance(until, datetime) or until > now:
        raise InvalidArgument(
            f"topic {to!r} is source and target: without an end, a second run would send the "
            f"copies of the first again. Set until={now.isoformat(timespec='seconds')}, the same "
            "each time"
        )


# -- the dry run -----------------------------------------------------------------------------------


def _show_plan(run: Run, replay: Replay, rows: DataFrame) -> int:
    pending = replay.pending()
    both = marked(rows, replay.done()).persist()
    try:
        left = ~F.col("is_done")
        groups = (
            both.groupBy("source_topic", "target")
            .agg(
                F.count_if(left).alias("left"),
                F.count_if("is_done").alias("done"),
                F.min(F.when(left, F.col("source_timestamp"))).alias("first"),
                F.max(F.when(left, F.col("source_timestamp"))).alias("last"),
            )
            .orderBy("source_topic", "target")
            .collect()
        )
        samples = both.filter(left).orderBy("source_topic", "source_offset").limit(SAMPLES)
        found = samples.collect()
    finally:
        both.unpersist()
    partitions_of(run.broker, {row.target for row in groups})
    run.report(plan(replay.name, groups, found, pending, run.settings["limit"]))
    return 0


def plan(
    name: str,
    groups: Sequence[Row],
    samples: Sequence[Row],
    pending: Pending | None = None,
    limit: int | None = None,
) -> str:
    """Returns the lines that a dry run shows."""
    left, done = sum(row.left for row in groups), sum(row.done for row in groups)
    lines = [f"replay {name}: a dry run, nothing is sent; apply=true sends the messages"]
    if pending is not None:
        lines.append(f"  first, what an earlier run has not sent: {unfinished(pending)}")
    for row in groups:
        if row.left:
            times = f"{row['first']:%Y-%m-%d %H:%M:%S} to {row['last']:%Y-%m-%d %H:%M:%S}"
            lines.append(f"  {row.left} from {row.source_topic} to {row.target}, of {times}")
    if not left:
        lines.append("  no message is left to send")
    if done:
        lines.append(f"  {done} left out: sent before under this name, or selected already")
    if limit is not None and limit < left:
        lines.append(f"  limit: the first {limit} of {left}")
    lines += [f"  such as {_sample(row)}" for row in samples]
    return "\n".join(lines)


def _sample(row: Row) -> str:
    place = f"{row.source_topic}/{row.source_partition} @{row.source_offset}"
    words = [place, f"{row.source_timestamp:%Y-%m-%d %H:%M:%S}"]
    for name, text in (("key", row.key), ("run", row.run_id), ("error", row.dlq_last_error)):
        if text:
            words.append(f"{name}={_short(text)}")
    return " ".join([*words, f"value={_short(row.value)}"])


def _short(text: str) -> str:
    """Shortens a text and puts it on one line."""
    shown = "".join(sign if sign.isprintable() else " " for sign in text[: SAMPLE_CHARS + 1])
    return shown if len(text) <= SAMPLE_CHARS else shown[: SAMPLE_CHARS - 1] + "…"


def unfinished(pending: Pending) -> str:
    return f"a selection of {pending.rows} messages to {', '.join(pending.targets)}"


# -- options ---------------------------------------------------------------------------------------


def _target(text: str) -> str:
    if is_pattern(text):
        raise WrongValue
    return parse_name(text)


PIPELINE = Pipeline(
    "replay",
    "Stored messages to a topic once more: history, dead letters or the lake's archive",
    _start,
    (
        Option("from", BROKER_OR_LAKE, "lake reads the archive's copy", "broker"),
        Option(
            "topic",
            list_of(TOPIC, "a topic, several with commas between, or a pattern like dlq.*"),
            is_required=True,
        ),
        Option(
            "to",
            Kind("a topic", _target),
            "the target; if not given, each dead letter goes to the topic it is from",
        ),
        Option("since", MOMENT, "the earliest time"),
        Option("until", MOMENT, "the end, not included"),
        Option("run", TEXT.described("a run_id")),
        Option("tenant", TEXT.described("a tenant_id")),
        Option(
            "reason",
            TEXT.described("a part of a dead letter's last error"),
            "or its group's normalised reason",
        ),
        Option(
            "where",
            TEXT.described("a predicate of Spark SQL, like key = 'cart-1'"),
            f"over the columns {', '.join(columns_of('records'))}",
        ),
        Option(
            "limit",
            whole_number(1, MAX_OFFSET),
            "the most messages of one run, the oldest first; the next run goes on behind them",
        ),
        Option("rate", number(MIN_RATE), "the most messages a second"),
        Option(
            "name",
            pattern(_NAME, "letters, digits, points, dashes and underscores"),
            "the replay's name, under which a message is sent once",
        ),
        Option("keep_keys", TRUE_OR_FALSE, "send idempotency keys too", "false"),
        Option("apply", TRUE_OR_FALSE, "false only shows what would be sent", "false"),
    ),
    _check,
)
