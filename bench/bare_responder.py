"""A minimal HTTP server in Python: parses a request, writes a fixed answer, stores nothing.

It is the upper limit for durable produce: it uses the same parser (httptools) and the same loop
(uvloop) as the broker, and sends an answer of the same size. It prints its address, as the broker
does.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools
import uvloop

BODY = b'{"status":"produced","topic":"bench"}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\ncontent-type: application/json\r\n"
    b"x-request-id: 0123456789ab-123456\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Responder(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Responder, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
