"""A group's progress, published by somebody who keeps count of it elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_PARTITIONS
from penstock.model.names import clean_name
from penstock.model.progress import Reached
from penstock.server.answers import GroupProgressAnswer
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, required_index
from penstock.server.wire import ProgressBody

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_decoder = msgspec.json.Decoder(ProgressBody)


def set_progress(
    hub: RequestDispatch, request: Request, reply: Reply, topic: str, group: str
) -> None:
    body = decode_body(_decoder, request.body)
    hub.engine.set_progress(
        clean_name(topic, "topic"),
        clean_name(group, "group"),
        _reached(body),
        lambda outcome: send_outcome(reply, outcome, 200, GroupProgressAnswer),
        topic_id=body.topic_id,
    )


def _reached(body: ProgressBody) -> list[Reached]:
    if not body.partitions:
        raise InvalidArgument("partitions is required: how far the group is in each")
    if len(body.partitions) > MAX_PARTITIONS:
        raise InvalidArgument(f"partitions has more than {MAX_PARTITIONS} items")
    return [
        Reached(required_index(each.partition, "partition"), required_index(each.next, "next"))
        for each in body.partitions
    ]
