"""Prepares rows for topics and caches, and finds those that the broker would refuse.

The broker refuses a whole batch for one bad row, at every try. So pipelines call `refusals` (for
topics) or `entry_refusals` (for caches) first, and put bad rows aside. `as_sent` removes what a
stored message cannot carry to another topic: a deadline that has passed, a partition that the
target lacks, and a topic that the message asked for. Must not know which rows are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.client.results import Version
from penstock.model.errors import NotFound
from penstock.model.limits import MAX_CACHE_KEY_BYTES, MAX_ENVELOPE_FIELD_BYTES, MAX_NAME_BYTES
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import RecordLog
from penstock.spark.options import BrokerSettings
from penstock.spark.schemas import RECORD_COLUMNS
from penstock.spark.sink_columns import TOPIC_COLUMNS

ENVELOPE = tuple(
    name for name in RECORD_COLUMNS if name in TOPIC_COLUMNS and name != "target_topic"
)
"""Columns of a stored message that the sink has too. The topic is the target's."""

ENVELOPE_FIELDS = {name: RECORD_COLUMNS[name] for name in ENVELOPE}

DEADLINE_MARGIN = timedelta(minutes=1)
"""The broker refuses a batch if one of its deadlines has passed when it is staged."""

_CONTROL = r"[\x00-\x1f\x7f-\x9f]"

_RETRY = ("retry_max_attempts", "retry_backoff_ms", "retry_max_backoff_ms")
_LIMITED = {"routing_label": "the label"} | {
    name: f"the {name}"
    for name in ("run_id", "step_id", "parent_step_id", "tenant_id", "idempotency_key")
}
"""Texts that the broker limits, and their names in errors."""


def partitions_of(broker: BrokerSettings, topics: Iterable[str]) -> dict[str, int]:
    """Returns how many partitions each topic has. Raises NotFound with all that are missing."""
    found: dict[str, int] = {}
    missing: list[str] = []
    with BrokerConnection(broker) as connection:
        records = RecordLog(connection, ())
        for topic in sorted(set(topics)):
            try:
                found[topic] = len(records.spans(topic))
            except NotFound:
                missing.append(topic)
    if missing:
        raise NotFound(
            f"{_listed(missing)} not exist at {broker.url}, and messages shall go there; run "
            f"`penstock topic create {missing[0]}`, or choose another target"
        )
    return found


def largest_message(broker: BrokerSettings) -> int | None:
    """Returns the most bytes of key and value that the broker accepts; None if it is too old."""
    with BrokerConnection(broker) as connection:
        answer = connection.call("GET", "/v1/version")
    return msgspec.json.decode(answer, type=Version).max_message_bytes


def refusals(
    topic: Column, max_bytes: int | None, columns: Sequence[str] = ENVELOPE
) -> list[Column]:
    """Returns columns that say why the broker would refuse a row, one for each reason, null if it
    would not. `columns` are those that the rows have; `topic` is where they go."""
    values = {
        name: (F.col(name) if name in columns else F.lit(None)).try_cast(RECORD_COLUMNS[name])
        for name in ENVELOPE
    }
    attempts, *backoffs = (values[name] for name in _RETRY)
    is_null = F.exists(F.map_values(values["routing_meta"]), lambda value: value.isNull())
    faults = {
        f"the topic's name is longer than {MAX_NAME_BYTES} bytes": F.octet_length(topic)
        > MAX_NAME_BYTES,
        "the topic's name has control characters in it": topic.rlike(_CONTROL),
        "the value is null or empty": F.coalesce(F.octet_length(values["value"]), F.lit(0)) == 0,
        "the meta has a null in it": is_null,
        "the retry policy has a negative number in it": F.least(F.lit(0), attempts, *backoffs) < 0,
    }
    for name, called in _LIMITED.items():
        is_long = F.octet_length(values[name]) > MAX_ENVELOPE_FIELD_BYTES
        faults[f"{called} is longer than {MAX_ENVELOPE_FIELD_BYTES} bytes"] = is_long
    found = [F.when(is_so, F.lit(fault)) for fault, is_so in faults.items()]
    return found if max_bytes is None else [*found, _too_large(values, max_bytes)]


def entry_refusals(key: Column, value: Column, max_bytes: int | None) -> list[Column]:
    """Returns columns that say why a cache would refuse a row, one for each reason, null if it
    would not. `max_bytes` is the broker's max_message_bytes, or None if it is not known."""
    faults = {
        "the key is null or empty": F.coalesce(F.octet_length(key), F.lit(0)) == 0,
        f"the key is longer than the {MAX_CACHE_KEY_BYTES} bytes that a cache takes": (
            F.octet_length(key) > MAX_CACHE_KEY_BYTES
        ),
        "the key has control characters, which a cache refuses": key.rlike(_CONTROL),
    }
    if max_bytes is not None:
        faults[f"the value is longer than max_message_bytes, {max_bytes}"] = (
            F.octet_length(value) > max_bytes
        )
    return [F.when(is_so, F.lit(fault)) for fault, is_so in faults.items()]


def _too_large(values: Mapping[str, Column], max_bytes: int) -> Column:
    """Uses the broker's own words."""
    size = F.octet_length(values["value"]) + F.coalesce(F.octet_length(values["key"]), F.lit(0))
    text = F.format_string(f"key and value are %d bytes; max_message_bytes is {max_bytes}", size)
    return F.when(size > max_bytes, text)


def as_sent(
    rows: DataFrame, target: str, partitions: Mapping[str, int], now: datetime
) -> DataFrame:
    """Returns the rows as the sink takes them. `target` is the column with the topic."""
    values = {name: F.col(name) for name in ENVELOPE}
    values["deadline"] = F.when(
        F.try_to_timestamp("deadline") > F.lit(now + DEADLINE_MARGIN), F.col("deadline")
    )
    values["partition_override"] = F.when(
        F.col("partition_override") < _counts(partitions, F.col(target)),
        F.col("partition_override"),
    )
    return rows.select(
        F.col(target).alias("topic"), *(column.alias(name) for name, column in values.items())
    )


def _counts(partitions: Mapping[str, int], topic: Column) -> Column:
    pairs = chain.from_iterable((F.lit(name), F.lit(count)) for name, count in partitions.items())
    return F.try_element_at(F.create_map(*pairs), topic)


def _listed(topics: list[str]) -> str:
    names = ", ".join(repr(topic) for topic in topics)
    return f"topic {names} does" if len(topics) == 1 else f"topics {names} do"
