"""A user's own pipeline: a function of DataFrames, with its sources and its sink.

    from penstock.spark import pipeline

    @pipeline(source="orders", sink="table:totals", mode="complete")
    def totals(orders):
        return orders.groupBy("key").count()

Invariant: the function only describes the computation. It is called once, when the run starts, and
its result is checked against the sink before the first batch. A batch reaches its sink once. An
unknown source or sink is refused when the file is loaded, with what is allowed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from penstock.model.errors import InvalidArgument
from penstock.model.options import TEXT, TRUE_OR_FALSE, Option, number, whole_number
from penstock.spark.pipelines.names import BUILT_IN, is_own_table
from penstock.spark.running.pipeline import Pipeline

Mode = Literal["append", "update", "complete"]

MODES = ("append", "update", "complete")
TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
SOURCES = "topic:NAME (a pattern, or several with commas), journal, table:NAME or parquet:PATH"
SINKS = "topic:NAME, cache:TENANT/NAMESPACE/CACHE or table:NAME"


@dataclass(frozen=True)
class FlowEndpoint:
    """`kind` is topic, journal, table, parquet or cache."""

    kind: str
    name: str

    @property
    def is_stream(self) -> bool:
        """True if it can be read as a stream."""
        return self.kind in ("topic", "journal")

    def is_fed_by(self, sink: FlowEndpoint) -> bool:
        """Returns whether rows written to the sink are read here."""
        if self.kind != sink.kind:
            return False
        if self.kind == "topic":
            return any(fnmatchcase(sink.name, each.strip()) for each in self.name.split(","))
        return self.name == sink.name

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(eq=False, repr=False)
class UserPipeline:
    """The result of `@pipeline`. It can still be called like the function, as in a test."""

    function: Callable[..., Any]
    sources: Mapping[str, FlowEndpoint | UserPipeline]
    sink: FlowEndpoint | None
    _: KW_ONLY
    name: str
    mode: Mode
    source_options: Mapping[str, Any]
    stream: InitVar[bool | None]
    partition_by: tuple[str, ...]
    rejects: str | None

    def __post_init__(self, stream: bool | None) -> None:
        self.is_stream = self._can_stream() if stream is None else stream
        self.__doc__ = self.function.__doc__
        self.__name__ = self.function.__name__
        self._check(stream)

    def __call__(self, *frames: Any, **named: Any) -> Any:
        return self.function(*frames, **named)

    def as_pipeline(self) -> Pipeline:
        return Pipeline(self.name, self.summary, self._start, self.settings())

    @property
    def summary(self) -> str:
        text = inspect.getdoc(self.function)
        return text.splitlines()[0] if text else f"{', '.join(self._origins())} → {self.sink}"

    def settings(self) -> tuple[Option, ...]:
        """Returns the function's keyword-only parameters, as options."""
        return tuple(
            _option(self.name, each)
            for each in inspect.signature(self.function).parameters.values()
            if each.kind is each.KEYWORD_ONLY
        )

    def endpoints(self) -> list[FlowEndpoint]:
        """Returns the sources, including those of pipelines that feed this one directly."""
        return [
            endpoint
            for source in self.sources.values()
            for endpoint in ([source] if isinstance(source, FlowEndpoint) else source.endpoints())
        ]

    def _start(self, run: Any) -> None:
        from penstock.spark.pipelines.flow import start

        start(self, run)

    def _can_stream(self) -> bool:
        return any(endpoint.is_stream for endpoint in self.endpoints())

    def _origins(self) -> list[str]:
        return [
            str(source) if isinstance(source, FlowEndpoint) else source.name
            for source in self.sources.values()
        ]

    def _check(self, stream: bool | None) -> None:
        where = f"pipeline {self.name}"
        if not TABLE_NAME.fullmatch(self.name):
            raise InvalidArgument(f"{where}: a name may have letters, digits, - and _ only")
        if self.name in BUILT_IN:
            raise InvalidArgument(f"{where}: a built-in pipeline has that name: choose another")
        if self.mode not in MODES:
            raise InvalidArgument(
                f"{where}: mode {self.mode!r} is not allowed; it takes {', '.join(MODES)}"
            )
        if stream and not self._can_stream():
            raise InvalidArgument(f"{where}: only topics and the journal can be read as a stream")
        kind = self.sink.kind if self.sink else ""
        if self.is_stream and kind == "table" and self.mode == "update":
            raise InvalidArgument(
                f"{where}: a table cannot update single rows; use mode='complete', which replaces "
                "them all, or a cache"
            )
        if self.is_stream and kind == "topic" and self.mode == "complete":
            raise InvalidArgument(
                f"{where}: mode='complete' would produce every row again with every batch; use "
                "mode='update', or a cache or a table"
            )
        if not self.is_stream and kind == "topic":
            raise InvalidArgument(
                f"{where}: it is not a stream, so each run would produce every row again; use a "
                "table or a cache"
            )
        if self.partition_by and kind != "table":
            raise InvalidArgument(f"{where}: partition_by is for a table")
        if self.rejects and (self.mode == "complete" or (self.sink and not self.is_stream)):
            raise InvalidArgument(
                f"{where}: rejects are rows of a stream's batch; without a stream, or with "
                "mode='complete', each would be rejected again every time"
            )


