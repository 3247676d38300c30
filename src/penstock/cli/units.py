"""The types of options that are durations, sizes, rates or times: `7d`, `1GB`, `10MB/s`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import click

from penstock.cli.terminal import CommandFailed
from penstock.model.units import parse_duration_ms, parse_size


class Duration(click.ParamType[int]):
    """Parses `250ms`, `60s` or `5m` into milliseconds. With `bare_ms`, for options that end in -ms,
    a number without a unit is allowed; otherwise it might be meant as seconds."""

    name = "duration"

    def __init__(self, *, bare_ms: bool = False) -> None:
        self._bare_ms = bare_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        is_bare = isinstance(value, str) and value.strip().isdigit()
        if is_bare and int(value) and not self._bare_ms:
            self.fail(f"{value} of what? Say {value}s, or {value}ms", param, ctx)
        found = value if isinstance(value, int) else parse_duration_ms(value)
        if found is None:
            self.fail(f"{value!r} is no duration; it looks like 250ms, 60s, 5m or 7d", param, ctx)
        return found


MILLISECONDS = Duration(bare_ms=True)
"""The type of every option whose name ends in -ms: `250ms`, `2s`, or a number of milliseconds."""


def moment_ms(text: str, option: str) -> int:
    """Parses a time, or how long ago it was, into milliseconds since 1970."""
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    if seconds is not None and text[:-1].isdigit():
        return max(0, int((time.time() - int(text[:-1]) * seconds) * 1000))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        message = f"{option}: {text!r} is not a time such as 2026-01-31T12:00:00Z or 15m"
        raise CommandFailed(message) from error
    return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


class Size(click.ParamType[int]):
    """Parses `1GB`, `64MiB` or a bare number into bytes. Units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = value if isinstance(value, int) else parse_size(value)
        if found is None:
            self.fail(f"{value!r} is no size; it looks like 64MiB or 1GB", param, ctx)
        return found


class ByteRate(click.ParamType[str]):
    """Leaves a rate such as `10MB/s` to the broker, and refuses a size without `/s`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if parse_size(text) is not None and not text.isdigit():
            self.fail(f"{value} in what time? Say {text}/s", param, ctx)
        return text
