"""The sources and sinks of a user's pipeline, as its decorator names them: `kind:name`.

Invariant: an unknown source or sink is refused when the file is loaded, with what is allowed. Must
not know Spark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.model.errors import InvalidArgument
from penstock.spark.pipelines.names import is_own_table

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