def pipeline(
    *,
    source: Any,
    sink: str | None = None,
    name: str | None = None,
    mode: Mode = "append",
    options: Mapping[str, Any] | None = None,
    stream: bool | None = None,
    partition_by: str | Sequence[str] = (),
    rejects: str | None = None,
) -> Callable[[Callable[..., Any]], UserPipeline]:
    """Makes a pipeline of a function of DataFrames.

    `source`: a topic, "journal", "table:name", "parquet:/path" or another such function; several in
    a list, in the order of the parameters, or in a dict by their names. `sink`: "topic:name",
    "cache:tenant/namespace/cache" or "table:name"; None for a pipeline that only feeds others.
    `options` are options of reading format("penstock"). `stream`: False reads everything again each
    time. `rejects`: a column; rows where it is not null go to the table `rejects`.
    """

    def decorate(function: Callable[..., Any]) -> UserPipeline:
        chosen = name or function.__name__
        return UserPipeline(
            function,
            _sources(chosen, function, source),
            None if sink is None else sink_of(sink),
            name=chosen,
            mode=mode,
            source_options=dict(options or {}),
            stream=stream,
            partition_by=(partition_by,) if isinstance(partition_by, str) else tuple(partition_by),
            rejects=rejects,
        )

    return decorate


def _sources(
    name: str, function: Callable[..., Any], given: Any
) -> dict[str, FlowEndpoint | UserPipeline]:
    """Returns the sources by the names of their parameters."""
    parameters = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if not isinstance(given, Mapping):
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        if len(listed) != len(parameters):
            raise InvalidArgument(
                f"pipeline {name} takes {len(parameters)} frames ({', '.join(parameters)}) and has "
                f"{len(listed)} sources"
            )
        given = dict(zip(parameters, listed, strict=True))
    elif set(given) != set(parameters):
        raise InvalidArgument(
            f"the function of pipeline {name} has the parameters {', '.join(parameters)}, but its "
            f"sources are named {', '.join(given)}: they must match"
        )
    return {parameter: _source(name, given[parameter]) for parameter in parameters}


def _source(name: str, given: object) -> FlowEndpoint | UserPipeline:
    if isinstance(given, UserPipeline):
        return given
    if not isinstance(given, str):
        raise InvalidArgument(
            f"pipeline {name}: a source is {SOURCES}, or another pipeline; not {given!r}"
        )
    return source_of(given)


def source_of(text: str) -> FlowEndpoint:
    if text.strip() == "journal":
        return FlowEndpoint("journal", "")
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = "topic", text
    return _checked(kind, name, text, "source", ("topic", "table", "parquet"), SOURCES)


def sink_of(text: str) -> FlowEndpoint:
    kind, _, name = text.partition(":")
    kind = kind.strip()
    found = _checked(kind, name, text, "sink", ("topic", "cache", "table"), SINKS)
    if kind == "cache" and len(found.name.split("/")) != 3:
        raise InvalidArgument(f"sink {text!r} is not allowed; it takes {SINKS}")
    if kind == "table" and is_own_table(found.name):
        raise InvalidArgument(
            f"sink {text!r} is the name of one of Penstock's own tables: choose another"
        )
    return found


def _checked(
    kind: str, name: str, text: str, what: str, kinds: tuple[str, ...], takes: str
) -> FlowEndpoint:
    kind, name = kind.strip(), name.strip()
    is_table = kind == "table"
    if kind not in kinds or not name or (is_table and not TABLE_NAME.fullmatch(name)):
        raise InvalidArgument(f"{what} {text!r} is not allowed; it takes {takes}")
    return FlowEndpoint(kind, name)


_KINDS = {bool: TRUE_OR_FALSE, int: whole_number(), float: number(), str: TEXT}


def _option(pipeline_name: str, parameter: inspect.Parameter) -> Option:
    """`*, minimum: int = 3` is an option of the type of its default, or of its annotation."""
    has_default = parameter.default is not parameter.empty
    kind = type(parameter.default) if has_default else parameter.annotation
    by_name: dict[object, type] = {each.__name__: each for each in _KINDS}
    kind = by_name.get(kind, kind)
    if kind is parameter.empty:
        kind = str
    if kind not in _KINDS:
        raise InvalidArgument(
            f"pipeline {pipeline_name}: option {parameter.name} is a {kind}; it can be a bool, an "
            "int, a float or a str"
        )
    return Option(
        parameter.name,
        _KINDS[kind],
        default=str(parameter.default) if has_default else None,
        is_required=not has_default,
    )
