"""The journal: where it begins and ends, its rows, and how far they are archived. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.client.calls import Call, encode, list_of, query_of, reader
from penstock.model.journal import JournalArchive, JournalReport
from penstock.model.limits import MAX_FRESH_WAIT_MS


def journal_offsets(*, fresh: bool = False, time_ms: int | None = None) -> Call[JournalReport]:
    """Where the journal begins and ends, and where a time begins in it. `fresh`: once everything
    that was durable when this was asked for can be read. The broker may take a minute for that, and
    is given it whatever the client's timeout."""
    query = query_of(fresh="true" if fresh else "false", time_ms=time_ms)
    wait_s = MAX_FRESH_WAIT_MS / 1000 if fresh else 0.0
    return Call("GET", f"/v1/journal/offsets?{query}", reader(JournalReport), wait_s=wait_s)


def set_journal_archived(next_: int) -> Call[JournalArchive]:
    """Every row below this position is kept elsewhere; a broker with `journal_after_archive` may
    let it go. It never goes back: the answer is how far it is."""
    body = encode({"next": next_})
    return Call("POST", "/v1/journal/archived", reader(JournalArchive), body)


def journal_path(
    from_: int | None, to: int | None, columns: Iterable[str], only: Mapping[str, str | int | None]
) -> str:
    """Where rows of the journal are found, as lines."""
    names = ",".join(list_of(columns, "columns")) or None
    wanted = {"from": from_, "to": to, "columns": names, "format": "ndjson"}
    return f"/v1/journal?{query_of(**wanted, **only)}"
