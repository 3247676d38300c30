"""What the API offers, route by route, in words and examples: the source of the documentation.

Invariant: every route of the lane's table is described here, and no other; a test compares them.
Shapes come from the structs that decode and encode the wire, so they cannot drift from it. Must
not know how a document or a page looks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engine.report import GroupReport, PartitionReport, ProgressReport, TopicReport
from penstock.model.item import Item
from penstock.server.answers import (
    Begun,
    Status,
    TopicAnswer,
    TopicNames,
    VersionAnswer,
)
from penstock.server.data_routes import AckedItem, Produced, ProducedItem
from penstock.server.wire import (
    AckBody,
    CommitEffectBody,
    ConsumeBody,
    EnvelopeBody,
    ExtendBody,
    FailEffectBody,
    LeasedEffectBody,
    NackBody,
    ProduceBody,
    RetentionBody,
    RetryPolicyBody,
    TopicBody,
)


class Answer(msgspec.Struct, frozen=True):
    """`shape` None: there is no body. Of a batch, it is the shape of one result."""

    text: str
    shape: Any = None
    example: Any = None
    media_type: str = "application/json"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`query` overrides the parameters that follow from the body's members."""

    method: str
    path: str
    tag: str
    summary: str
    text: str = ""
    body: Any = None
    required: tuple[str, ...] = ()
    query: tuple[str, ...] | None = None
    query_only: bool = False
    batch: bool = False
    example: Any = None
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()


