"""The NDJSON stream of a consumer, one item a line.

While the connection is above its high-water mark the consumer is paused: the engine hands nothing
to it, and deliveries that were already recorded for it go back to their group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.api.consumers import Consumer
from penstock.model.errors import PermissionDenied
from penstock.model.item import Item
from penstock.server.http.streamed_response import StreamedResponse

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection

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
