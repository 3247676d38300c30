"""Messages that are produced again, and the topics they go to.

Invariant: what leaves `as_sent` is taken by the sink and the broker whatever the stored message
was: a deadline that has passed, a partition that the target does not have and a topic that the
message once asked for itself do not travel. Must not know which messages are sent, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import chain

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType

from penstock.model.errors import NotFound
from penstock.spark.broker import Broker
from penstock.spark.logs import Records
from penstock.spark.options import BrokerSettings
from penstock.spark.schemas import RECORD_COLUMNS

ENVELOPE = (
    "key",
    "value",
    "run_id",
    "step_id",
    "parent_step_id",
    "tenant_id",
    "idempotency_key",
    "partition_override",
    "deadline",
    "retry_max_attempts",
    "retry_backoff_ms",
    "retry_max_backoff_ms",
    "routing_label",
    "routing_meta",
)
"""Columns of a stored message that are columns of the sink too; its topic is the target's."""

ENVELOPE_FIELDS = StructType([StructField(name, RECORD_COLUMNS[name]) for name in ENVELOPE])

DEADLINE_MARGIN = timedelta(minutes=1)
"""The broker refuses a batch with a deadline that has passed when it is staged."""


def partitions_of(broker: BrokerSettings, topics: Iterable[str]) -> dict[str, int]:
    """How many partitions each has; NotFound names all that are missing."""
    found: dict[str, int] = {}
    missing: list[str] = []
    with Broker(broker) as connection:
        records = Records(connection, ())
        for topic in sorted(set(topics)):
            try:
                found[topic] = len(records.spans(topic))
            except NotFound:
                missing.append(topic)
    if missing:
        raise NotFound(
            f"{_listed(missing)} not exist at {broker.url}, and messages are to go there; create "
            f"what is meant with `penstock topic create {missing[0]}`, or choose another target"
        )
    return found


def as_sent(
    rows: DataFrame, target: str, partitions: Mapping[str, int], now: datetime
) -> DataFrame:
    """The rows as the sink takes them; `target` is the column that names the topic."""
    said = {name: F.col(name) for name in ENVELOPE}
    said["deadline"] = F.when(
        F.try_to_timestamp("deadline") > F.lit(now + DEADLINE_MARGIN), F.col("deadline")
    )
    said["partition_override"] = F.when(
        F.col("partition_override") < _counts(partitions, F.col(target)),
        F.col("partition_override"),
    )
    return rows.select(
        F.col(target).alias("topic"), *(column.alias(name) for name, column in said.items())
    )


def _counts(partitions: Mapping[str, int], topic: Column) -> Column:
    pairs = chain.from_iterable((F.lit(name), F.lit(count)) for name, count in partitions.items())
    return F.try_element_at(F.create_map(*pairs), topic)


def _listed(topics: list[str]) -> str:
    names = ", ".join(repr(topic) for topic in topics)
    return f"topic {names} does" if len(topics) == 1 else f"topics {names} do"
