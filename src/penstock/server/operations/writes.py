"""Writes by batch, described."""

from __future__ import annotations

from penstock.model.writes import CommitReport, PieceReport, WriterReport
from penstock.server.operations.endpoint import DONE, Answer, Operation
from penstock.server.wire import CommitBody

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="PUT",
        path="/v1/writes/{producer}/{batch}/{part}/{piece}",
        tag="Writes",
        summary="Stage a piece of a batch",
        text="The body is an Arrow IPC stream of rows or, otherwise, lines of JSON, each the body "
        "of a produce. Nothing of it is seen before its batch is committed. A piece that is sent "
        "again takes the place of the first. Every row is checked now: the error names it.",
        query=("attempt", "topic", "cache"),
        example={"attempt": "a", "topic": "orders"},
        answers={200: Answer("It is on disk.", PieceReport, {"rows": 1000, "bytes": 131_072})},
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/writes/{producer}/{batch}/commit",
        tag="Writes",
        summary="Commit a batch",
        text="Stores the rows of these parts, once, whatever happens from then on. Batches of a "
        "producer rise: one that is not above the last is already committed, and nothing is "
        "stored again. 409 if the parts are not what is staged; 429 if a partition is full.",
        body=CommitBody,
        required=("parts",),
        query=(),
        example={"parts": [{"part": 0, "attempt": "a", "pieces": 1, "rows": 1000}], "once": False},
        answers={
            200: Answer(
                "Every row is stored and durable.",
                CommitReport,
                {"status": "committed", "rows": 1000},
            ),
            202: Answer(
                "Committed, and not stored to the end within 20 seconds; ask again.",
                CommitReport,
                {"status": "storing", "rows": 5_000_000, "done": 4_000_000},
            ),
        },
        errors=(400, 409, 413, 429, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/writes/{producer}/{batch}",
        tag="Writes",
        summary="Drop what is staged of a batch",
        text="Not what is committed.",
        answers=DONE,
        errors=(400, 503),
    ),
    Operation(
        method="GET",
        path="/v1/writes/{producer}",
        tag="Writes",
        summary="Look at a producer",
        text="404 for one that has committed nothing, or whose last commit is too long ago.",
        answers={
            200: Answer(
                "Its last batch.",
                WriterReport,
                {
                    "producer": "nightly",
                    "last_batch": 7,
                    "rows": 1000,
                    "committed_at_ms": 1_767_225_600_000,
                    "storing": False,
                },
            )
        },
        errors=(400, 404, 503),
    ),
)
