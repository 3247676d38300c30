"""Topics and groups: list, create, describe, configure, delete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.api.topics import RetryDefaults, TopicReport
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.names import clean_name
from penstock.server.http.dispatch import Handler, RequestDispatch, send_outcome
from penstock.server.http.requests import (
    Request,
    decode_body,
    path_name,
    truth_if_given,
    whole_number,
)
from penstock.server.routes.progress import set_progress
from penstock.server.routes.ranges import read_offsets, read_range, read_splits
from penstock.server.wire import TopicBody, TopicSettingsBody

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

PREFIX = b"/v1/topics/"

_topic_decoder = msgspec.json.Decoder(TopicBody)
_settings_decoder = msgspec.json.Decoder(TopicSettingsBody)


def list_topics(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.list_topics(lambda names: send_outcome(reply, names, 200, _topics, _names_bytes))


def _names_bytes(names: list[str]) -> int:
    return sum(map(len, names)) + 4 * len(names)


def _topics(names: list[str]) -> dict[str, Any]:
    return {"topics": names}


def create_topic(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_topic_decoder, request.body)
    else:
        params = request.params()
        archive = truth_if_given(params, "after_archive")
        body = TopicBody(params.get("name"), _partitions(params), archive, **_retry_params(params))
    name = clean_name(body.name, "name")
    partitions = 1 if body.partitions is None else body.partitions
    done = partial(_created, reply, name, partitions)
    hub.engine.create_topic(
        name, partitions, done, after_archive=body.after_archive, retries=_retries(body)
    )


def _retries(body: TopicBody | TopicSettingsBody) -> RetryDefaults:
    return RetryDefaults(**{name: getattr(body, name) for name in RetryDefaults.__struct_fields__})


def _retry_params(params: dict[str, str]) -> dict[str, int | None]:
    return {name: whole_number(params, name) for name in RetryDefaults.__struct_fields__}


def _partitions(params: dict[str, str]) -> int | None:
    if "partitions" in params and not params["partitions"].strip():
        raise InvalidArgument("partitions must be a whole number")
    return whole_number(params, "partitions")


def _created(reply: Reply, name: str, partitions: int, outcome: bool | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
        return
    status = "created" if outcome else "exists"
    reply.send_json(
        201 if outcome else 200, {"status": status, "name": name, "partitions": partitions}
    )


def topic_route(path: bytes) -> dict[bytes, Handler] | None:
    """/v1/topics/{topic}, its groups, its offsets, and the records and splits of a partition."""
    if not path.startswith(PREFIX):
        return None
    parts = path[len(PREFIX) :].split(b"/")
    if len(parts) == 1 and parts[0]:
        return _TOPIC
    if len(parts) == 3 and parts[1] == b"groups" and parts[0] and parts[2]:
        return _GROUP
    if len(parts) == 4 and all(parts):
        return _PARTS.get((parts[1], parts[3]))
    if len(parts) == 2 and parts[1] == b"offsets" and parts[0]:
        return _OFFSETS
    return None


def _names(request: Request) -> list[str]:
    return [path_name(part) for part in request.path[len(PREFIX) :].split(b"/")]


def _describe(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic = clean_name(_names(request)[0], "topic")
    hub.engine.describe_topic(
        topic,
        lambda outcome: send_outcome(reply, outcome, 200, lambda report: report, _report_bytes),
    )


def _report_bytes(report: TopicReport) -> int:
    """About what it has for each partition, and for each group there."""
    return 200 * len(report.partitions) * (1 + len(report.groups))


def _configure(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic = clean_name(_names(request)[0], "topic")
    if request.body:
        body = decode_body(_settings_decoder, request.body)
    else:
        params = request.params()
        body = TopicSettingsBody(
            whole_number(params, "retention_ms"),
            whole_number(params, "retention_bytes"),
            truth_if_given(params, "after_archive"),
            **_retry_params(params),
        )
    hub.engine.configure_topic(
        topic,
        body.retention_ms,
        body.retention_bytes,
        reply.settle,
        after_archive=body.after_archive,
        retries=_retries(body),
    )


def _delete(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.delete_topic(clean_name(_names(request)[0], "topic"), reply.settle)


def _delete_group(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, _, group = _names(request)
    hub.engine.delete_group(clean_name(topic, "topic"), clean_name(group, "group"), reply.settle)


def _read_range(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, _, partition, _ = _names(request)
    read_range(hub, request, reply, topic, partition)


def _read_splits(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, _, partition, _ = _names(request)
    read_splits(hub, request, reply, topic, partition)


def _set_progress(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, _, group, _ = _names(request)
    set_progress(hub, request, reply, topic, group)


def _read_offsets(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    read_offsets(hub, request, reply, _names(request)[0])


_TOPIC: dict[bytes, Handler] = {b"GET": _describe, b"PATCH": _configure, b"DELETE": _delete}
_GROUP: dict[bytes, Handler] = {b"DELETE": _delete_group}
_PARTS: dict[tuple[bytes, bytes], dict[bytes, Handler]] = {
    (b"groups", b"progress"): {b"POST": _set_progress},
    (b"partitions", b"records"): {b"GET": _read_range},
    (b"partitions", b"splits"): {b"GET": _read_splits},
}
_OFFSETS: dict[bytes, Handler] = {b"GET": _read_offsets}
