"""Topics, their partitions and their groups, described."""

from __future__ import annotations

import msgspec

from penstock.api.topics import GroupReport, PartitionReport, ProgressReport, TopicReport
from penstock.server.answers import TopicAnswer, TopicNames
from penstock.server.operations.endpoint import DONE, Answer, Operation
from penstock.server.wire import TopicBody, TopicSettingsBody

_TOPIC = TopicReport(
    "orders",
    next_offset=13,
    retention_ms=0,
    retention_bytes=0,
    after_archive=False,
    max_attempts=0,
    retry_backoff_ms=0,
    retry_max_backoff_ms=0,
    partitions=[PartitionReport(0, 0, 13, 13, 845, 1, 65)],
    groups=[GroupReport("billing", 1, [ProgressReport(0, 11, 13, 1, 1, 1)])],
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/topics",
        tag="Topics",
        summary="List topics",
        answers={200: Answer("The names, sorted.", TopicNames, {"topics": ["orders"]})},
    ),
    Operation(
        method="POST",
        path="/v1/topics",
        tag="Topics",
        summary="Create a topic",
        text="A topic that exists with as many partitions is left as it is. One that exists with "
        "other settings than are asked for is 409.",
        body=TopicBody,
        required=("name",),
        example={"name": "orders", "partitions": 3},
        answers={
            201: Answer(
                "Created.", TopicAnswer, {"status": "created", "name": "orders", "partitions": 3}
            ),
            200: Answer(
                "It was there before.",
                TopicAnswer,
                {"status": "exists", "name": "orders", "partitions": 3},
            ),
        },
        errors=(400, 409, 503),
    ),
    Operation(
        method="GET",
        path="/v1/topics/{topic}",
        tag="Topics",
        summary="Describe a topic",
        text="Its partitions, its groups and how far they are.",
        answers={200: Answer("The topic.", TopicReport, msgspec.to_builtins(_TOPIC))},
        errors=(400, 404),
    ),
    Operation(
        method="PATCH",
        path="/v1/topics/{topic}",
        tag="Topics",
        summary="Change a topic's settings",
        text="Retention removes what every group has finished, once it is older or the topic "
        "larger; with after_archive only what the group archive has finished too. From the "
        "next failure on, max_attempts is for messages that name none, and retry_backoff_ms and "
        "retry_max_backoff_ms are for messages without a retry policy.",
        body=TopicSettingsBody,
        example={"retention_ms": 604_800_000},
        answers=DONE,
        errors=(400, 404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/topics/{topic}",
        tag="Topics",
        summary="Delete a topic",
        text="With its messages and groups. Open streams end, and the name is free again.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/topics/{topic}/groups/{group}",
        tag="Topics",
        summary="Delete a group",
        text="Its progress is forgotten; a later consume starts at the oldest retained message.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
)
