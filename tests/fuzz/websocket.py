"""Random and damaged WebSocket traffic against a real broker, with a fixed seed.

Each session is one connection. It sends messages that are right, damaged or nonsense, whole or in
fragments, cut anywhere into packets, and at last something that ends it. The broker must answer
with well-formed frames, end the connection with the code that RFC 6455 has for what was wrong, and
let nobody else notice. By hand, for as long as it is told:

    python -m tests.fuzz.websocket --seconds 3600 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.server import message_actions
from penstock.server.websocket.answers import FRAMES
from tests.broker_process import BrokerProcess, eventually
from tests.contract.namespaces import Namespace
from tests.contract.stream_clients import Session, gauges
from tests.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Closed,
    NoFrame,
    WebSocket,
    frame,
)

TIMEOUT_S = 60.0
MAX_BODY_BYTES = 100_000
ENV = {
    "PENSTOCK_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "PENSTOCK_MAX_MESSAGE_BYTES": "50000",
    "PENSTOCK_REQUEST_TIMEOUT_MS": "2000",
}
SCOPE = {"tenant_id": "default", "namespace": "default"}
STREAM = SCOPE | {"stream": "default"}
KEPT, ONCE = SCOPE | {"stream": "fuzz-kept"}, SCOPE | {"stream": "fuzz-once"}
"""Durable streams: `fuzz-kept` for named subscriptions, `fuzz-once` for numbered publishes."""
CACHE = SCOPE | {"cache": "default"}
NAMED = KEPT | {"name": "billing", "owner": "w1"}

MESSAGES: list[dict[str, Any]] = [
    *({"type": each.type, **each.example} for each in message_actions.MESSAGES),
    {"type": "publish", **KEPT, "payload": "aGVsbG8="},
    {"type": "publish", **ONCE, "payload": "aGk=", "producer_id": "p", "sequence": 0},
    {
        "type": "publish_batch", **ONCE, "payloads": ["b25l", "dHdv"], "producer_id": "q",
        "sequence": 1, "ack": "per_message",
    },
    {"type": "subscribe", **NAMED, "start": "earliest", "lease_ms": 20, "prefetch": 2},
    {"type": "subscribe", **KEPT, "name": "audit", "owner": "w2", "batch": False},
    {"type": "subscribe", **KEPT, "start": 0},
    {"type": "subscribe", **ONCE, "start": "2020-01-01T00:00:00Z", "lag": True},
    {"type": "subscribe", **KEPT, "start": 2**40},
    {"type": "event_ack", "subscription_id": "n1", "offset": 0},
    {"type": "event_release", "subscription_id": "n1", "offset": 0},
    {"type": "event_nack", "subscription_id": "n1", "offset": 1, "reason": "no", "delay_ms": 0},
    {"type": "publish", **STREAM, "payload": "aGVsbG8=", "invalidate": ["cache:default:k"]},
    {"type": "publish", **STREAM, "payload": "", "ack": "none"},
    {"type": "publish_batch", **STREAM, "payloads": ["b25l", "dHdv"], "ack": "per_message"},
    {"type": "subscribe", **STREAM, "event_queue_depth": 8, "lag": True, "batch": False},
    {"type": "cache_put", **CACHE, "key": "k", "value": "dg==", "ttl_ms": 1000, "if_version": 0},
    {"type": "cache_put", **CACHE, "key": "k", "value": "dg==", "if_not_exists": True},
    {"type": "cache_get", **CACHE, "key": "k"},
    {"type": "cache_get_many", **CACHE, "keys": ["k", "l"]},
    {"type": "cache_delete", **CACHE, "key": "k", "if_version": 3},
    {"type": "cache_incr", **CACHE, "key": "n", "delta": -3, "ttl_ms": 1000},
    {
        "type": "cache_txn",
        **CACHE,
        "checks": [{"key": "k", "exists": False}],
        "ops": [{"op": "put", "key": "k", "value": "dg=="}, {"op": "incr", "key": "n"}],
    },
    {"type": "cache_watch", **CACHE, "prefix": "", "include": ["expire"], "since_version": 1},
]  # fmt: skip
"""The example of every message, and messages with more members. Few names: sessions meet."""

ANSWERS = {described.type for described in FRAMES}
ERRORS = {
    "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED", "OUT_OF_RANGE",
}  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**53, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, "", " ",
    "x" * 5000, "\x00", "\ud800", "é", "cache:", "cache:default:", "per_batch", "s1", "w1", "n1",
    "earliest", "2020-01-01T00:00:00Z", "1-1",
    [], {}, [[]], [None], [1], [""], {"type": "ping"}, [{"op": "put"}], ["expire", "gap"],
]  # fmt: skip

Violation = tuple[bytes, set[int]]
"""Bytes that end the connection, and the codes that say why."""


class Fuzzer:
    """`marker` numbers the pings that show how far the broker has answered. `types` are those of
    all frames that came."""

    def __init__(self, ns: Namespace, seed: str) -> None:
        self.ns = ns
        self.seed = seed
        self.rng = random.Random(seed)
        self.marker = 0
        self.types: set[str] = set()
        self.subscriptions: list[str] = []
        self.deliveries: list[dict[str, Any]] = []
        self.steps = 0
        self.is_binary = self.rng.random() < 0.5

    def run(self) -> int:
        """One session; how many steps it had."""
        subprotocol = "felix.v1+binary" if self.is_binary else "felix.v1"
        with WebSocket(self.ns.broker.port, subprotocol=subprotocol) as ws:
            for _ in range(self.rng.randrange(12)):
                self.steps += 1
                data, codes = self.rng.choice(self.good_steps())()
                if codes:
                    self.expect_close(ws, data, codes)
                    return self.steps
                self.send(ws, data)
                self.expect_marker(ws)
            self.rng.choice([self.violate, self.close, self.leave, self.mutate])(ws)
        return self.steps

    # -- steps that leave the connection open, unless a text is not UTF-8 -------------------------

    def good_steps(self) -> list[Callable[[], Violation]]:
        steps = [self.text, self.damaged_text, self.damaged_text, self.odd_text, self.array]
        steps += [self.fragments, self.controls, self.nonsense]
        return [*steps, self.binary, self.binary] if self.is_binary else steps

    def text(self) -> Violation:
        return frame(TEXT, encode(self.message())), set()

    def damaged_text(self) -> Violation:
        return self.as_text(damage(self.rng, encode(self.message())))

    def odd_text(self) -> Violation:
        """JSON with members that are not as they should be."""
        message = self.message()
        for _ in range(self.rng.randrange(1, 3)):
            name = self.rng.choice([*message, "extra", "type", "request_id"])
            if self.rng.random() < 0.2:
                message.pop(name, None)
            else:
                message[name] = self.rng.choice(ODD_VALUES)
        return self.as_text(encode(message))

    def array(self) -> Violation:
        items = [encode(self.message()) for _ in range(self.rng.randrange(4))]
        data = b"[" + b",".join(items) + b"]"
        return self.as_text(damage(self.rng, data) if self.rng.random() < 0.5 else data)

    def nonsense(self) -> Violation:
        depth = self.rng.choice([1, 100, 3000])
        options = [b"", b"nul", b"[" * depth, b'{"a":' * depth, b"1e999999", b'"\\ud800"', b"{}"]
        return self.as_text(self.rng.choice([*options, self.rng.randbytes(20)]))

    def fragments(self) -> Violation:
        """A message in pieces, with control frames between them."""
        payload = encode(self.message())
        is_bad = self.rng.random() < 0.2
        if is_bad:
            payload += b"\xff"
        cuts = sorted(self.rng.randrange(len(payload) + 1) for _ in range(self.rng.randrange(1, 6)))
        pieces = [payload[a:b] for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
        data = b""
        for place, piece in enumerate(pieces):
            is_last = place == len(pieces) - 1
            data += frame(CONTINUATION if place else TEXT, piece, fin=is_last)
            if not is_last and self.rng.random() < 0.5:
                data += frame(self.rng.choice([PING, PONG]), self.rng.randbytes(5))
        return data, {1007} if is_bad else set()

    def controls(self) -> Violation:
        size = self.rng.choice([0, 1, 125])
        opcode = self.rng.choice([PING, PONG])
        return frame(opcode, self.rng.randbytes(size)) * self.rng.randrange(1, 4), set()

    def binary(self) -> Violation:
        payload = binary_publish(self.rng)
        if self.rng.random() < 0.8:
            payload = damage(self.rng, payload)
        return frame(BINARY, payload), set()

    def as_text(self, payload: bytes) -> Violation:
        try:
            payload.decode()
        except UnicodeDecodeError:
            return frame(TEXT, payload), {1007}
        return frame(TEXT, payload), set()

    def message(self) -> dict[str, Any]:
        message = dict(self.rng.choice(MESSAGES))
        # Mostly what this session has: otherwise hardly an ack would be right.
        if "subscription_id" in message and self.rng.random() < 0.8:
            if "offset" in message and self.deliveries:
                message |= self.rng.choice(self.deliveries)
            elif self.subscriptions:
                message["subscription_id"] = self.rng.choice(self.subscriptions)
        if self.rng.random() < 0.5:
            message["request_id"] = self.rng.choice(["r", 7])
        return message

    # -- ends -------------------------------------------------------------------------------------

    def violate(self, ws: WebSocket) -> None:
        ping = encode({"type": "ping"})
        options: list[Violation] = [
            (frame(TEXT, ping, masked=False), {1002}),
            (frame(TEXT, ping, rsv=self.rng.randrange(1, 8)), {1002}),
            (frame(self.rng.choice([3, 4, 5, 6, 7, 11, 12, 15]), ping), {1002}),
            (frame(PING, b"x", fin=False), {1002}),
            (frame(PING, b"x" * 126), {1002}),
            (frame(CLOSE, b"\x03\xe8" + b"x" * 124), {1002}),
            (frame(CONTINUATION, ping), {1002}),
            (frame(TEXT, b"[", fin=False) + frame(TEXT, b"]"), {1002}),
            (frame(TEXT, ping, wide=2), {1002}),
            (frame(TEXT, ping, wide=8), {1002}),
            (frame(TEXT, b"", size=2**63, wide=8), {1002}),
            (frame(TEXT, b"x", size=MAX_BODY_BYTES + 1), {1009}),
            (frame(TEXT, b"", size=2**62), {1009}),
            (
                frame(TEXT, b"x" * 60_000, fin=False) + frame(CONTINUATION, b"x" * 60_000),
                {1009},
            ),
            (frame(TEXT, b"\xc3\x28"), {1007}),
        ]
        if not self.is_binary:
            options.append((frame(BINARY, self.rng.randbytes(9)), {1003}))
        data, codes = self.rng.choice(options)
        self.expect_close(ws, data, codes)

    def close(self, ws: WebSocket) -> None:
        """The broker says the code again, or that it is none."""
        code = self.rng.choice([None, 0, 999, 1000, 1001, 1004, 1005, 1006, 1011, 1015, 2999, 3000,
                                4999, 5000, 65535])  # fmt: skip
        reason = self.rng.choice([b"", b"bye", b"\xff\xfe", "größe".encode()])
        if code is None:
            is_short = self.rng.random() < 0.5
            payload, codes = (b"\x03", {1002}) if is_short else (b"", {0})
        else:
            payload = struct.pack(">H", code) + reason
            is_sendable = code in {1000, 1001, 1011} or 3000 <= code < 5000
            codes = {code} if is_sendable else {1002}
            if is_sendable and reason == b"\xff\xfe":
                codes = {1007}
        self.expect_close(ws, frame(CLOSE, payload), codes)

    def leave(self, ws: WebSocket) -> None:
        """Half a frame, and gone."""
        data = frame(TEXT, encode(self.message()))
        ws.send_raw(data[: self.rng.randrange(len(data))])
        if self.rng.random() < 0.5:
            ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def mutate(self, ws: WebSocket) -> None:
        """Frames with any byte damaged, or no frames at all. What it means is not known here; the
        connection must end soon after the client has ended its side."""
        data = b"".join(frame(TEXT, encode(self.message())) for _ in range(3))
        is_garbage = self.rng.random() < 0.3
        data = self.rng.randbytes(200) if is_garbage else damage(self.rng, data)
        with contextlib.suppress(OSError):
            ws.send_raw(data)
            ws.socket.shutdown(socket.SHUT_WR)
        code = self.read_to_end(ws)
        known = {None, 0, 1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 1012, 1013, 1014}
        assert code in known or 3000 <= (code or 0) < 5000, self.say(f"closed with {code}")

    # -- expectations -----------------------------------------------------------------------------

    def send(self, ws: WebSocket, data: bytes) -> None:
        """In packets that end anywhere."""
        while data:
            size = self.rng.choice([1, 2, 7, 100, len(data)])
            ws.send_raw(data[:size])
            data = data[size:]

    def expect_marker(self, ws: WebSocket) -> None:
        """All that was sent has been answered, and the connection goes on."""
        self.marker += 1
        mark = f"marker {self.marker}"
        ws.send({"type": "ping", "request_id": mark})
        while True:
            answer = self.receive(ws)
            if isinstance(answer, dict) and answer.get("request_id") == mark:
                assert answer["type"] == "ok", self.say(answer)
                return

    def expect_close(self, ws: WebSocket, data: bytes, codes: set[int]) -> None:
        # The broker may have seen enough before all is sent.
        with contextlib.suppress(OSError):
            self.send(ws, data)
        code = self.read_to_end(ws)
        assert code in codes, self.say(f"closed with {code}, not {codes}, after {data[:200]!r}")

    def read_to_end(self, ws: WebSocket) -> int | None:
        """The code of the close frame, 0 if it had none; None without one."""
        code: int | None = None
        try:
            while True:
                found = self.receive(ws)
                if isinstance(found, int):
                    code = found
                    ws.send_frame(CLOSE, b"")
                    if self.rng.random() < 0.9:
                        # The broker lingers a second after some violations; mostly not for us.
                        return code
        except Closed:
            return code
        except OSError:
            return code

    def receive(self, ws: WebSocket) -> Any:
        """The next answer, checked; or the code of a close frame."""
        while True:
            try:
                opcode, payload = ws.receive_any(TIMEOUT_S)
            except NoFrame as error:
                raise AssertionError(self.say("no answer and no end")) from error
            if opcode == CLOSE:
                payload[2:].decode()
                return int.from_bytes(payload[:2], "big")
            if opcode == TEXT:
                answer = json.loads(payload)
                self.check(answer)
                return answer
            assert opcode in (PING, PONG, BINARY), self.say(f"opcode {opcode}")

    def check(self, answer: Any) -> None:
        for each in answer if isinstance(answer, list) else [answer]:
            if isinstance(each, list):
                self.check(each)
            elif each is not None:
                assert each["type"] in ANSWERS, self.say(each)
                self.types.add(each["type"])
                if each["type"] == "subscribed":
                    self.subscriptions.append(each["subscription_id"])
                elif "delivery_id" in each:
                    names = ("subscription_id", "offset", "delivery_id")
                    self.deliveries.append({name: each[name] for name in names})
                if each["type"] in ("error", "subscribe_cursor_error"):
                    assert each["error"] in ERRORS, self.say(each)
                    assert len(each["message"]) < 500, self.say(each)

    def say(self, what: object) -> str:
        return f"seed {self.seed!r}, step {self.steps}: {what}"


def encode(message: Any) -> bytes:
    return json.dumps(message).encode("utf-8", "surrogatepass")


def damage(rng: random.Random, data: bytes) -> bytes:
    """A few bytes flipped, taken out, put in, repeated or cut off."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(found) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del found[at : at + rng.randrange(1, 5)]
        elif how == 2:
            found[at:at] = rng.choice([b'"', b"{", b"}", b"[", b",", b"\\", b"0", rng.randbytes(3)])
        elif how == 3:
            found[at:at] = found[at : at + 20]
        else:
            del found[at:]
    return bytes(found)


