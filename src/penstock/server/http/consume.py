"""The NDJSON stream of a consumer: one item a line, a turn's items in one write.

Headers leave at once. While the connection is above its high-water mark the consumer is paused:
nothing is handed to it, and what was decided for it goes elsewhere when its lease ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock.api.consumers import Consumer
from penstock.model.errors import InvalidArgument, MethodNotAllowed, PenstockError, Unavailable
from penstock.model.item import Item
from penstock.model.names import clean_name
from penstock.server.forms import lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body, whole_number
from penstock.server.http.responses import NDJSON_TYPE
from penstock.server.wire import ConsumeBody

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

MIN_HEARTBEAT_MS = 100

_decoder = msgspec.json.Decoder(ConsumeBody)
_encode_lines = msgspec.json.Encoder().encode_lines


class ConsumeStream:
    """Sink of a consumer and stream of a connection."""

    is_answer = False

    def __init__(self, reply: Reply, heartbeat_ms: int) -> None:
        self._reply = reply
        self._heartbeat_ms = heartbeat_ms
        self._connection: HttpConnection | None = None
        self._consumer: Consumer | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- called by the engine ----------------------------------------------------------------

    def opened(self, outcome: Consumer | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
            return
        if not self._reply.is_wanted():
            outcome.close()
            return
        self._consumer = outcome
        connection = self._connection = self._reply.open_stream(NDJSON_TYPE)
        connection.stream = self
        if connection.is_half_closed:
            # Nothing else would ever tell that this client is gone.
            self.disconnected()
            connection.end_stream()
            return
        if connection.flow.write_paused:
            outcome.pause()
        if self._heartbeat_ms:
            self._beat()

    def write(self, items: list[Item]) -> None:
        if self._connection is not None:
            self._connection.write_chunk(_encode_lines(items))

    def end(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        self._stop_beating()
        if connection is not None:
            connection.end_stream()

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        if self._consumer is not None:
            self._consumer.pause()

    def resume(self) -> None:
        if self._consumer is not None:
            self._consumer.resume()

    def disconnected(self) -> None:
        self._connection = None
        self._stop_beating()
        if self._consumer is not None:
            self._consumer.close()

    def _beat(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if not connection.flow.write_paused:
            connection.write_chunk(b"\n")
        self._timer = connection.loop.call_later(self._heartbeat_ms / 1000, self._beat)

    def _stop_beating(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def consume(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    if dispatch.is_draining:
        raise Unavailable("the broker is stopping")
    body = _body(request)
    prefetch = _not_negative(body.prefetch, "prefetch")
    heartbeat_ms = _not_negative(body.heartbeat_ms, "heartbeat_ms")
    stream = ConsumeStream(reply, heartbeat_ms and max(heartbeat_ms, MIN_HEARTBEAT_MS))
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
