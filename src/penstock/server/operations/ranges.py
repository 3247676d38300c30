"""Reading what is stored without taking it, described."""

from __future__ import annotations

from penstock.model.ranges import OffsetsPage, TopicOffsets
from penstock.model.splits import Splits
from penstock.server.answers import GroupProgressAnswer
from penstock.server.operations.endpoint import Answer, Operation
from penstock.server.wire import ProgressBody

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/records",
        tag="Ranges",
        summary="Read a range of a partition",
        text="As often as one likes, without a lease or a group. The range is fixed when it "
        "begins, and ends there with what is durable. One that breaks off does not look complete.",
        query=(
            "topic_id",
            "start",
            "end",
            "columns",
            "nulls",
            "run_id",
            "tenant_id",
            "from_ms",
            "to_ms",
            "format",
        ),
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
        path="/v1/topics/{topic}/partitions/{partition}/splits",
        tag="Ranges",
        summary="Share out the work of reading a range",
        text="Neighbouring ranges with so many rows at most, which may be read side by side. They "
        "cover what was asked for, or as much of it as max_rows and 10,000 splits allow.",
        query=("topic_id", "start", "end", "rows", "max_rows"),
        example={"rows": 65536},
        answers={
            200: Answer(
                "The ranges, and where the last of them ends.",
                Splits,
                {"splits": [{"start": 0, "end": 13, "rows": 7}], "next": 13},
            )
        },
        errors=(400, 404, 410, 416, 503),
    ),
    Operation(
        method="POST",
        path="/v1/topics/{topic}/groups/{group}/progress",
        tag="Ranges",
        summary="Publish a group's progress",
        text="Everything below these offsets is done for the group, deliveries under way included: "
        "for those who read ranges and keep count themselves. It only goes forward, and makes "
        "the group if need be.",
        body=ProgressBody,
        required=("partitions",),
        query=(),
        example={"partitions": [{"partition": 0, "next": 12}]},
        answers={
            200: Answer(
                "Where the group is now.",
                GroupProgressAnswer,
                {"partitions": [{"partition": 0, "next": 12}]},
            )
        },
        errors=(400, 404, 416, 503),
    ),
    Operation(
        method="GET",
        path="/v1/topics/{topic}/offsets",
        tag="Ranges",
        summary="Where a topic's partitions begin and end",
        text="And, with time_ms, where the messages of that time begin. A topic that is deleted "
        "and made again has another topic_id.",
        query=("time_ms",),
        answers={
            200: Answer(
                "Every partition.",
                TopicOffsets,
                {"topic_id": 3, "partitions": [{"partition": 0, "earliest": 0, "next": 13}]},
            )
        },
        errors=(400, 404, 503),
    ),
    Operation(
        method="GET",
        path="/v1/offsets",
        tag="Ranges",
        summary="Where all topics' partitions begin and end",
        text="In the order of their names, some thousands of partitions at a time. If there are "
        "more, after says where to go on.",
        query=("after",),
        answers={
            200: Answer(
                "Every partition of some topics.",
                OffsetsPage,
                {
                    "topics": [
                        {
                            "topic": "orders",
                            "topic_id": 3,
                            "partitions": [{"partition": 0, "earliest": 0, "next": 13}],
                        }
                    ],
                    "after": "orders",
                },
            )
        },
        errors=(400, 503),
    ),
)
