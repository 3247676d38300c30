"""The journal: where it begins and ends, and its rows. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.client.calls import Call, list_of, query_of, reader
from penstock.model.journal import JournalReport


def journal_offsets(*, fresh: bool = False, time_ms: int | None = None) -> Call[JournalReport]:
    """Where the journal begins and ends, and where a time begins in it. `fresh`: once everything
    that was durable when this was asked for can be read; that may take a while."""
    query = query_of(fresh="true" if fresh else "false", time_ms=time_ms)
    return Call("GET", f"/v1/journal/offsets?{query}", reader(JournalReport))


def journal_path(
    from_: int | None, to: int | None, columns: Iterable[str], only: Mapping[str, str | int | None]
) -> str:
    """Where rows of the journal are found, as lines."""
    names = ",".join(list_of(columns, "columns")) or None
    wanted = {"from": from_, "to": to, "columns": names, "format": "ndjson"}
    return f"/v1/journal?{query_of(**wanted, **only)}"
