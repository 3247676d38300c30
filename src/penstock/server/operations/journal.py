"""The journal, described."""

from __future__ import annotations

from penstock.model.journal import JournalArchive, JournalReport
from penstock.model.splits import Splits
from penstock.server.operations.endpoint import Answer, Operation
from penstock.server.wire import ArchivedBody

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/journal",
        tag="Journal",
        summary="Read what happened to messages",
        text="A row an event, in the order in which they were recorded, as often as one likes: its "
        "time, kind, place, group, owner, attempt and reason, the ids of the message's envelope, "
        "and when the message was stored (produced_at) and delivered (delivered_at). The range is "
        "fixed when it begins. One that breaks off does not look complete.",
        query=(
            "from",
            "to",
            "columns",
            "kind",
            "topic",
            "group",
            "run_id",
            "tenant_id",
            "from_ms",
            "to_ms",
            "format",
        ),
        example={"kind": "dead_lettered", "format": "ndjson"},
        answers={
            200: Answer(
                "The rows, as an Arrow IPC stream or as lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=(400, 409, 410, 416, 503),
    ),
    Operation(
        method="GET",
        path="/v1/journal/offsets",
        tag="Journal",
        summary="Where the journal begins and ends",
        text="The journal is written when the log is sealed. With fresh, what was durable when it "
        "was asked for can be read when it is answered. With time_ms, where that time begins.",
        query=("fresh", "time_ms"),
        answers={
            200: Answer("Positions.", JournalReport, {"earliest": 268435456, "next": 1342177280})
        },
        errors=(400, 409, 503),
    ),
    Operation(
        method="POST",
        path="/v1/journal/archived",
        tag="Journal",
        summary="Say how far the journal is archived",
        text="Every row below the position next is kept elsewhere. With the setting "
        "journal_after_archive nothing else goes. It never goes back, and stays where it is when "
        "there is no row in between; the answer says where that is.",
        body=ArchivedBody,
        required=("next",),
        query=(),
        example={"next": 1342177280},
        answers={200: Answer("How far it is now.", JournalArchive, {"next": 1342177280})},
        errors=(400, 409, 416, 503),
    ),
    Operation(
        method="GET",
        path="/v1/journal/splits",
        tag="Journal",
        summary="Share out the work of reading the journal",
        text="Neighbouring ranges, each with so many rows at most.",
        query=("from", "to", "rows", "max_rows"),
        answers={
            200: Answer(
                "The ranges, and where the last of them ends.",
                Splits,
                {
                    "splits": [{"start": 268435456, "end": 1342177280, "rows": 4711}],
                    "next": 1342177280,
                },
            )
        },
        errors=(400, 409, 410, 416, 503),
    ),
)
