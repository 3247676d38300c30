"""The calls of the journal: its ends, its rows, and how far they are archived. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.client.calls import Call, encode, list_of, query_of, reader
from penstock.model.journal import JournalArchive, JournalReport
from penstock.model.limits import MAX_FRESH_WAIT_MS


def journal_offsets(*, fresh: bool = False, time_ms: int | None = None) -> Call[JournalReport]:
    """Returns where the journal begins and ends and, with `time_ms`, where that time begins in it.
    With `fresh` the broker first makes everything readable that is durable by now. That may take a
    minute, and the client waits that long whatever its timeout."""
    query = query_of(fresh="true" if fresh else "false", time_ms=time_ms)
    wait_s = MAX_FRESH_WAIT_MS / 1000 if fresh else 0.0
    return Call("GET", f"/v1/journal/offsets?{query}", reader(JournalReport), wait_s=wait_s)


def set_journal_archived(next_: int) -> Call[JournalArchive]:
    """Tells the broker that every row below this position is kept elsewhere. A broker with
    `journal_after_archive` may then remove it. Returns the position, which never goes back."""
    body = encode({"next": next_})
    return Call("POST", "/v1/journal/archived", reader(JournalArchive), body)


def journal_path(
    from_: int | None, to: int | None, columns: Iterable[str], only: Mapping[str, str | int | None]
) -> str:
    """Returns the address of rows of the journal, as lines."""
    names = ",".join(list_of(columns, "columns")) or None
    wanted = {"from": from_, "to": to, "columns": names, "format": "ndjson"}
    return f"/v1/journal?{query_of(**wanted, **only)}"
