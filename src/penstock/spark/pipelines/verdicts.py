"""The verdicts of a user's function on rows: a topic, a label, a meta, another value, or an error.

Invariant: every row comes out once, with a verdict or an error, and its columns unchanged. An
exception of the function concerns only the row it was called with. Runs on the executors, on
batches of Arrow. Must not know where rows go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import MapType, StringType, StructType

from penstock.spark.pipelines.functions import UserFunction
from penstock.spark.schemas import STRING, struct

MAX_ERROR_CHARS = 2000

_TEXTS = MapType(StringType(), StringType())

COLUMNS = struct(
    {
        "verdict_topic": STRING,
        "verdict_label": STRING,
        "verdict_meta": _TEXTS,
        "verdict_value": STRING,
        "error": STRING,
    }
)
_ARROW = pa.schema(
    [
        pa.field(one.name, pa.map_(pa.string(), pa.string()) if one.dataType == _TEXTS else "str")
        for one in COLUMNS.fields
    ]
)


class Verdict(NamedTuple):
    """The function's answer for a row. If all members are None, it returned nothing."""

    topic: str | None = None
    label: str | None = None
    meta: dict[str, str] | None = None
    value: str | None = None
    error: str | None = None


NOTHING = Verdict()


class NotAVerdict(Exception):
    """The function has returned something that is not a verdict."""


def judged(rows: DataFrame, function: UserFunction) -> DataFrame:
    """Returns the rows with `COLUMNS` added. `function` is of any kind except of frames."""
    schema = StructType([*rows.schema.fields, *COLUMNS.fields])

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        judge_batch = _judge(function)
        for batch in batches:
            verdicts = judge_batch(batch)
            columns = [
                pa.array([verdict[at] for verdict in verdicts], field.type)
                for at, field in enumerate(_ARROW)
            ]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], names=[*batch.schema.names, *_ARROW.names]
            )

    return rows.mapInArrow(judge, schema)


def verdict_of(given: Any) -> Verdict:
    """Makes a verdict of a function's result, or raises NotAVerdict."""
    if given is None:
        return NOTHING
    if isinstance(given, str):
        return Verdict(label=_text("label", given))
    if not isinstance(given, Mapping):
        raise NotAVerdict(
            f"the function returned {_shown(given)}; it returns a label, a dict or None"
        )
    unknown = [key for key in given if key not in ("topic", "label", "meta", "value")]
    if unknown:
        raise NotAVerdict(
            f"the function's dict has {unknown[0]!r}; it may have topic, label, meta, value"
        )
    texts = {name: _text(name, given.get(name)) for name in ("topic", "label", "value")}
    if given.get("value") is not None and texts["value"] is None:
        raise NotAVerdict("the function's value is empty, and a message needs one")
    return Verdict(meta=_meta(given.get("meta")), **texts)


def verdicts_of_rows(function: UserFunction, arguments: Sequence[Any]) -> list[Verdict]:
    call = function.callable()
    return [_called(function, lambda one: verdict_of(call(one)), one) for one in arguments]


def verdicts_of_series(function: UserFunction, values: Any) -> list[Verdict]:
    """Judges a pandas Series as a whole, or value by value if that fails."""
    call = function.callable()
    try:
        return [verdict_of(_present(label)) for label in _labels(call(values), len(values))]
    except Exception:  # noqa: BLE001 - the next step finds the row that caused it
        singles = [values.iloc[at : at + 1].reset_index(drop=True) for at in range(len(values))]
    return [
        _called(function, lambda one: verdict_of(_present(_labels(call(one), 1)[0])), one)
        for one in singles
    ]


def _judge(function: UserFunction) -> Callable[[pa.RecordBatch], list[Verdict]]:
    if function.kind == "series":
        return lambda batch: verdicts_of_series(function, batch.column("value").to_pandas())
    if function.kind == "value":
        return lambda batch: verdicts_of_rows(function, batch.column("value").to_pylist())
    return lambda batch: verdicts_of_rows(function, _dicts(batch))


def _dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows as dicts. Arrow returns a map as pairs."""
    maps = [field.name for field in batch.schema if pa.types.is_map(field.type)]
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        for name in maps:
            row[name] = None if row[name] is None else dict(row[name])
    return rows


def _called(function: UserFunction, judge: Callable[[Any], Verdict], argument: Any) -> Verdict:
    try:
        return judge(argument)
    except NotAVerdict as error:
        given = str(error)
    except Exception as error:  # noqa: BLE001 - an error of the user's function is kept with its row
        given = function.describe(error)
    return Verdict(error=_encodable(given)[:MAX_ERROR_CHARS])


def _labels(given: Any, count: int) -> list[Any]:
    labels = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(labels, list):
        raise NotAVerdict(f"the function returned {_shown(given)}, not a Series")
    if len(labels) != count:
        raise NotAVerdict(f"the function returned {len(labels)} labels for {count} values")
    return labels


def _present(label: Any) -> Any:
    """Turns the missing values of pandas into None: they do not equal themselves."""
    try:
        return label if bool(label == label) else None
    except TypeError:
        return None


def _text(name: str, given: Any) -> str | None:
    """Treats an empty text as none, as the broker does."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise NotAVerdict(f"the function's {name} is {_shown(given)}, not a string")
    if _encodable(given) != given:
        raise NotAVerdict(f"the function's {name} has characters that UTF-8 does not have")
    return str(given) or None


def _meta(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise NotAVerdict(f"the function's meta is {_shown(given)}, not a dict")
    return {_meta_text(key): _meta_text(value) for key, value in given.items()}


def _meta_text(given: Any) -> str:
    """Turns a number, such as a score, into text."""
    plain = given.item() if hasattr(given, "item") else given
    try:
        text = plain if isinstance(plain, str) else json.dumps(plain)
    except (TypeError, ValueError):
        raise NotAVerdict(f"the function's meta has {_shown(given)} in it, not a text") from None
    return _text("meta", text) or ""


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(given: Any) -> str:
    text = repr(given)
    return f"{text if len(text) <= 100 else text[:99] + '…'} ({type(given).__name__})"
