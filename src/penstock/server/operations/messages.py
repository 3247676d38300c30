"""Producing, consuming and settling, described."""

from __future__ import annotations

from penstock.model.item import Item
from penstock.server.routes.endpoint import DONE, Answer, Operation
from penstock.server.routes.messages import AckedItem, Produced, ProducedItem, ReleasedItem
from penstock.server.wire import (
    AckBody,
    ConsumeBody,
    EnvelopeBody,
    ExtendBody,
    NackBody,
    ProduceBody,
    RetryPolicyBody,
)

_DELIVERY = {"topic": "orders", "group": "billing", "partition": 0, "offset": 12, "owner": "w1"}
_SETTLES = ("topic", "group", "partition", "offset", "owner")
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
_PLACE = {
    "Penstock-Partition": ("The partition in which the message was stored.", "integer"),
    "Penstock-Offset": ("Its offset. A duplicate has no place of its own.", "integer"),
    "Penstock-Duplicate": ("true: the idempotency_key is known; nothing was stored.", "string"),
}
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

OPERATIONS: tuple[Operation, ...] = (
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
        answers={
            200: Answer(
                "Stored. The topic is the one asked for.", Produced, _PRODUCED, headers=_PLACE
            )
        },
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
        answers=DONE,
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
        text="The attempt failed. The message is delivered again after delay_ms, else as its "
        "retry policy says, else after the topic's or the broker's default backoff; or it is moved "
        "to dlq.<topic>, after its last attempt or because of dead.",
        body=NackBody,
        required=_SETTLES,
        example=_DELIVERY | {"reason": "timeout calling upstream"},
        answers=DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/release",
        tag="Messages",
        summary="Release a delivery that nobody began to handle",
        text="The owner gives it back: it is delivered again at once, in its old place, and the "
        "attempt does not count, so that it is never dead-lettered for it. Refused once its lease "
        "has ended.",
        body=AckBody,
        required=_SETTLES,
        example=_DELIVERY,
        answers=DONE,
        errors=_SETTLE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/release/batch",
        tag="Messages",
        summary="Release deliveries in one commit",
        text="A JSON array, or NDJSON. Each release stands or falls alone.",
        body=AckBody,
        required=_SETTLES,
        batch=True,
        example=[_DELIVERY],
        answers={
            200: Answer(
                "A result per release, in order.",
                ReleasedItem,
                {"results": [{"status": "released"}]},
            )
        },
        errors=(400, 413, 503),
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
        answers=DONE,
        errors=_SETTLE_ERRORS,
    ),
)
