"""The columns that a DataFrame may have for the sink: names, types, and types when sent.

Invariant: the broker accepts the names and types of every schema that passes the check; it refuses
wrong values by row. `as_sent` gives every column the type of the wire, without looking at its
values. Must not know how rows are sent.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from penstock.model.errors import InvalidArgument

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_NESTED = (StructType, MapType, ArrayType, VariantType)
_UTC = pa.timestamp("us", "UTC")
_TEXTS = (pa.string(), pa.large_string())
_BYTES = (*_TEXTS, pa.binary(), pa.large_binary())

PAYLOAD, KEY, TEXT, INT, LONG, INSTANT, LABELS = (
    "string or binary",
    "string or binary that holds UTF-8",
    "string",
    "int",
    "long",
    "timestamp, or string in RFC 3339",
    "map<string,string>",
)
"""The kinds of columns, in the words of the errors."""

TOPIC_COLUMNS = {
    "value": PAYLOAD,
    "key": KEY,
    "topic": TEXT,
    "run_id": TEXT,
    "step_id": TEXT,
    "parent_step_id": TEXT,
    "tenant_id": TEXT,
    "idempotency_key": TEXT,
    "target_topic": TEXT,
    "partition_override": INT,
    "deadline": INSTANT,
    "retry_max_attempts": LONG,
    "retry_backoff_ms": LONG,
    "retry_max_backoff_ms": LONG,
    "routing_label": TEXT,
    "routing_meta": LABELS,
}
STREAM_COLUMNS = {"payload": PAYLOAD}
CACHE_COLUMNS = {"key": KEY, "value": PAYLOAD, "ttl_ms": LONG}


_KINDS = TOPIC_COLUMNS | CACHE_COLUMNS | STREAM_COLUMNS


def check_for_topics(schema: StructType, *, topic: str) -> None:
    """`topic` is for rows without one; if it is empty, there must be a column `topic`."""
    _check(schema, TOPIC_COLUMNS)
    if "value" not in schema.names:
        raise InvalidArgument(
            "the DataFrame has no column `value`, the payload of the messages; make one from the "
            "other columns, for example with select(to_json(struct('*')).alias('value'))"
        )
    if isinstance(schema["value"].dataType, NullType):
        raise InvalidArgument("the column `value` is null in every row: there is nothing to store")
    if not topic and "topic" not in schema.names:
        raise InvalidArgument(
            "the target is missing: set the option `topic`, `stream` or `cache`, or give the "
            "DataFrame a column `topic`"
        )


def check_for_stream(schema: StructType) -> None:
    _check(schema, STREAM_COLUMNS)
    if "payload" not in schema.names:
        raise InvalidArgument(
            "the DataFrame has no column `payload`, the bytes of the events; make one from the "
            "other columns, for example with select(to_json(struct('*')).alias('payload'))"
        )
    if isinstance(schema["payload"].dataType, NullType):
        raise InvalidArgument("the column `payload` is null in every row: there are no events")


def check_for_cache(schema: StructType) -> None:
    _check(schema, CACHE_COLUMNS)
    for name in ("key", "value"):
        if name not in schema.names:
            raise InvalidArgument(
                f"the DataFrame has no column `{name}`; a cache takes key and value, and ttl_ms "
                "if it is there. A value that is null deletes its key"
            )


def as_sent(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch with the types of the wire. Only columns of other types are copied."""
    arrays = [
        _array_as_sent(name, array)
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.record_batch(arrays, names=batch.schema.names)


def _check(schema: StructType, known: dict[str, str]) -> None:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise InvalidArgument(f"the DataFrame has several columns `{twice[0]}`")
    unknown = [f"`{name}`" for name in schema.names if name not in known]
    if unknown:
        raise InvalidArgument(
            f"the sink does not take {', '.join(unknown)}: leave it out, or put it into the "
            f"{'value' if 'value' in known else 'payload'} with to_json(struct(...)). It takes "
            f"{', '.join(known)}"
        )
    for field in schema.fields:
        if not _fits(field.dataType, known[field.name]):
            raise InvalidArgument(_misfit(field, known[field.name]))


def _fits(given: DataType, kind: str) -> bool:
    if isinstance(given, NullType):
        return True
    if kind in (PAYLOAD, KEY):
        return isinstance(given, StringType | BinaryType)
    if kind == TEXT:
        return isinstance(given, StringType)
    if kind in (INT, LONG):
        return isinstance(given, _INTEGERS)
    if kind == INSTANT:
        return isinstance(given, StringType | TimestampType)
    return (
        isinstance(given, MapType)
        and isinstance(given.keyType, StringType)
        and isinstance(given.valueType, StringType)
    )


def _misfit(field: StructField, kind: str) -> str:
    name = field.name
    if kind == LABELS:
        fix = f"cast({name} as map<string,string>)"
    elif kind == INSTANT:
        fix = f"cast({name} as timestamp)"
    elif kind in (INT, LONG):
        fix = f"cast({name} as {kind})"
    elif isinstance(field.dataType, _NESTED):
        fix = f"to_json({name})"
    else:
        fix = f"cast({name} as string)"
    return (
        f"the column `{name}` is {field.dataType.simpleString()}, and the sink takes {kind}; "
        f"convert it with {fix}"
    )


def _array_as_sent(name: str, array: Any) -> Any:
    kind = _KINDS[name]
    if kind == PAYLOAD:
        return array if array.type in _BYTES else _cast(name, array, pa.string())
    if kind in (KEY, TEXT):
        return array if array.type in _TEXTS else _cast(name, array, pa.string())
    if kind == INSTANT:
        # Spark labels timestamps with the session's time zone; their values are in UTC.
        wanted = _UTC if pa.types.is_timestamp(array.type) else pa.string()
        return array if array.type in _TEXTS else _cast(name, array, wanted)
    if kind == LABELS:
        wanted = pa.map_(pa.string(), pa.string())
    else:
        wanted = pa.int32() if kind == INT else pa.int64()
    return _cast(name, array, wanted)


def _cast(name: str, array: Any, wanted: Any) -> Any:
    if array.type == wanted:
        return array
    try:
        return array.cast(wanted)
    except pa.ArrowInvalid as error:
        raise InvalidArgument(
            f"the column `{name}` has a value that cannot be sent: {error}"
        ) from None
