"""A router of the HTTP kind for tests: it answers what it is told to, when it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpRouter:
    """A router of the HTTP kind whose answer a test may set; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: Callable[[Any], tuple[int, bytes]] = lambda _: (200, b"{}")
        self.delay_s = 0.0
        self.may_answer = threading.Event()
        self.may_answer.set()
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                router.asked.append(body)
                status, answer = router.answer(body)
                router.may_answer.wait()
                time.sleep(router.delay_s)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the broker did not wait

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/route"

    def says(self, answer: Any) -> None:
        self.answer = lambda _: (200, json.dumps(answer).encode())

    def close(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()
