"""Where in the log a partition's messages are, also when a lot lies between them."""

from __future__ import annotations

import pytest

from penstock.engine.window import CHUNK_SPAN, Window
from penstock.model.records import Message

FAR = CHUNK_SPAN * 3


def message(offset: int) -> Message:
    return Message(topic_id=1, partition=0, offset=offset, ts=offset, key="", value="v")


def positions(window: Window) -> list[int]:
    chunks = window.log(1, 0).chunks_from(0)
    return [position for chunk in chunks for position in chunk.positions_from(0)]


@pytest.mark.parametrize(
    "places",
    [
        [FAR, FAR + CHUNK_SPAN - 1, FAR + CHUNK_SPAN, FAR + 2 * CHUNK_SPAN - 1],
        [0, FAR, 2**64, 2**64 + CHUNK_SPAN + 1],
    ],
    ids=["at the edge of a chunk", "beyond 64 bits"],
)
def test_messages_far_apart_in_the_log_keep_their_positions(places: list[int]):
    window = Window(memory_bytes=0)
    window.open_topic(1, 1)
    for offset, place in enumerate(places):
        window.add(message(offset), 1, place)

    assert positions(window) == places


def test_messages_that_are_added_together_may_reach_past_the_span_of_a_chunk():
    window = Window(memory_bytes=0)
    window.open_topic(1, 1)
    window.add(message(0), 1, FAR)
    start = FAR + CHUNK_SPAN - 10
    window.add_run([(message(1), 1, 0), (message(2), 1, CHUNK_SPAN - 1)], start)
    window.add_run([(message(3), 1, CHUNK_SPAN)], start)

    assert positions(window) == [FAR, start, start + CHUNK_SPAN - 1, start + CHUNK_SPAN]
