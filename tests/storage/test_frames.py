"""A frame is read as it was encoded, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.frames import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    MAX_FRAME_BYTES,
    OFFSET_MASK,
    POSITION_BITS,
    Frame,
    encode_frame,
    frame_at,
    frame_records,
    frames_after,
)

SALT = 77


def encoded(seq: int, *records: bytes, synced: int = 0) -> bytes:
    return b"".join(encode_frame(seq, synced, SALT, records))


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 2**36 - 1))
def test_records_come_back_with_their_positions(records: list[bytes], seq: int) -> None:
    data = b"before" + encoded(seq, *records) + b"behind"
    frame = frame_at(data, 6, SALT)
    assert frame is not None
    positions, found = frame_records(data, frame)
    assert found == records
    offset = 0
    for position, record in zip(positions, found, strict=True):
        assert (position >> POSITION_BITS, position & OFFSET_MASK) == (seq, offset)
        offset += 4 + len(record)
    assert data[frame.end :] == b"behind"


def test_a_flipped_bit_anywhere_makes_a_frame_invalid() -> None:
    """driftq-48"""
    data = encoded(5, b"one", b"two", synced=4)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert frame_at(bytes(damaged), 0, SALT) is None


def test_a_frame_cut_short_is_invalid() -> None:
    data = encoded(5, b"one", b"two")
    assert all(frame_at(data[:length], 0, SALT) is None for length in range(len(data)))


def test_a_frame_of_another_segment_is_invalid() -> None:
    assert frame_at(encoded(5, b"one"), 0, SALT + 1) is None


def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    data = bytearray(encoded(1, b"x"))
    data[24:28] = MAX_FRAME_BYTES.to_bytes(4, "little")
    assert frame_at(bytes(data), 0, SALT) is None


def test_valid_frames_are_found_at_any_byte() -> None:
    data = FRAME_MAGIC + b"garbage" + encoded(8, b"a") + b"!" + encoded(9, b"b")
    assert [frame.seq for frame in frames_after(data, 0, SALT)] == [8, 9]


def test_a_payload_that_does_not_match_its_header_is_an_error() -> None:
    data = encoded(3, b"one", b"two")
    frame = Frame(0, 3, 0, FRAME_HEADER_BYTES, len(data), 3)
    with pytest.raises(ValueError, match="3 records"):
        frame_records(data, frame)
