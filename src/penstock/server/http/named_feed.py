"""The events of a named subscription over plain HTTP, as NDJSON or server-sent events.

While the connection is above its high-water mark the consumer is paused, as with a consume stream:
the engine hands nothing to it, and deliveries that were already recorded go back. The first line
names the subscription and its owner; if the broker ends it, the last line says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.consumers import Consumer
from penstock.model.errors import NotFound, PenstockError, Unavailable
from penstock.model.item import EventItem
from penstock.model.streams import SubscribeNamed
from penstock.server.http.feeds import FeedFormat
from penstock.server.http.responses import typed_error
from penstock.server.http.streamed_response import Guard, StreamedResponse
from penstock.server.named_events import encode_lines, encode_sse
from penstock.server.websocket.answers import named_answer

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply


class NamedFeed(StreamedResponse[Consumer]):
    """The sink of a consumer of a stream."""

    def __init__(
        self,
        reply: Reply,
        guard: Guard,
        form: FeedFormat,
        heartbeat_ms: int,
        command: SubscribeNamed,
    ) -> None:
        super().__init__(reply, guard, form.head, heartbeat_ms, form.heartbeat)
        self._form = form
        self._command = command
        self._id = ""
        self._stream_id = 0

    def send_opening(self, connection: HttpConnection, source: Consumer) -> None:
        self._id = f"n{source.id}"
        self._stream_id = source.topic_id
        opening = named_answer(self._id, self._command, source)
        connection.write_chunk(self._form.encode("subscribed", opening))

    def begin(self, connection: HttpConnection, source: Consumer) -> None:
        if connection.flow.write_paused:
            source.pause()

    # -- called by the engine ----------------------------------------------------------------

    def write(self, items: list[EventItem]) -> None:
        if self._connection is not None:
            self._connection.write_chunk(self._encode(items))

    def _encode(self, items: list[EventItem]) -> bytes:
        if self._form.is_sse:
            return encode_sse(self._id, self._stream_id, items)
        return encode_lines(self._id, items)

    def end(self, reason: str) -> None:
        source = self._source
        is_gone = source is not None and source.closed
        self.refuse(NotFound(reason) if is_gone else Unavailable(reason))

    def refuse(self, error: PenstockError) -> None:
        connection = self._connection
        self.detach()
        if connection is not None:
            body = typed_error(error, subscription_id=self._id)
            connection.write_chunk(self._form.encode("error", body))
            connection.end_stream()

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()
