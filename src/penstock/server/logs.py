"""The broker's log for operators, on stderr: lines for people, or one JSON object a line.

Invariants: one event is one line, unless it has a traceback and is for people; a secret never
appears, neither by the name of its field nor by its value. Must not know what is logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

MASK = "********"

_SECRET_NAMES = ("token", "authorization", "secret", "password")
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure_logging(
    level: Level, form: Format, *, secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Replaces whatever logging was set up. Libraries are heard from warnings on; uvicorn's own
    account of its connections only in debug."""
    handler = logging.StreamHandler(stream or sys.stderr)
    hidden = tuple(secret for secret in secrets if secret)
    handler.setFormatter(JsonFormatter(hidden) if form == "json" else TextFormatter(hidden))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
    is_debug = level == "debug"
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if is_debug else logging.WARNING)


class _Formatter(logging.Formatter):
    def __init__(self, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._secrets = secrets

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text


class JsonFormatter(_Formatter):
    """`time`, `level`, `logger`, `message`, then what the event has beside them."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _extras(record).items():
            event.setdefault(name, value)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return self._hide(_encode(event).decode())


class TextFormatter(_Formatter):
    """The same for people; a message that has line breaks in it cannot pass for two events."""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value!r}" for name, value in _extras(record).items())
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}{extras}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return self._hide(line)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: MASK if any(word in name.lower() for word in _SECRET_NAMES) else value
        for name, value in vars(record).items()
        if name not in _USUAL
    }
