"""Random HTTP against a broker process: heads, JSON and Arrow bodies.

    python -m tests.fuzz.http --seconds 3600 --seed 1

Whatever is sent: an answer of the common shape or an orderly close, no 500, no traceback in the
broker's log, memory within a bound, and somebody else's connection keeps working. The first thing
that is not so ends the run with the seed and the bytes.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.broker_process import BrokerProcess
from tests.contract.wire import Wire, encode
from tests.fuzz import arrow, json_bodies
from tests.fuzz import request_heads as heads

TIMEOUT_S = 60.0
LOOK_EVERY = 200
"""Cases between two looks at the broker itself."""
MAX_GROWTH_BYTES = 400 * 2**20
SETTINGS = {
    "PENSTOCK_SEGMENT_BYTES": str(8 * 2**20),
    "PENSTOCK_MEMORY_BYTES": str(64 * 2**20),
    "PENSTOCK_REQUEST_TIMEOUT_MS": "2000",
}

GUARDED = {"PENSTOCK_ACCESS_CONTROL": "yes", "PENSTOCK_TOKEN": "the-token-of-the-fuzzer"}
"""Without access control, bodies of tokens are refused before they are read."""

Case = tuple[str, list[bytes]]
"""What kind it is, and the writes of one connection."""


class Finding(AssertionError):
    """The broker did what it must not do."""


class HttpFuzzer:
    """With `token`, that of an admin of a broker with access control, only bodies are sent: heads
    without it would all be refused alike."""

    def __init__(self, broker: BrokerProcess, seed: int, token: str = "") -> None:
        self.broker = broker
        self.seed = seed
        self._headers = [f"Authorization: Bearer {token}"] if token else []
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self._control = Wire(broker.port)
        self._prepare()
        self._rss_bytes = broker.rss_bytes()

    def _prepare(self) -> None:
        """Makes what the bodies name."""
        place = "/v1/tenants/default/namespaces/default/streams"
        for path, body in (
            ("/v1/topics", {"name": "t"}),
            ("/v1/topics", {"name": "control"}),
            ("/v1/tenants", {"tenant_id": "fuzzed"}),
            (place, {"name": "kept", "delivery": "at_least_once"}),
            (place, {"name": "once", "delivery": "exactly_once"}),
        ):
            headers = dict(header.split(": ") for header in self._headers)
            reply = self.broker.client.post(path, json=body, headers=headers)
            assert reply.status_code in (200, 201), reply.text

    def close(self) -> None:
        self._control.socket.close()

    def run(self, is_over: Callable[[int], bool]) -> None:
        """Case after case until it `is_over`, which is told how many there were."""
        count = 0
        while not is_over(count):
            kind, writes = self._case()
            try:
                answered = exchange(self.broker.port, writes)
                statuses = check_answers(answered)
                if count % LOOK_EVERY == 0:
                    self.look()
            except (AssertionError, OSError) as error:
                sent = [data[:2000] for data in writes]
                raise Finding(
                    f"seed {self.seed}, case {count}, {kind}: {error}\n{sent!r}"
                ) from error
            self.counts.update(f"{kind} {status}" for status in statuses)
            self.counts[f"{kind} closed without an answer"] += not statuses
            count += 1
        self.look()

    def look(self) -> None:
        """Is the broker as it should be?"""
        body = b'{"topic":"control","value":"v"}'
        for request in (("GET", "/v1/readyz", None), ("POST", "/v1/produce", body)):
            response = self._control.request(*request, *self._headers)
            assert response.status == 200, response
        assert "Traceback" not in self.broker.stderr(), self.broker.stderr()[-5000:]
        grown = self.broker.rss_bytes() - self._rss_bytes
        assert grown < MAX_GROWTH_BYTES, f"{grown} bytes more memory than at the start"

    def _case(self) -> Case:
        random = self.random
        way = random.random()
        if way < 0.5 and not self._headers:
            return "heads", heads.conversation(random)
        if way < 0.8:
            return "json", [self._request(*json_bodies.body(random))]
        is_cache = random.random() < 0.3
        where = "cache=default/default/default" if is_cache else "topic=t"
        target = f"/v1/writes/p/{random.randrange(3)}/{random.randrange(2)}/0?{where}"
        if way < 0.85:
            return "lines", [self._request("PUT", target, json_bodies.lines(random))]
        data = arrow.stream(random, is_cache=is_cache)
        if random.random() < 0.9:
            data = arrow.damaged(random, data)
        return "arrow", [self._request("PUT", target, data)]

    def _request(self, method: str, target: str, body: bytes) -> bytes:
        return encode(self.broker.port, method, target, body, *self._headers)


def exchange(port: int, writes: list[bytes]) -> bytes:
    """Sends them and closes this side; everything that the broker sends until it closes its own."""
    answered = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for data in writes:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the broker has refused it, and closed
        try:
            while received := connection.recv(65536):
                answered += received
        except ConnectionResetError:
            pass  # it was closed with more on its way
    return answered


def check_answers(data: bytes) -> list[int]:
    """The statuses of all answers; each must be whole and of the common shape."""
    statuses: list[int] = []
    while data:
        head, mark, rest = data.partition(b"\r\n\r\n")
        assert mark, f"half an answer: {data[:300]!r}"
        lines = head.split(b"\r\n")
        assert lines[0].startswith(b"HTTP/1.1 "), f"no status line: {data[:300]!r}"
        status = int(lines[0].split(b" ")[1])
        assert status < 500 or status == 503, f"{status}: {data[:500]!r}"
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        if status == 101:
            return [*statuses, status]
        if status != 100:
            statuses.append(status)
        body, data = _split_body(headers, rest)
        if status >= 400 and body:
            fields = json.loads(body)
            assert fields["error"], body
            assert fields["message"], body
        assert status == 100 or b"x-request-id" in headers, head
    return statuses


def _split_body(headers: dict[bytes, bytes], rest: bytes) -> tuple[bytes, bytes]:
    """The answer's body, and what comes behind it."""
    if headers.get(b"transfer-encoding") == b"chunked":
        body = b""
        while rest:
            size, mark, rest = rest.partition(b"\r\n")
            length = int(size, 16) if mark else 0
            body, rest = body + rest[:length], rest[length + 2 :]
            if not length:
                break
        return body, rest
    length = int(headers.get(b"content-length", b"0"))
    if length and (not rest or rest.startswith(b"HTTP/1.1 ")):
        return b"", rest  # of a HEAD
    assert len(rest) >= length, f"a body is cut off: {rest[:300]!r}"
    return rest[:length], rest[length:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--access-control", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as directory:
        settings = SETTINGS | (GUARDED if options.access_control else {})
        broker = BrokerProcess(Path(directory) / "data", env=settings).start()
        fuzzer = HttpFuzzer(broker, options.seed, settings.get("PENSTOCK_TOKEN", ""))
        try:
            fuzzer.run(lambda count: time.monotonic() > deadline)
        except Finding as finding:
            print(finding, file=sys.stderr)
            return 1
        finally:
            fuzzer.close()
            broker.close()
    for outcome, count in sorted(fuzzer.counts.items()):
        print(f"{count:8} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
