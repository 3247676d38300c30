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
from penstock.model.names import clean_name
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request
from penstock.server.members import Count, Name, StrictBody, Wait, limits, optional, required
from penstock.server.queries import BodyOrQuery
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_Partitions = Annotated[int, limits(minimum=1, maximum=MAX_PARTITIONS)]
_AfterArchive = Annotated[
    bool | None, optional("true: no message is removed before the group archive has finished it.")
]
_MaxAttempts = Annotated[
    Count | None,
    optional("The most deliveries of a message that names no max_attempts; 0 is no limit."),
]
_RetryBackoff = Annotated[
    Wait | None,
    optional(
        "The wait before the first retry of a message without a retry policy; it doubles for "
        "each further retry. 0 is the broker's retry_backoff_ms."
    ),
]
_RetryMaxBackoff = Annotated[
    Wait | None, optional("The longest such wait; 0 is the broker's retry_max_backoff_ms.")
]


class TopicBody(StrictBody):
    name: Annotated[Name | None, required("The topic's name: 1 to 200 bytes of UTF-8.")] = None
    partitions: Annotated[
        _Partitions | None, optional("How many partitions, 1 to 1,024; 1 when omitted.")
    ] = None
    after_archive: _AfterArchive = None
    max_attempts: _MaxAttempts = None
    retry_backoff_ms: _RetryBackoff = None
    retry_max_backoff_ms: _RetryMaxBackoff = None


class TopicSettingsBody(StrictBody):
    retention_ms: Annotated[
        Count | None, optional("How long finished messages are kept; 0 is for ever.")
    ] = None
    retention_bytes: Annotated[
        Count | None, optional("How many bytes of finished messages are kept; 0 is all.")
    ] = None
    after_archive: _AfterArchive = None
    max_attempts: _MaxAttempts = None
    retry_backoff_ms: _RetryBackoff = None
    retry_max_backoff_ms: _RetryMaxBackoff = None


class TopicNames(msgspec.Struct):
    topics: list[str]


class TopicAnswer(msgspec.Struct):
    status: str
    name: str
    partitions: int


_topics = BodyOrQuery(TopicBody)
_settings = BodyOrQuery(TopicSettingsBody)


def list_topics(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.list_topics(
        lambda names: send_outcome(reply, names, 200, TopicNames, _names_bytes)
    )


def _names_bytes(names: list[str]) -> int:
    return sum(map(len, names)) + 4 * len(names)


def create_topic(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if not request.body and not request.params().get("partitions", "1").strip():
        raise InvalidArgument("partitions must be a whole number")
    body = _topics.read(request)
    name = clean_name(body.name, "name")
    partitions = 1 if body.partitions is None else body.partitions
    done = partial(_send_created, reply, name, partitions)
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
    return clean_name(names_in_path(request)[1], "topic")


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
        tag="Topics",
        summary="List topics",
        answers={200: Answer("The names, sorted.", TopicNames, {"topics": ["orders"]})},
    ),
    Endpoint(
        route="POST /v1/topics",
        handler=create_topic,
        tag="Topics",
        summary="Create a topic",
        text="A topic that exists with the same settings is left unchanged. 409 if it exists "
        "with other settings.",
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
        errors=(400, 409, 503),
    ),
    Endpoint(
        route="GET /v1/topics/{topic}",
        handler=describe_topic,
        tag="Topics",
        summary="Describe a topic",
        text="Its partitions, its groups and their progress.",
        answers={200: Answer("The topic.", TopicReport, msgspec.to_builtins(_EXAMPLE))},
        errors=(400, 404),
    ),
    Endpoint(
        route="PATCH /v1/topics/{topic}",
        handler=configure_topic,
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
        tag="Topics",
        summary="Delete a topic",
        text="Deletes its messages and groups, and ends open streams. The name can be used again.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
)