def binary_publish(rng: random.Random) -> bytes:
    names = b"".join(bytes([len(name)]) + name for name in [b"default"] * 3)
    payloads = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 4))]
    body = b"".join(struct.pack("<I", len(each)) + each for each in payloads)
    head = struct.pack("<BBI", 2, rng.randrange(3), rng.randrange(2**32))
    return head + names + struct.pack("<I", len(payloads)) + body


class Bystanders:
    """A subscriber of a stream of its own, and a connection that asks: neither may notice."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.ns = Namespace(broker)
        self.stream = self.ns.create_stream()
        self.subscriber = Session(self.ns)
        self.subscriber.subscribe(self.stream)
        self.control = Session(self.ns)
        self.published = 0

    def check(self) -> None:
        payload = b"%d" % self.published
        self.published += 1
        answer = self.control.publish(self.stream, payload, request_id=self.published)
        assert answer == {"type": "publish_ok", "request_id": self.published}, answer
        assert self.subscriber.events(1, TIMEOUT_S) == [payload]
        assert self.broker.client.get("/v1/livez").status_code == 200

    def finish(self) -> None:
        """No connection of the fuzzer is left, and nothing went wrong inside."""
        self.check()
        eventually(lambda: gauges(self.broker)["penstock_websockets"] == 2, timeout_s=TIMEOUT_S)
        for each in (self.subscriber, self.control):
            each.socket.close()
        log = self.broker.stderr()
        assert "Traceback" not in log, log[-5000:]


def create_durable_streams(broker: BrokerProcess) -> None:
    for stream, delivery in ((KEPT, "at_least_once"), (ONCE, "exactly_once")):
        body = {"name": stream["stream"], "delivery": delivery, "retention_bytes": 10_000}
        reply = broker.client.post("/v1/tenants/default/namespaces/default/streams", json=body)
        assert reply.status_code in (200, 201), reply.text


def fuzz(
    broker: BrokerProcess, seed: int, *, sessions: int = 0, seconds: float = 0.0
) -> tuple[int, set[str]]:
    """So many sessions, or as many as the time allows; how many steps they had, and the types of
    the frames that came."""
    bystanders = Bystanders(broker)
    create_durable_streams(broker)
    deadline = time.monotonic() + seconds
    number = steps = 0
    types: set[str] = set()
    while number < sessions or time.monotonic() < deadline:
        fuzzer = Fuzzer(bystanders.ns, f"{seed}-{number}")
        steps += fuzzer.run()
        types |= fuzzer.types
        number += 1
        if number % 10 == 0:
            bystanders.check()
        if seconds and number % 1000 == 0:
            print(f"{number} sessions, {steps} steps", flush=True)
    bystanders.finish()
    return steps, types


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz a broker's WebSocket.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        broker = BrokerProcess(Path(directory) / "data", env=ENV)
        try:
            steps, types = fuzz(broker.start(), options.seed, seconds=options.seconds)
            print(f"{steps} steps, nothing found; frames: {', '.join(sorted(types))}")
        finally:
            broker.close()


if __name__ == "__main__":
    main()
