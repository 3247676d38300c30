"""A router as an HTTP service, written with Python's standard library only.

Run it, then start a broker that asks it:

    python router_http.py 8090
    penstock serve --router http://127.0.0.1:8090/

The broker POSTs {"topic": ..., "message": {"key", "value", "envelope"}}. The JSON body of a 200 is
the decision: {"label", "target_topic", "partition_override", "meta"}, all optional.

    penstock topic create orders
    penstock produce orders '{"amount": 12000}'
    penstock consume orders --group audit --ack --timeout 2
"""

from __future__ import annotations

import contextlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 10_000


def decide(topic: str, message: dict[str, Any]) -> dict[str, Any]:
    """Labels orders as large or small; other messages get no label."""
    try:
        amount = json.loads(message["value"])["amount"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(amount, int | float):
        return {}
    size = "large" if amount >= LARGE else "small"
    return {"label": size, "meta": {"topic": topic, "amount": str(amount)}}


class Router(BaseHTTPRequestHandler):
    # Connections are kept open: the broker asks for every message.
    protocol_version = "HTTP/1.1"
    # Buffered, so that head and body of an answer are sent together.
    wbufsize = -1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            asked = json.loads(body)
            status, answer = 200, decide(asked["topic"], asked["message"])
        except (ValueError, KeyError, TypeError) as error:
            status, answer = 400, {"error": str(error)}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
        """Logs nothing: one line per message would be too much."""


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8090
    with ThreadingHTTPServer(("127.0.0.1", port), Router) as server:
        print(f"router on http://127.0.0.1:{server.server_port}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