_DELIVERY = {"topic": "orders", "group": "billing", "partition": 0, "offset": 12, "owner": "w1"}
_EFFECT = {
    "tenant_id": "acme",
    "topic": "orders",
    "group": "billing",
    "key": "charge-17",
    "owner": "w1",
}
_SETTLES = ("topic", "group", "partition", "offset", "owner")
_NAMES_EFFECT = ("topic", "group", "key", "owner")
_DONE = {204: Answer("Done.")}
_SETTLE_ERRORS = (400, 404, 409, 503)
_MESSAGE = {
    "topic": "orders",
    "key": "user-1",
    "value": "hello",
    "envelope": {
        "run_id": "run-1",
        "tenant_id": "acme",
        "idempotency_key": "acme:run-1:step-7",
        "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000},
    },
}
_PRODUCED = {"status": "produced", "topic": "orders"}
_REFUSED = {"error": "NOT_FOUND", "message": "no such topic: 'order'", "code": 404}
_ITEM = {
    "partition": 0,
    "offset": 12,
    "attempts": 1,
    "key": "user-1",
    "value": "hello",
    "last_error": "",
    "envelope": {"run_id": "run-1"},
    "delivery_id": "1-1",
}
_PRODUCE_QUERY = (
    *("topic", "value", "key"),
    *(name for name in EnvelopeBody.__struct_fields__ if name != "retry_policy"),
    *("tenant", "idem_key", "deadline_rfc3339", "deadline_ms"),
    *(f"retry_{name}" for name in RetryPolicyBody.__struct_fields__),
)
_TOPIC = TopicReport(
    "orders",
    next_offset=13,
    retention_ms=0,
    retention_bytes=0,
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
        text="A topic that exists with as many partitions is left as it is.",
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
        summary="Set a topic's retention",
        text="Removes what every group has finished, once it is older or the topic larger.",
        body=RetentionBody,
        example={"retention_ms": 604_800_000},
        answers=_DONE,
        errors=(400, 404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/topics/{topic}",
        tag="Topics",
        summary="Delete a topic",
        text="With its messages and groups. Open streams end, and the name is free again.",
        answers=_DONE,
        errors=(400, 404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/topics/{topic}/groups/{group}",
        tag="Topics",
        summary="Delete a group",
        text="Its progress is forgotten; a later consume starts at the oldest retained message.",
        answers=_DONE,
        errors=(400, 404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/produce",
        tag="Messages",
        summary="Produce a message",
        text="The answer comes when the message is as durable as the broker promises (see "
        "/v1/version). A second message with the same idempotency_key, tenant and topic is "
        "answered like the first and not stored.",
        body=ProduceBody,
        required=("topic", "value"),
        query=_PRODUCE_QUERY,
        example=_MESSAGE,
        answers={200: Answer("Stored. The topic is the one asked for.", Produced, _PRODUCED)},
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/produce/batch",
        tag="Messages",
        summary="Produce messages in one commit",
        text="A JSON array, or NDJSON. Each message stands or falls alone.",
        body=ProduceBody,
        required=("topic", "value"),
        batch=True,
        example=[{"topic": "orders", "value": "one"}, {"topic": "order", "value": "two"}],
        answers={
            200: Answer(
                "A result per message, in order.",
                ProducedItem,
                {"results": [{**_PRODUCED, "partition": 0, "offset": 13}, _REFUSED]},
            )
        },
        errors=(400, 413, 429, 503),
    ),
    Operation(
        method="GET",
        path="/v1/consume",
        tag="Messages",
        summary="Consume as a stream",
        text="One JSON object a line, for as long as the connection lasts; headers come at once. "
        "Each item is leased to the owner, who acks it, nacks it or extends its lease; a lease "
        "that runs out is a failed attempt. A group exists from its first consume, and each "
        "group gets every message. The parameters may also be a JSON body.",
        body=ConsumeBody,
        required=("topic", "group", "owner"),
        query_only=True,
        example={"topic": "orders", "group": "billing", "owner": "w1", "lease_ms": 30000},
        answers={
            200: Answer(
                "Items, until either side ends the stream.",
                Item,
                _ITEM,
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/ack",
        tag="Messages",
        summary="Ack a delivery",
        text="The message is done for the group. To ack again what is done changes nothing.",
        body=AckBody,
        required=_SETTLES,
        example=_DELIVERY,
        answers=_DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/ack/batch",
        tag="Messages",
        summary="Ack deliveries in one commit",
        text="A JSON array, or NDJSON. Each ack stands or falls alone.",
        body=AckBody,
        required=_SETTLES,
        batch=True,
        example=[_DELIVERY],
        answers={
            200: Answer(
                "A result per ack, in order.", AckedItem, {"results": [{"status": "acked"}]}
            )
        },
        errors=(400, 413, 503),
    ),
    Operation(
        method="POST",
        path="/v1/nack",
        tag="Messages",
        summary="Nack a delivery",
        text="The attempt failed. The message is delivered again as its retry policy says, or "
        "moved to dlq.<topic> after its last attempt.",
        body=NackBody,
        required=_SETTLES,
        example=_DELIVERY | {"reason": "timeout calling upstream"},
        answers=_DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/extend",
        tag="Messages",
        summary="Extend a lease",
        text="It then ends lease_ms from now.",
        body=ExtendBody,
        required=_SETTLES,
        example=_DELIVERY | {"lease_ms": 30000},
        answers=_DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/begin",
        tag="Effects",
        summary="Begin an effect",
        text="Asks whether to run the effect of a message, for a group. A crash between the "
        "effect and its commit repeats it.",
        body=LeasedEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"lease_ms": 30000},
        answers={200: Answer("Run it, or its result.", Begun, {"status": "RUN"})},
        errors=(400, 404, 409, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/renew",
        tag="Effects",
        summary="Renew an effect's lease",
        body=LeasedEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"lease_ms": 30000},
        answers=_DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/commit",
        tag="Effects",
        summary="Commit an effect with its result",
        text="Messages of the key are from now on finished for the group without delivery.",
        body=CommitEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"result": "charged 17 EUR"},
        answers=_DONE,
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/fail",
        tag="Effects",
        summary="Let go of an effect that failed",
        body=FailEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"reason": "card declined"},
        answers=_DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="GET",
        path="/v1/version",
        tag="Broker",
        summary="Version and durability",
        answers={
            200: Answer(
                "Which broker this is.",
                VersionAnswer,
                {
                    "version": "0.1.0",
                    "commit": "unknown",
                    "wal_enabled": True,
                    "fsync": "commit",
                    "durability": "every answer waits until its data is synced to disk",
                },
            )
        },
    ),
    Operation(
        method="GET",
        path="/v1/healthz",
        tag="Broker",
        summary="Is it alive?",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Operation(
        method="GET",
        path="/v1/livez",
        tag="Broker",
        summary="Is it alive? (the probe's usual name)",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Operation(
        method="GET",
        path="/v1/readyz",
        tag="Broker",
        summary="Does it take work?",
        answers={200: Answer("It does.", Status, {"status": "ready"})},
        errors=(503,),
    ),
)
