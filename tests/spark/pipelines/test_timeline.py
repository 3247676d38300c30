"""The picture of a run: what is in it, and that any run has one."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from penstock.spark.pipelines.timeline import MAX_LANES, Bar, bars, chosen, draw

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)

Row = dict[str, Any]


def at(ms: int) -> datetime:
    return NOON + timedelta(milliseconds=ms)


SCOPE = {"tenant": None, "namespace": None}


def step(name: str | None, start: int = 0, end: int = 10, **columns: Any) -> Row:
    return {
        "step_id": name, "topic": "work", "group": "workers", **SCOPE, "outcome": "succeeded",
        "failures": 0, "dead_letters": 0, "path_position": None, "produced_at": at(start),
        "delivered_at": at(start), "finished_at": at(end), "waiting_ms": 0,
        "running_ms": end - start, "retry_ms": 0,
        "last_message": {"produced_at": at(start), "ended_at": at(end)},
    } | columns  # fmt: skip


def attempt(start: int, end: int | None, outcome: str = "acked", **columns: Any) -> Row:
    return {
        "step_id": "s", "topic": "work", "group": "workers", **SCOPE, "partition": 0, "offset": 0,
        "position": start, "produced_at": at(0), "delivered_at": at(start),
        "ended_at": None if end is None else at(end), "outcome": outcome, "retry_at": None,
    } | columns  # fmt: skip


def size(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def areas(png: bytes) -> dict[Any, int]:
    """How many points there are of each colour."""
    with Image.open(BytesIO(png)) as image:
        counted = image.convert("RGB").getcolors(1 << 16)
    assert counted is not None
    return {colour: count for count, colour in counted}


RED, BLUE, ORANGE = (0xD6, 0x45, 0x45), (0x3B, 0x7D, 0xD8), (0xE0, 0x8A, 0x00)


def test_a_message_waits_fails_is_put_off_and_runs():
    tries = [attempt(10, 30, "nacked", retry_at=at(50)), attempt(55, 70)]
    assert bars(tries, at(100)) == [
        Bar(0, at(0), at(10), "waiting"),
        Bar(0, at(10), at(30), "failed"),
        Bar(0, at(30), at(55), "back-off"),
        Bar(0, at(55), at(70), "running"),
    ]


def test_what_has_not_ended_goes_on_to_the_end_of_the_picture():
    assert bars([attempt(10, None, "running")], at(100))[-1] == Bar(
        0, at(10), at(100), "still running"
    )
    waiting = attempt(10, 20, "nacked", retry_at=at(3_600_000))
    assert bars([waiting], at(100))[-1] == Bar(0, at(20), at(100), "back-off")


def test_messages_of_a_step_have_lines_of_their_own():
    tries = [attempt(10, 20), attempt(12, 22, offset=1), attempt(14, 24, partition=1)]
    assert sorted({bar.line for bar in bars(tries, at(100))}) == [0, 1, 2]


def test_clocks_that_were_set_back_make_no_bar_of_negative_length():
    tries = [attempt(10, 5, "nacked", retry_at=at(4)), attempt(3, 2)]
    assert all(bar.start <= bar.end for bar in bars(tries, at(1)))


def test_of_many_steps_the_failed_and_the_path_are_kept_and_time_orders_them():
    steps = [step(f"{n}", start=n, end=n + 1) for n in range(200)]
    steps[150]["path_position"] = 0
    steps[199] |= {"outcome": "dead_lettered", "dead_letters": 1}
    steps[20] |= {"running_ms": 1000}
    kept = [one["step_id"] for one in chosen(steps, 3)]
    assert kept == ["20", "150", "199"]


def test_the_picture_shows_failures_successes_and_the_critical_path():
    shown = step("s", 0, 90, path_position=0, failures=1)
    png = draw("run-1", [shown], [attempt(10, 40, "nacked"), attempt(50, 90)])
    well = draw("run-1", [step("s", 0, 90)], [attempt(10, 90)])
    # The legend has a little of everything.
    for colour in (RED, ORANGE):
        assert areas(png)[colour] > 3 * areas(well)[colour]
    assert areas(well)[BLUE] > areas(png)[BLUE] > 3 * areas(draw("none", [], []))[BLUE]


def test_a_picture_has_a_bounded_size_however_many_steps_there_are():
    steps = [step(f"s{n}", start=n, end=n + 5) for n in range(200)]
    many = size(draw("run", steps, []))
    assert many == size(draw("run", steps[:MAX_LANES], [], left_out=140))
    assert many[1] > size(draw("run", steps[:1], []))[1]


@pytest.mark.parametrize(
    "name",
    [
        r"$\nosuch{1}$",
        "$x",
        "a\nb\x07\x00",
        "日本語 🚀",
        "x" * 1000,
        "%s {} \\",
        "<b>&amp;</b>",
        "",
    ],
)
def test_any_id_is_shown_as_text(name: str):
    width, _ = size(draw(name, [step(name, path_position=0), step(None)], []))
    assert width < 1500


def test_a_run_without_steps_or_length_has_a_picture():
    assert size(draw("none", [], []))[0] > 1000
    assert size(draw("at once", [step("s", 5, 5)], [attempt(5, 5)]))[0] > 1000


def test_several_threads_may_draw_at_once():
    made: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: made.append(draw("r", [step("s")], [attempt(1, 9)])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
