"""The schemas of logs and caches in Spark's types, and the broker's batches made to fit them.

Invariant: a batch returned by `Shape.fit` has exactly the columns, order, types and nullability of
the Spark schema, because Spark checks the first batch only. Nothing is copied. The columns that the
broker does not send (topic, partition and null columns) are made once. Must not know how rows are
fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.model.errors import InvalidArgument
from penstock.spark.bounds import LogName

STRING, INTEGER, LONG, TIMESTAMP = StringType(), IntegerType(), LongType(), TimestampType()
BINARY = BinaryType()

POSITION_COLUMNS: dict[LogName, dict[str, DataType]] = {
    "records": {"topic": STRING, "partition": INTEGER},
    "events": {"stream": STRING},
    "journal": {},
}
"""Columns that follow from what is read. The journal's are sent like others."""

RECORD_COLUMNS: dict[str, DataType] = {
    "offset": LONG,
    "timestamp": TIMESTAMP,
    "key": STRING,
    "value": STRING,
    "run_id": STRING,
    "step_id": STRING,
    "parent_step_id": STRING,
    "tenant_id": STRING,
    "idempotency_key": STRING,
    "target_topic": STRING,
    "partition_override": INTEGER,
    "deadline": STRING,
    "retry_max_attempts": LONG,
    "retry_backoff_ms": LONG,
    "retry_max_backoff_ms": LONG,
    "routing_label": STRING,
    "routing_meta": MapType(STRING, STRING),
    "dlq_original_topic": STRING,
    "dlq_original_partition": INTEGER,
    "dlq_original_offset": LONG,
    "dlq_group": STRING,
    "dlq_attempts": LONG,
    "dlq_last_error": STRING,
    "dlq_routed_at_ms": LONG,
}
JOURNAL_COLUMNS: dict[str, DataType] = {
    "position": LONG,
    "timestamp": TIMESTAMP,
    "kind": STRING,
    "topic": STRING,
    "partition": INTEGER,
    "offset": LONG,
    "group": STRING,
    "owner": STRING,
    "attempt": INTEGER,
    "reason": STRING,
    "run_id": STRING,
    "step_id": STRING,
    "parent_step_id": STRING,
    "tenant_id": STRING,
    "routing_label": STRING,
    "retry_at": TIMESTAMP,
    "produced_at": TIMESTAMP,
    "delivered_at": TIMESTAMP,
    "tenant": STRING,
    "namespace": STRING,
    "resource_kind": STRING,
}

EVENT_COLUMNS: dict[str, DataType] = {"offset": LONG, "timestamp": TIMESTAMP, "payload": BINARY}
SENT_COLUMNS: dict[LogName, dict[str, DataType]] = {
    "records": RECORD_COLUMNS,
    "events": EVENT_COLUMNS,
    "journal": JOURNAL_COLUMNS,
}
"""The columns that the broker sends."""

CACHE_COLUMNS: dict[str, DataType] = {
    "key": STRING,
    "value": BINARY,
    "version": LONG,
    "expires_at": TIMESTAMP,
}

_NAMES: dict[LogName, str] = {
    "records": "log=records",
    "events": "a stream",
    "journal": "log=journal",
}


def struct(columns: Mapping[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def columns_of(log: LogName) -> dict[str, DataType]:
    return POSITION_COLUMNS[log] | SENT_COLUMNS[log]


def position_column(log: LogName) -> str:
    """The column with a row's position in its log."""
    return "position" if log == "journal" else "offset"


def schema_of(log: LogName, columns: Iterable[str] = ()) -> StructType:
    """Returns the schema of the given columns, in that order; of all columns if none are given."""
    return _chosen(_NAMES[log], columns_of(log), columns)


def cache_schema(columns: Iterable[str] = ()) -> StructType:
    return _chosen("a cache", CACHE_COLUMNS, columns)


def _chosen(of: str, known: Mapping[str, DataType], columns: Iterable[str]) -> StructType:
    wanted = tuple(columns) or tuple(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidArgument(
            f"option columns: {of} has no {', '.join(unknown)}; it has {', '.join(known)}"
        )
    return struct({name: known[name] for name in wanted})


def check(log: LogName, schema: StructType) -> None:
    """Checks a schema that the user gave. It may leave columns out, but not change their types."""
    check_columns(_NAMES[log], columns_of(log), schema)


def check_columns(of: str, known: Mapping[str, DataType], schema: StructType) -> None:
    for field in schema.fields:
        if field.name not in known:
            raise InvalidArgument(
                f"the schema has a column {field.name}, which {of} does not have; it has "
                f"{', '.join(known)}"
            )
        if field.dataType != known[field.name]:
            raise InvalidArgument(
                f"the schema says that {field.name} is {field.dataType.simpleString()}; it is "
                f"{known[field.name].simpleString()}: cast it after reading"
            )


def requested_columns(log: LogName, schema: StructType) -> tuple[str, ...]:
    """Returns the columns to ask the broker for, or none if it shall send all. The position is
    always among them: a read that breaks off continues after it."""
    position = position_column(log)
    own = SENT_COLUMNS[log]
    wanted = {position, *(name for name in schema.names if name in own)}
    return () if wanted == set(own) else tuple(name for name in own if name in wanted)


class Shape:
    """Makes batches of one topic and partition, or of one stream, fit a schema."""

    def __init__(self, log: LogName, schema: StructType, topic: str, partition: int) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._position = position_column(log)
        self._constants: dict[str, pa.Array] = {}
        self._place: dict[str, pa.Scalar] = {}
        if log == "records":
            self._place = {
                "topic": pa.scalar(topic, pa.string()),
                "partition": pa.scalar(partition, pa.int32()),
            }
        elif log == "events":
            self._place = {"stream": pa.scalar(topic, pa.string())}

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch with the schema's columns. Those that were not sent are null."""
        rows, sent = batch.num_rows, set(batch.schema.names)
        columns = [
            batch.column(field.name) if field.name in sent else self._constant(field, rows)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def last_position(self, batch: pa.RecordBatch) -> int:
        return int(batch.column(self._position)[-1].as_py())

    def _constant(self, field: pa.Field, rows: int) -> pa.Array:
        """Returns a column of one value, made once for the largest batch and shared."""
        made = self._constants.get(field.name)
        if made is None or len(made) < rows:
            scalar = self._place.get(field.name)
            made = pa.nulls(rows, field.type) if scalar is None else pa.repeat(scalar, rows)
            self._constants[field.name] = made
        return made if len(made) == rows else made.slice(0, rows)
