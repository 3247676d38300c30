"""WebSocket frames without a socket: what is understood, what is refused, and what is held."""

from __future__ import annotations

import os
import random

import pytest

from penstock.server.websocket.framing import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    TEXT,
    FrameReader,
    Violation,
    close_frame,
    frame_head,
    read_close,
    unmask,
)
from tests.websocket import frame

LIMIT = 1000


def read_all(reader: FrameReader) -> list[tuple[int, bytes]]:
    """What is whole; that a fragment came is not."""
    found = []
    while (message := reader.next_message()) is not None:
        if message != (CONTINUATION, b""):
            found.append(message)
    return found


def violation_of(data: bytes) -> Violation:
    reader = FrameReader(LIMIT)
    reader.feed(data)
    with pytest.raises(Violation) as caught:
        read_all(reader)
    return caught.value


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 127, 4095, 4096, 4101, 65535, 65536, 70001])
def test_a_payload_of_any_size_comes_as_it_was_sent(size: int) -> None:
    payload = os.urandom(size)
    reader = FrameReader(10**6)
    reader.feed(frame(BINARY, payload))
    assert read_all(reader) == [(BINARY, payload)]


def test_a_fragment_is_handed_out_by_itself_so_that_its_reader_can_stop_after_it() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(frame(TEXT, b"a", fin=False) + frame(CONTINUATION, b"", fin=False) * 2)
    assert [reader.next_message() for _ in range(4)] == [(CONTINUATION, b"")] * 3 + [None]
    reader.feed(frame(CONTINUATION, b"b"))
    assert reader.next_message() == (TEXT, b"ab")


def test_messages_are_the_same_however_their_bytes_are_cut() -> None:
    sent = [(TEXT, b"x" * size) for size in (0, 1, 125, 126, 5000)] + [(PING, b"p")]
    data = b"".join(frame(opcode, payload) for opcode, payload in sent)
    data += frame(TEXT, b"ab", fin=False) + frame(PING) + frame(CONTINUATION, b"c")
    expected = [*sent, (PING, b""), (TEXT, b"abc")]
    chance = random.Random(7)
    for _ in range(50):
        reader = FrameReader(10**6)
        found = []
        rest = data
        while rest:
            size = chance.choice([1, 2, 3, 5, 130, 4096])
            reader.feed(rest[:size])
            rest = rest[size:]
            if chance.random() < 0.7:
                found += read_all(reader)
        found += read_all(reader)
        assert found == expected


def test_no_bytes_at_all_are_a_surprise() -> None:
    chance = random.Random(11)
    for _ in range(3000):
        reader = FrameReader(LIMIT)
        try:
            for _ in range(3):
                reader.feed(chance.randbytes(chance.choice([1, 7, 40, 400])))
                read_all(reader)
        except Violation:
            continue
        assert reader.held_bytes <= LIMIT + 400


def test_frames_are_handed_out_one_at_a_time() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(frame(TEXT, b"1") + frame(TEXT, b"2"))
    assert reader.next_message() == (TEXT, b"1")
    reader.feed(frame(TEXT, b"3"))
    assert read_all(reader) == [(TEXT, b"2"), (TEXT, b"3")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"x", masked=False), 1002),
        (frame(TEXT, b"x", rsv=4), 1002),
        (frame(TEXT, b"x", rsv=1), 1002),
        (frame(3, b"x"), 1002),
        (frame(0xB, b"x"), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", size=126, wide=2), 1002),
        (frame(CONTINUATION, b"x"), 1002),
        (frame(TEXT, b"x", fin=False) + frame(TEXT, b"y"), 1002),
        (frame(TEXT, b"x" * 5, wide=2), 1002),
        (frame(TEXT, b"x" * 126, wide=8), 1002),
        (frame(TEXT, b"", size=2**63, wide=8), 1002),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, "é".encode()[:1], fin=False) + frame(CONTINUATION, b"x"), 1007),
        (frame(TEXT, b"", size=LIMIT + 1), 1009),
        (frame(BINARY, b"x" * 600, fin=False) + frame(CONTINUATION, b"", size=401), 1009),
    ],
)
def test_a_frame_against_the_rules_has_its_code(data: bytes, code: int) -> None:
    assert violation_of(data).code == code


def test_a_frame_over_the_limit_is_refused_by_its_head_alone() -> None:
    """Limits before memory: not a byte of its payload is awaited, not even its mask."""
    assert violation_of(frame(TEXT, b"", size=10**9)[:10]).code == 1009


def test_a_character_may_be_cut_between_fragments() -> None:
    reader = FrameReader(LIMIT)
    text = "é".encode()
    reader.feed(frame(TEXT, text[:1], fin=False) + frame(CONTINUATION, text[1:]))
    assert read_all(reader) == [(TEXT, text)]


def test_what_is_not_whole_is_counted() -> None:
    reader = FrameReader(10**6)
    reader.feed(frame(TEXT, b"x" * 100, fin=False))
    assert read_all(reader) == []
    assert reader.held_bytes == 100
    reader.feed(frame(CONTINUATION, b"y" * 5000)[:3000])
    assert read_all(reader) == []
    assert 2900 < reader.held_bytes < 3100


def test_masking_twice_changes_nothing() -> None:
    for size in (0, 1, 7, 4096, 4097, 100_003):
        data, mask = os.urandom(size), os.urandom(4)
        assert unmask(mask, unmask(mask, data)) == data
        assert unmask(mask, data) == bytes(b ^ mask[i % 4] for i, b in enumerate(data))


@pytest.mark.parametrize(
    ("payload", "code"),
    [(b"\x03", 1002), (b"\x03\xed", 1002), (b"\x03\xe7", 1002), (b"\x03\xe8\xff", 1007)],
)
def test_a_close_frame_says_a_code_that_may_be_sent(payload: bytes, code: int) -> None:
    with pytest.raises(Violation) as caught:
        read_close(payload)
    assert caught.value.code == code


def test_a_close_frame_is_read_and_made() -> None:
    assert read_close(b"") == 1005
    assert read_close(b"\x03\xe8bye") == 1000
    assert read_close((4000).to_bytes(2, "big")) == 4000
    assert close_frame(1005, "") == bytes((0x80 | CLOSE, 0))
    assert close_frame(1000, "bye") == bytes((0x80 | CLOSE, 5)) + b"\x03\xe8bye"
    long = close_frame(1002, "é" * 100)
    assert long[1] <= 125
    long[4:].decode()


@pytest.mark.parametrize(
    ("size", "head"),
    [
        (0, b"\x81\x00"),
        (125, b"\x81\x7d"),
        (126, b"\x81\x7e\x00\x7e"),
        (65535, b"\x81\x7e\xff\xff"),
        (65536, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00"),
    ],
)
def test_a_servers_frame_has_the_shortest_length_and_no_mask(size: int, head: bytes) -> None:
    assert frame_head(TEXT, size) == head
