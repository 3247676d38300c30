"""The broker's log: one event a line, JSON or text, and never a secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.logs import MASK, configure_logging

_log = logging.getLogger("penstock.test")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Logging is the process's: what a test sets is taken back."""
    loggers = [logging.getLogger(name) for name in ("", "penstock")]
    before = [(each, each.level, each.handlers[:]) for each in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def logged(form: Any, level: Any = "info", secrets: tuple[str, ...] = ()) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, form, secrets=secrets, stream=stream)
    return stream


def test_an_event_is_a_json_object_with_its_extras() -> None:
    stream = logged("json")
    _log.warning("it is %s", "late", extra={"topic": "t", "offset": 7, "odd": object})
    event = json.loads(stream.getvalue())
    assert event["time"].endswith("Z")
    assert (event["level"], event["logger"]) == ("warning", "penstock.test")
    assert (event["message"], event["topic"], event["offset"]) == ("it is late", "t", 7)


def test_a_traceback_is_inside_the_json_line() -> None:
    stream = logged("json")
    try:
        raise ValueError("inside")
    except ValueError:
        _log.exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "ValueError: inside" in json.loads(lines[0])["exception"]


def test_an_event_is_a_line_for_people() -> None:
    stream = logged("text")
    _log.error("no room", extra={"path": "/a\nb"})
    line = stream.getvalue()
    assert line.endswith(" ERROR   penstock.test: no room path='/a\\nb'\n")


def test_a_message_cannot_pass_for_two() -> None:
    stream = logged("text")
    _log.warning("one\r\n2030-01-01T00:00:00.000Z ERROR   forged")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_masked_by_name_and_by_value(form: str) -> None:
    stream = logged(form, secrets=("sesame", ""))
    _log.warning("the token is %s", "sesame", extra={"Authorization": "Bearer abc", "x": "sesame"})
    assert "sesame" not in stream.getvalue()
    assert "abc" not in stream.getvalue()
    assert stream.getvalue().count(MASK) == 3


def test_below_the_level_nothing_is_written() -> None:
    stream = logged("text", "warning")
    _log.info("quiet")
    assert stream.getvalue() == ""


def test_libraries_are_quiet_even_when_the_broker_is_debugged() -> None:
    for level in ("info", "debug"):
        stream = logged("text", level)
        logging.getLogger("httpx").info("requested")
        assert stream.getvalue() == ""
