"""Topics: list, create, describe, configure and delete them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.topics import (
    GroupReport,
    PartitionReport,
    ProgressReport,
    RetryDefaults,
    TopicReport,
)
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_PARTITIONS
from penstock.model.scopes import plain_name
from penstock.server.access import Filtered, HandlerNeeds, Needs, check_request, seen
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request
from penstock.server.members import Count, Name, StrictBody, Wait, limits, optional, required
from penstock.server.queries import BodyOrQuery
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

Partitions = Annotated[int, limits(minimum=1, maximum=MAX_PARTITIONS)]
AfterArchive = Annotated[
    bool | None, optional("true: no message is removed before the group archive has finished it.")
]
MaxAttempts = Annotated[
    Count | None,
    optional("The most deliveries of a message that names no max_attempts; 0 is no limit."),
]
RetryBackoff = Annotated[
    Wait | None,
    optional(
        "The wait before the first retry of a message without a retry policy; it doubles for "
        "each further retry. 0 is the broker's retry_backoff_ms."
    ),
]
RetryMaxBackoff = Annotated[
    Wait | None, optional("The longest such wait; 0 is the broker's retry_max_backoff_ms.")
]


class TopicBody(StrictBody):
    name: Annotated[Name | None, required("The topic's name: 1 to 200 bytes of UTF-8.")] = None
    partitions: Annotated[
        Partitions | None, optional("How many partitions, 1 to 1,024; 1 when omitted.")
    ] = None
    after_archive: AfterArchive = None
    max_attempts: MaxAttempts = None
    retry_backoff_ms: RetryBackoff = None
    retry_max_backoff_ms: RetryMaxBackoff = None


class TopicSettingsBody(StrictBody):
    retention_ms: Annotated[
        Count | None, optional("How long finished messages are kept; 0 is for ever.")
    ] = None
    retention_bytes: Annotated[
        Count | None, optional("How many bytes of finished messages are kept; 0 is all.")
    ] = None
    after_archive: AfterArchive = None
    max_attempts: MaxAttempts = None
    retry_backoff_ms: RetryBackoff = None
    retry_max_backoff_ms: RetryMaxBackoff = None


class TopicNames(msgspec.Struct):
    topics: list[str]


class TopicAnswer(msgspec.Struct):
    status: str
    name: str
    partitions: int


_CREATE = HandlerNeeds("manage", "topic")

_topics = BodyOrQuery(TopicBody)
_settings = BodyOrQuery(TopicSettingsBody)


def list_topics(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    def send(names: list[str] | PenstockError) -> None:
        if not isinstance(names, PenstockError):
            notes = request.notes
            names = seen(
                dispatch.engine.access, notes, "topic", names, lambda name: (notes.scope, name)
            )
        send_outcome(reply, names, 200, TopicNames, _names_bytes)

    dispatch.engine.list_topics(request.notes.scope, send)


def _names_bytes(names: list[str]) -> int:
    return sum(map(len, names)) + 4 * len(names)


def create_topic(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if not request.body and not request.params().get("partitions", "1").strip():
        raise InvalidArgument("partitions must be a whole number")
    body = _topics.read(request)
    name = request.full_name(body.name, "name")
    check_request(dispatch, request, reply, _CREATE, request.notes.scope, plain_name(name))
    partitions = 1 if body.partitions is None else body.partitions
    done = partial(_send_created, reply, plain_name(name), partitions)
    dispatch.engine.create_topic(
        name, partitions, done, after_archive=body.after_archive, retries=_retries(body)
    )


def _retries(body: TopicBody | TopicSettingsBody) -> RetryDefaults:
    return RetryDefaults(**{name: getattr(body, name) for name in RetryDefaults.__struct_fields__})


def _send_created(reply: Reply, name: str, partitions: int, outcome: bool | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
        return
    status = "created" if outcome else "exists"
    reply.send_json(201 if outcome else 200, TopicAnswer(status, name, partitions))


def describe_topic(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    topic = _topic(request)
    dispatch.engine.describe_topic(
        topic,
        lambda outcome: send_outcome(reply, outcome, 200, lambda report: report, _report_bytes),
    )


def _report_bytes(report: TopicReport) -> int:
    """An estimate: so much for each partition, and for each group there."""
    return 200 * len(report.partitions) * (1 + len(report.groups))


def configure_topic(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    topic = _topic(request)
    body = _settings.read(request)
    dispatch.engine.configure_topic(
        topic,
        body.retention_ms,
        body.retention_bytes,
        reply.settle,
        after_archive=body.after_archive,
        retries=_retries(body),
    )


def delete_topic(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.delete_topic(_topic(request), reply.settle)


def _topic(request: Request) -> str:
    return request.full_name(names_in_path(request)[1])


_EXAMPLE = TopicReport(
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

ENDPOINTS = (
    Endpoint(
        route="GET /v1/topics",
        handler=list_topics,
        access=Filtered("topic"),
        tag="Topics",
        summary="List topics",
        text="The topics of the request's namespace.",
        answers={200: Answer("The names, sorted.", TopicNames, {"topics": ["orders"]})},
    ),
    Endpoint(
        route="POST /v1/topics",
        handler=create_topic,
        access=_CREATE,
        tag="Topics",
        summary="Create a topic",
        text="A topic that exists with the same settings is left unchanged. 409 if it exists "
        "with other settings, 404 if the request's namespace does not exist.",
        body=TopicBody,
        query=(TopicBody,),
        example={"name": "orders", "partitions": 3},
        answers={
            201: Answer(
                "Created.", TopicAnswer, {"status": "created", "name": "orders", "partitions": 3}
            ),
            200: Answer(
                "It existed already.",
                TopicAnswer,
                {"status": "exists", "name": "orders", "partitions": 3},
            ),
        },
        errors=(400, 404, 409, 429, 503),
    ),
    Endpoint(
        route="GET /v1/topics/{topic}",
        handler=describe_topic,
        access=Needs("read", "topic"),
        tag="Topics",
        summary="Describe a topic",
        text="Its partitions, its groups and their progress.",
        answers={200: Answer("The topic.", TopicReport, msgspec.to_builtins(_EXAMPLE))},
        errors=(400, 404),
    ),
    Endpoint(
        route="PATCH /v1/topics/{topic}",
        handler=configure_topic,
        access=Needs("manage", "topic"),
        tag="Topics",
        summary="Change a topic's settings",
        text="Retention removes messages that every group has finished, once they are older or "
        "the topic is larger; with after_archive only if the group archive has finished them "
        "too. From the next failure on, max_attempts holds for messages that name none, and "
        "retry_backoff_ms and retry_max_backoff_ms hold for messages without a retry policy.",
        body=TopicSettingsBody,
        query=(TopicSettingsBody,),
        example={"retention_ms": 604_800_000},
        answers=DONE,
        errors=(400, 404, 503),
    ),
    Endpoint(
        route="DELETE /v1/topics/{topic}",
        handler=delete_topic,
        access=Needs("manage", "topic"),
        tag="Topics",
        summary="Delete a topic",
        text="Deletes its messages and groups, and ends open streams. The name can be used again.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
)
