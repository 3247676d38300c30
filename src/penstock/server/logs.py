"""The broker's log for operators, on stderr: lines for people, or one JSON object a line.

Invariants: one event is one line, but for tracebacks in the format `text`; with the format `json`
nothing else is written, neither by Python nor by a library; a secret never appears, known by the
name of its field or by its value. Must not know what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
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
_log = logging.getLogger("penstock.server")


def configure_logging(
    level: Level, form: Format, *, secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Replaces whatever logging was set up. Libraries log warnings and errors only. With `json`,
    warnings and tracebacks that Python would print to stderr are events too."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
    for secret in secrets:
        hide_secret(secret)
    if form == "json":
        _log_what_python_prints()


def hide_secret(secret: str) -> None:
    """Masks one more secret in every event from now on."""
    for handler in logging.getLogger().handlers:
        if secret and isinstance(handler.formatter, _Formatter):
            handler.formatter.secrets.add(secret)


def _log_what_python_prints() -> None:
    """Logs what Python itself would print: warnings, and the tracebacks of errors that nobody
    catches, in any thread or while an object is destroyed."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _log.critical("the broker ends: %s", error, exc_info=(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        name = args.thread.name if args.thread is not None else "?"
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        _log.error("the thread %s ended: %s", name, args.exc_value, exc_info=info)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        text = args.err_msg or "an error could not be raised"
        error = args.exc_value
        info = None if error is None else (args.exc_type, error, args.exc_traceback)
        _log.error("%s: %r", text, args.object, exc_info=info)

    logging.captureWarnings(True)
    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    sys.unraisablehook = unraisable


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def _hide(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text


class JsonFormatter(_Formatter):
    """Writes `time`, `level`, `logger`, `message`, then the other fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _extras(record).items():
            event.setdefault(name, value)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = record.stack_info
        return _as_json(self._hidden(_plain(event)))

    def _hidden(self, value: Any) -> Any:
        """Returns the value with secrets masked. Must be done before it becomes JSON: there a quote
        in a secret is escaped, and masking a secret that is a quote would break the line."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, dict):
            return {name: self._hidden(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._hidden(each) for each in value]
        return value


class TextFormatter(_Formatter):
    """Writes a line for people. Line breaks in a message are escaped: it stays one event."""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value!r}" for name, value in _extras(record).items())
        message = _message(record).replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}{extras}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return self._hide(line)


def _message(record: logging.LogRecord) -> str:
    """Returns the text of an event. If its arguments do not fit the text, both are logged as they
    are: Python would print an error instead."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        return f"{record.msg} {record.args!r}"


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """Returns the event with nothing in it that JSON does not have."""
    try:
        plain: dict[str, Any] = msgspec.to_builtins(event, str_keys=True, enc_hook=str)
    except Exception:  # noqa: BLE001 - whatever is wrong with a value, the event is logged
        plain = {name: value if isinstance(value, str) else repr(value)
                 for name, value in event.items()}  # fmt: skip
    return plain


def _as_json(event: dict[str, Any]) -> str:
    try:
        return _encode(event).decode()
    except (UnicodeEncodeError, msgspec.MsgspecError):
        # The name of a file may not be Unicode; here its odd characters become escapes.
        return json.dumps(event)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: MASK if any(word in name.lower() for word in _SECRET_NAMES) else value
        for name, value in vars(record).items()
        if name not in _USUAL
    }
