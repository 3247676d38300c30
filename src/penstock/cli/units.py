"""The types of options that are durations, sizes, rates or times: `7d`, `1GB`, `10MB/s`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import click

from penstock.cli.terminal import CommandFailed
from penstock.model.errors import InvalidArgument
from penstock.model.options import (
    UTC_MOMENT,
    Kind,
    Moment,
    Option,
    duration_ms,
    size_bytes,
)
from penstock.model.units import parse_size

_DURATION_OR_MS = duration_ms()
_DURATION = _DURATION_OR_MS.described("a duration such as 250ms, 60s, 5m or 7d")
_SIZE = size_bytes()


def _parsed(
    own: click.ParamType[int],
    kind: Kind,
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> int:
    try:
        return value if isinstance(value, int) else int(kind.parse(value))
    except ValueError:
        own.fail(kind.refusal(repr(value)), param, ctx)


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
        kind = _DURATION_OR_MS if self._bare_ms else _DURATION
        return _parsed(self, kind, value, param, ctx)


MILLISECONDS = Duration(bare_ms=True)
"""The type of every option whose name ends in -ms: `250ms`, `2s`, or a number of milliseconds."""


def moment_ms(text: str, option: str) -> int:
    """Parses a time, or how long ago it was, into milliseconds since 1970."""
    try:
        found: Moment = Option(option, UTC_MOMENT).read(text, option)
    except InvalidArgument as error:
        raise CommandFailed(error.message) from error
    if isinstance(found, timedelta):
        return max(0, time.time_ns() // 1_000_000 - found // timedelta(milliseconds=1))
    return int(found.timestamp() * 1000)


class Size(click.ParamType[int]):
    """Parses `1GB`, `64MiB` or a bare number into bytes. Units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return _parsed(self, _SIZE, value, param, ctx)


class ByteRate(click.ParamType[str]):
    """Leaves a rate such as `10MB/s` to the broker, and refuses a size without `/s`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if parse_size(text) is not None and not text.isdigit():
            self.fail(f"{value} in what time? Say {text}/s", param, ctx)
        return text
