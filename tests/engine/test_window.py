"""Where in the log a partition's messages are, in memory or evicted, near each other or not."""

from __future__ import annotations

import pytest

from penstock.engine.window import CHUNK_SPAN, Chunk, Window
from penstock.model.records import Message

FAR = 2**64


def message(offset: int) -> Message:
    return Message(topic_id=1, partition=0, offset=offset, ts=offset, key="", value="v")


def chunks(window: Window) -> list[Chunk]:
    return list(window.log(1, 0).chunks_from(0))


def positions(window: Window) -> list[int]:
    return [position for chunk in chunks(window) for position in chunk.positions_from(0)]


@pytest.mark.parametrize(
    ("places", "bytes_each"),
    [
        ([FAR, FAR + 1, FAR + 2**32 - 1], [4]),
        ([FAR, FAR + 1, FAR + 2**32], [8]),
        ([0, CHUNK_SPAN - 1, CHUNK_SPAN, FAR], [8, 4, 4]),
    ],
    ids=["near each other", "not so near", "in chunks of their own"],
)
def test_evicted_messages_keep_their_positions_in_as_few_bytes_as_hold_them(
    places: list[int], bytes_each: list[int]
):
    window = Window(memory_bytes=0)
    window.open_topic(1, 1)
    for offset, place in enumerate(places):
        window.add(message(offset), 1, place)
    assert positions(window) == places
    window.evict()
    assert positions(window) == places
    assert all(chunk.messages is None for chunk in chunks(window))
    assert [chunk.positions.itemsize for chunk in chunks(window)] == bytes_each
