"""Consume: opens the stream of a consumer, which has one item a line.

While the connection is above its high-water mark the consumer is paused: the engine hands nothing
to it, and deliveries that were already recorded for it go back to their group.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.consumers import Consumer
from penstock.model.errors import PermissionDenied
from penstock.model.item import Item
from penstock.model.names import clean_name
from penstock.model.options import check_number
from penstock.server.access import HandlerNeeds, check_consume
from penstock.server.commands import lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.http.responses import NDJSON_TYPE
from penstock.server.http.streamed_response import Guard, StreamedResponse, check_streamable
from penstock.server.members import (
    Count,
    GroupName,
    LeaseTime,
    OwnerName,
    StrictBody,
    TopicName,
    optional,
)
from penstock.server.queries import BodyOrQuery
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

_encode_lines = msgspec.json.Encoder().encode_lines


class ConsumeStream(StreamedResponse[Consumer]):
    """The sink of a consumer."""

    def begin(self, connection: HttpConnection, source: Consumer) -> None:
        if connection.flow.write_paused:
            source.pause()
        if self._heartbeat_s:
            self.beat()

    # -- called by the engine ----------------------------------------------------------------

    def write(self, items: list[Item]) -> None:
        if self._connection is not None:
            self._connection.write_chunk(_encode_lines(items))

    def end(self, reason: str) -> None:
        connection = self._connection
        self.detach()
        if connection is not None:
            connection.end_stream()

    # -- called when access rules change ---------------------------------------------------------

    def refuse(self, error: PermissionDenied) -> None:
        """Ends the stream. A line cannot say why; the next request of the consumer is told."""
        self.end(error.message)

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()


class ConsumeBody(StrictBody):
    topic: TopicName = None
    group: GroupName = None
    owner: OwnerName = None
    lease_ms: LeaseTime = None
    prefetch: Annotated[
        Count | None,
        optional("How many deliveries of this stream may be unfinished; 0 is no limit."),
    ] = None
    heartbeat_ms: Annotated[
        Count | None, optional("How often a blank line is sent; 0 is never.")
    ] = None


_reader = BodyOrQuery(ConsumeBody)


def consume(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    body = _reader.read(request)
    prefetch = check_number("prefetch", body.prefetch or 0, 0, 2**31)
    heartbeat_ms = check_number("heartbeat_ms", body.heartbeat_ms or 0, 0, 2**31)
    topic, group = request.full_name(body.topic), clean_name(body.group, "group")
    owner = clean_name(body.owner, "owner")
    guard: Guard = None
    if request.notes.principal is not None:
        guard = partial(check_consume, dispatch, request, topic)
        guard()
    stream = ConsumeStream(reply, guard, NDJSON_TYPE, heartbeat_ms)
    lease_ms = lease_of(body.lease_ms, dispatch.engine.limits.lease_ms)
    reply.when_first(
        lambda: dispatch.engine.open_consumer(
            topic, group, owner, lease_ms, prefetch, stream, stream.opened
        )
    )


ENDPOINTS = (
    Endpoint(
        route="GET /v1/consume",
        handler=consume,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Consume as a stream",
        text="One JSON object per line, as long as the connection is open; headers come at "
        "once. Each item is leased to the owner, who acks it, nacks it or extends its lease; a "
        "lease that runs out is a failed attempt. The first consume creates the group, and "
        "each group gets every message. The parameters may also be a JSON body.",
        body=ConsumeBody,
        query=(ConsumeBody,),
        query_only=True,
        example={"topic": "orders", "group": "billing", "owner": "w1", "lease_ms": 30000},
        answers={
            200: Answer(
                "Items, until either side ends the stream.",
                Item,
                {
                    "partition": 0,
                    "offset": 0,
                    "attempts": 1,
                    "key": "user-7",
                    "value": "hello",
                    "last_error": "",
                    "envelope": {"run_id": "run-1"},
                    "delivery_id": "1-1",
                },
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 429, 503),
    ),
)
