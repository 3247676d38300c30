"""Consumer groups of a topic: publish their progress, and delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_PARTITIONS
from penstock.model.names import clean_name
from penstock.model.progress import Reached
from penstock.server.access import Needs
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, required_index
from penstock.server.members import Count, StrictBody, limits, required
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path
from penstock.server.routes.ranges import TopicId

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class ReachedBody(StrictBody):
    partition: Annotated[Count | None, required("The partition's number, from 0.")] = None
    next: Annotated[
        Count | None,
        required("Everything below this offset, or position of the journal, is done."),
    ] = None


_Reached = Annotated[list[ReachedBody], limits(minItems=1, maxItems=MAX_PARTITIONS)]


class ProgressBody(StrictBody):
    topic_id: TopicId = None
    partitions: Annotated[
        _Reached | None,
        required("The group's progress in each partition; in others it stays the same."),
    ] = None


class GroupProgressAnswer(msgspec.Struct):
    partitions: list[Reached]


_decoder = msgspec.json.Decoder(ProgressBody)


def set_progress(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """Sets a group's progress, for readers that keep their position elsewhere."""
    topic, group = _topic_and_group(request)
    body = decode_body(_decoder, request.body)
    dispatch.engine.set_progress(
        request.full_name(topic),
        clean_name(group, "group"),
        _reached(body),
        lambda outcome: send_outcome(reply, outcome, 200, GroupProgressAnswer),
        topic_id=body.topic_id,
    )


def delete_group(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, group = _topic_and_group(request)
    dispatch.engine.delete_group(request.full_name(topic), clean_name(group, "group"), reply.settle)


def _topic_and_group(request: Request) -> tuple[str, str]:
    _, topic, _, group, *_ = names_in_path(request)
    return topic, group


def _reached(body: ProgressBody) -> list[Reached]:
    if not body.partitions:
        raise InvalidArgument("partitions is required: how far the group is in each")
    if len(body.partitions) > MAX_PARTITIONS:
        raise InvalidArgument(f"partitions has more than {MAX_PARTITIONS} items")
    return [
        Reached(required_index(each.partition, "partition"), required_index(each.next, "next"))
        for each in body.partitions
    ]


ENDPOINTS = (
    Endpoint(
        route="DELETE /v1/topics/{topic}/groups/{group}",
        handler=delete_group,
        access=Needs("manage", "topic"),
        tag="Topics",
        summary="Delete a group",
        text="Deletes its progress: a later consume starts at the oldest retained message.",
        answers=DONE,
        errors=(400, 404, 503),
    ),
    Endpoint(
        route="POST /v1/topics/{topic}/groups/{group}/progress",
        handler=set_progress,
        access=Needs("manage", "topic"),
        tag="Ranges",
        summary="Publish a group's progress",
        text="Everything below these offsets is done for the group, deliveries in flight "
        "included. For readers of ranges, which count their progress themselves. Progress only "
        "goes forward. Creates the group if there is none.",
        body=ProgressBody,
        example={"partitions": [{"partition": 0, "next": 1}]},
        answers={
            200: Answer(
                "The group's progress now.",
                GroupProgressAnswer,
                {"partitions": [{"partition": 0, "next": 1}]},
            )
        },
        errors=(400, 404, 416, 429, 503),
    ),
)
