"""GET /v1/consume: the NDJSON stream of a consumer, one item a line.

While the connection is above its high-water mark the consumer is paused: the engine hands nothing
to it, and what was decided for it goes to another consumer when its lease ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.api.consumers import Consumer
from penstock.model.errors import InvalidArgument
from penstock.model.item import Item
from penstock.model.names import clean_name
from penstock.server.forms import lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body, whole_number
from penstock.server.http.responses import NDJSON_TYPE
from penstock.server.http.streamed_response import StreamedResponse, check_streamable
from penstock.server.wire import ConsumeBody

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

_decoder = msgspec.json.Decoder(ConsumeBody)
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

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()


def consume(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    body = _body(request)
    prefetch = _not_negative(body.prefetch, "prefetch")
    heartbeat_ms = _not_negative(body.heartbeat_ms, "heartbeat_ms")
    stream = ConsumeStream(reply, NDJSON_TYPE, heartbeat_ms)
    topic, group = clean_name(body.topic, "topic"), clean_name(body.group, "group")
    owner = clean_name(body.owner, "owner")
    lease_ms = lease_of(body.lease_ms, dispatch.engine.limits.lease_ms)
    reply.when_first(
        lambda: dispatch.engine.open_consumer(
            topic, group, owner, lease_ms, prefetch, stream, stream.opened
        )
    )


def _body(request: Request) -> ConsumeBody:
    if request.body:
        return decode_body(_decoder, request.body)
    params = request.params()
    return ConsumeBody(
        topic=params.get("topic"),
        group=params.get("group"),
        owner=params.get("owner"),
        lease_ms=whole_number(params, "lease_ms"),
        prefetch=whole_number(params, "prefetch"),
        heartbeat_ms=whole_number(params, "heartbeat_ms"),
    )


def _not_negative(value: int | None, name: str) -> int:
    if value is not None and not 0 <= value <= 2**31:
        raise InvalidArgument(f"{name} must be a whole number, 0 or more")
    return value or 0
