"""What a user's function says of rows: a topic, a label, a meta, another value, or why it cannot.

Invariant: every row that goes in comes out once, with a verdict or an error; what a function raises
concerns the row it was called with, and no other. The columns that go in come out unchanged. Runs
in executors, on batches of Arrow. Must not know where rows go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import MapType, StringType, StructField, StructType

from penstock.spark.pipelines.functions import UserFunction

MAX_ERROR_CHARS = 2000

_TEXT, _TEXTS = StringType(), MapType(StringType(), StringType())

COLUMNS = StructType(
    [
        StructField("said_topic", _TEXT),
        StructField("said_label", _TEXT),
        StructField("said_meta", _TEXTS),
        StructField("said_value", _TEXT),
        StructField("error", _TEXT),
    ]
)
_ARROW = pa.schema(
    [
        pa.field(one.name, pa.map_(pa.string(), pa.string()) if one.dataType == _TEXTS else "str")
        for one in COLUMNS.fields
    ]
)


class Verdict(NamedTuple):
    """Nothing said at all: no error, and nowhere to go."""

    topic: str | None = None
    label: str | None = None
    meta: dict[str, str] | None = None
    value: str | None = None
    error: str | None = None


NOTHING = Verdict()


class Unfit(Exception):
    """The function has returned something that is no verdict."""


def judged(rows: DataFrame, function: UserFunction) -> DataFrame:
    """The rows with `COLUMNS` beside their own. `function` is of any kind but a frame's."""
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


def verdict_of(said: Any) -> Verdict:
    """Of what a function returned. Raises Unfit."""
    if said is None:
        return NOTHING
    if isinstance(said, str):
        return Verdict(label=_text("label", said))
    if not isinstance(said, Mapping):
        raise Unfit(f"the function returned {_shown(said)}; it returns a label, a dict or None")
    unknown = [key for key in said if key not in ("topic", "label", "meta", "value")]
    if unknown:
        raise Unfit(
            f"the function's dict has {unknown[0]!r}; it may have topic, label, meta, value"
        )
    texts = {name: _text(name, said.get(name)) for name in ("topic", "label", "value")}
    if said.get("value") is not None and texts["value"] is None:
        raise Unfit("the function's value is empty, which is no message")
    return Verdict(meta=_meta(said.get("meta")), **texts)


def verdicts_of_rows(function: UserFunction, arguments: Sequence[Any]) -> list[Verdict]:
    call = function.callable()
    return [_called(function, lambda one: verdict_of(call(one)), one) for one in arguments]


def verdicts_of_series(function: UserFunction, values: Any) -> list[Verdict]:
    """`values` is a pandas Series. One that cannot be judged whole is judged one by one."""
    call = function.callable()
    try:
        return [verdict_of(_present(label)) for label in _labels(call(values), len(values))]
    except Exception:  # noqa: BLE001 - the row that is to blame is found and keeps its error
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
    """Arrow gives a map as pairs."""
    maps = [field.name for field in batch.schema if pa.types.is_map(field.type)]
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        for name in maps:
            row[name] = None if row[name] is None else dict(row[name])
    return rows


def _called(function: UserFunction, judge: Callable[[Any], Verdict], argument: Any) -> Verdict:
    try:
        return judge(argument)
    except Unfit as error:
        said = str(error)
    except Exception as error:  # noqa: BLE001 - it is the user's, and is kept with its row
        said = function.place_of(error)
    return Verdict(error=_sayable(said)[:MAX_ERROR_CHARS])


def _labels(said: Any, count: int) -> list[Any]:
    labels = said.tolist() if hasattr(said, "tolist") else said
    if not isinstance(labels, list):
        raise Unfit(f"the function returned {_shown(said)}, and no Series")
    if len(labels) != count:
        raise Unfit(f"the function returned {len(labels)} labels for {count} values")
    return labels


def _present(label: Any) -> Any:
    """pandas has several ways to say that there is nothing; none of them equals itself, or it has
    no truth."""
    try:
        return label if bool(label == label) else None
    except TypeError:
        return None


def _text(name: str, said: Any) -> str | None:
    """Empty is none, as it is to the broker."""
    if said is None:
        return None
    if not isinstance(said, str):
        raise Unfit(f"the function's {name} is {_shown(said)}, and no string")
    if _sayable(said) != said:
        raise Unfit(f"the function's {name} has characters that are none in UTF-8")
    return str(said) or None


def _meta(said: Any) -> dict[str, str] | None:
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise Unfit(f"the function's meta is {_shown(said)}, and no dict")
    return {_meta_text(key): _meta_text(value) for key, value in said.items()}


def _meta_text(said: Any) -> str:
    """A score is a number in the user's hands, and text in a message."""
    plain = said.item() if hasattr(said, "item") else said
    try:
        text = plain if isinstance(plain, str) else json.dumps(plain)
    except (TypeError, ValueError):
        raise Unfit(f"the function's meta has {_shown(said)} in it, and no text") from None
    return _text("meta", text) or ""


def _sayable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(said: Any) -> str:
    text = repr(said)
    return f"{text if len(text) <= 100 else text[:99] + '…'} ({type(said).__name__})"
