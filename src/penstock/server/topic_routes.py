"""Topics and groups: list, create, describe, configure, delete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.names import clean_name
from penstock.server.hub import Handler, Hub, send_outcome
from penstock.server.progress_routes import set_progress
from penstock.server.range_routes import read_offsets, read_range, read_splits
from penstock.server.requests import (
    Request,
    decode_body,
    path_name,
    truth_if_given,
    whole_number,
)
from penstock.server.wire import RetentionBody, TopicBody

if TYPE_CHECKING:
    from penstock.server.turns import Reply

PREFIX = b"/v1/topics/"

_topic_decoder = msgspec.json.Decoder(TopicBody)
_retention_decoder = msgspec.json.Decoder(RetentionBody)


def list_topics(hub: Hub, request: Request, reply: Reply) -> None:
    hub.engine.list_topics(lambda names: send_outcome(reply, names, 200, _topics))


def _topics(names: list[str]) -> dict[str, Any]:
    return {"topics": names}


def create_topic(hub: Hub, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_topic_decoder, request.body)
    else:
        params = request.params()
        archive = truth_if_given(params, "after_archive")
        body = TopicBody(params.get("name"), _partitions(params), archive)
    name = clean_name(body.name, "name")
    partitions = 1 if body.partitions is None else body.partitions
    done = partial(_created, reply, name, partitions)
    hub.engine.create_topic(name, partitions, done, after_archive=body.after_archive)


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


def _describe(hub: Hub, request: Request, reply: Reply) -> None:
    topic = clean_name(_names(request)[0], "topic")
    hub.engine.describe_topic(
        topic, lambda outcome: send_outcome(reply, outcome, 200, lambda report: report)
    )


def _configure(hub: Hub, request: Request, reply: Reply) -> None:
    topic = clean_name(_names(request)[0], "topic")
    if request.body:
        body = decode_body(_retention_decoder, request.body)
    else:
        params = request.params()
        body = RetentionBody(
            whole_number(params, "retention_ms"),
            whole_number(params, "retention_bytes"),
            truth_if_given(params, "after_archive"),
        )
    hub.engine.configure_topic(
        topic,
        body.retention_ms,
        body.retention_bytes,
        reply.settle,
        after_archive=body.after_archive,
    )


def _delete(hub: Hub, request: Request, reply: Reply) -> None:
    hub.engine.delete_topic(clean_name(_names(request)[0], "topic"), reply.settle)


def _delete_group(hub: Hub, request: Request, reply: Reply) -> None:
    topic, _, group = _names(request)
    hub.engine.delete_group(clean_name(topic, "topic"), clean_name(group, "group"), reply.settle)


def _read_range(hub: Hub, request: Request, reply: Reply) -> None:
    topic, _, partition, _ = _names(request)
    read_range(hub, request, reply, topic, partition)


def _read_splits(hub: Hub, request: Request, reply: Reply) -> None:
    topic, _, partition, _ = _names(request)
    read_splits(hub, request, reply, topic, partition)


def _set_progress(hub: Hub, request: Request, reply: Reply) -> None:
    topic, _, group, _ = _names(request)
    set_progress(hub, request, reply, topic, group)


def _read_offsets(hub: Hub, request: Request, reply: Reply) -> None:
    read_offsets(hub, request, reply, _names(request)[0])


_TOPIC: dict[bytes, Handler] = {b"GET": _describe, b"PATCH": _configure, b"DELETE": _delete}
_GROUP: dict[bytes, Handler] = {b"DELETE": _delete_group}
_PARTS: dict[tuple[bytes, bytes], dict[bytes, Handler]] = {
    (b"groups", b"progress"): {b"POST": _set_progress},
    (b"partitions", b"records"): {b"GET": _read_range},
    (b"partitions", b"splits"): {b"GET": _read_splits},
}
_OFFSETS: dict[bytes, Handler] = {b"GET": _read_offsets}
