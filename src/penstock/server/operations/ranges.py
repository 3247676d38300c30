"""Reading what is stored without taking it, described."""

from __future__ import annotations

from penstock.server.answers import TopicOffsets
from penstock.server.operations.operation import Answer, Operation

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/records",
        tag="Ranges",
        summary="Read a range of a partition",
        text="As often as one likes, without a lease or a group. The range is fixed when it "
        "begins, and ends there with what is durable. One that breaks off does not look complete.",
        query=("start", "end", "columns", "run_id", "tenant_id", "from_ms", "to_ms", "format"),
        example={"start": 0, "end": 100, "columns": "offset,value"},
        answers={
            200: Answer(
                "The rows, as an Arrow IPC stream or as lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=(400, 404, 410, 416, 503),
    ),
    Operation(
        method="GET",
        path="/v1/topics/{topic}/offsets",
        tag="Ranges",
        summary="Where a topic's partitions begin and end",
        text="And, with time_ms, where the messages of that time begin.",
        query=("time_ms",),
        answers={
            200: Answer(
                "Every partition.",
                TopicOffsets,
                {"partitions": [{"partition": 0, "earliest": 0, "next": 13}]},
            )
        },
        errors=(400, 404, 503),
    ),
)
