"""The parser of NATS' protocol, against a plain one, over every kind of split and of damage."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from penstock.cluster.jetstream import wire
from penstock.cluster.jetstream.errors import NatsProtocolError
from penstock.cluster.jetstream.wire import (
    NatsEvent,
    NatsInfo,
    NatsMessage,
    NatsParser,
    NatsPing,
    NatsPong,
    NatsRefusal,
)


def plain_parse(data: bytes) -> list[NatsEvent]:
    """Parses a whole and valid stream of bytes, as simply as it can be written."""
    events: list[NatsEvent] = []
    while data:
        line, data = data.split(b"\r\n", 1)
        word, _, rest = line.partition(b" ")
        if word in (b"MSG", b"HMSG"):
            subject, sid, *reply, total = rest.split()
            headers = 0
            if word == b"HMSG":
                headers = int(reply.pop())
            body, end, data = data[: int(total)], data[int(total) :][:2], data[int(total) + 2 :]
            assert end == b"\r\n"
            to = reply[0] if reply else b""
            events.append(NatsMessage(int(sid), subject, to, body[:headers], body[headers:]))
        elif word == b"INFO":
            events.append(msgspec.json.decode(rest, type=NatsInfo))
        elif word == b"-ERR":
            events.append(NatsRefusal(rest.decode().strip("'")))
        else:
            events.append(NatsPing() if word == b"PING" else NatsPong())
            assert word in (b"PING", b"PONG")
    return events


def drawn_bytes(draw: random.Random, most: int) -> bytes:
    pieces = [
        b"\r\n",
        b"MSG a 1 3\r\n",
        b"\r",
        b"\n",
        b"PING\r\n",
        draw.randbytes(draw.randint(0, 9)),
    ]
    data = b"".join(draw.choices(pieces, k=draw.randint(0, 6)))
    return data + draw.randbytes(draw.choice((0, 1, draw.randint(0, most))))


def drawn_event(draw: random.Random) -> bytes:
    kind = draw.randrange(8)
    if kind == 0:
        return b"PING\r\n"
    if kind == 1:
        return b"PONG\r\n"
    if kind == 2:
        return b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n"
    if kind == 3:
        info = {"server_name": "n" * draw.randint(0, 3000), "max_payload": 5, "headers": True}
        return b"INFO %b\r\n" % msgspec.json.encode(info)
    body = drawn_bytes(draw, draw.choice((20, 2000, 600_000)) if draw.random() < 0.3 else 50)
    subject = b"_INBOX.%d" % draw.randrange(100)
    reply = draw.choice((b"", b"$JS.ACK.x.1 "))
    if kind < 6:
        return b"MSG %b %d %b%d\r\n%b\r\n" % (subject, draw.randrange(9), reply, len(body), body)
    headers = draw.choice((b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\n\r\n", body[:7]))
    body = headers + body
    sizes = b"%d %d" % (len(headers), len(body))
    return b"HMSG %b %d %b%b\r\n%b\r\n" % (subject, draw.randrange(9), reply, sizes, body)


def split(draw: random.Random, data: bytes) -> list[bytes]:
    pieces = []
    most = draw.choice((1, 3, 100, 5000, 1_000_000)) if len(data) < 20_000 else 300_000
    while data:
        size = draw.randint(1, most)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def feed(parser: NatsParser, pieces: list[bytes]) -> list[NatsEvent]:
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("seed", range(60))
def test_any_split_of_the_bytes_gives_the_events_of_a_plain_parser(seed: int) -> None:
    draw = random.Random(seed)
    data = b"".join(drawn_event(draw) for _ in range(draw.randint(1, 40)))
    assert feed(NatsParser(), split(draw, data)) == plain_parse(data)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_are_an_error_or_events_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    data = bytearray(b"".join(drawn_event(draw) for _ in range(draw.randint(1, 12))))
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data))
        damage = draw.choice((b"", draw.randbytes(3), b"9", b"-", b"\r\n", b" "))
        data[at : at + draw.randint(0, 3)] = damage
    parser = NatsParser()
    try:
        for piece in split(draw, bytes(data)):
            for event in parser.feed(piece):
                assert isinstance(event, NatsEvent)
    except NatsProtocolError as error:
        assert str(error)  # noqa: PT017 - any other error fails the test


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_refused_or_wait_for_more(seed: int) -> None:
    draw = random.Random(seed)
    data = b"".join(draw.randbytes(1000) for _ in range(200))
    with pytest.raises(NatsProtocolError):
        feed(NatsParser(), split(draw, data))


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"MSG\r\n",
        b"MSG a\r\n",
        b"MSG a 1\r\n",
        b"MSG a one 5\r\n",
        b"MSG a 1 -1\r\n",
        b"MSG a 1 1_0\r\n0123456789\r\n",
        b"MSG a 1 +3\r\nabc\r\n",
        b"MSG a 1 999999999999\r\n",
        b"MSG a 1 r x 3\r\nabc\r\n",
        b"MSG a 1 3\r\nabcde",
        b"HMSG a 1 3\r\nabc\r\n",
        b"HMSG a 1 4 3\r\nabc\r\n",
        b"HMSG a 1 -1 3\r\nabc\r\n",
        b"INFO {\r\n",
        b"INFO []\r\n",
        b'INFO {"max_payload": "much"}\r\n',
        b'INFO {"max_payload": -1}\r\n',
    ],
)
def test_a_line_that_no_server_sends_is_refused(line: bytes) -> None:
    with pytest.raises(NatsProtocolError):
        NatsParser().feed(line)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    parser = NatsParser()
    with pytest.raises(NatsProtocolError, match="without an end"):
        feed(parser, 40 * [b"x" * 65536])
    assert len(parser._buffer) <= wire.LINE_BYTES_MAX + 65536


def test_a_long_message_in_small_pieces_is_kept_once_and_let_go() -> None:
    data = b"x" * 2_000_000
    parser = NatsParser()
    message = b"MSG a 1 %d\r\n%b\r\n" % (len(data), data)
    for _ in range(3):
        events = [
            e for at in range(0, len(message), 9999) for e in parser.feed(message[at : at + 9999])
        ]
        assert events == [NatsMessage(1, b"a", b"", b"", data)]
    assert len(parser._buffer) == 0


def test_headers_are_read_by_name() -> None:
    headers = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nX:y:z\r\nbad\r\n\r\n"
    message = NatsMessage(1, b"a", b"", headers, b"")
    assert message.header(b"Nats-Last-Consumer") == b"7"
    assert message.header(b"X") == b"y:z"
    assert message.header(b"bad") is None
    assert message.is_control
    assert not message.is_no_responders


@pytest.mark.parametrize("seed", range(10))
def test_what_is_published_is_what_a_server_would_read(seed: int) -> None:
    draw = random.Random(seed)
    data = drawn_bytes(draw, 300)
    headers = draw.choice((b"", b"Nats-Expected-Last-Sequence: 5\r\n"))
    written = wire.publish(b"a.b", draw.choice((b"", b"r")), headers, data)
    line, rest = written.split(b"\r\n", 1)
    sizes = [int(size) for size in re.findall(rb" (\d+)", line)]
    assert rest == (b"NATS/1.0\r\n%b\r\n" % headers if headers else b"") + data + b"\r\n"
    assert sizes[-1] == len(rest) - 2
    if headers:
        assert rest[: sizes[0]].endswith(headers + b"\r\n")
