"""The types of options that are durations, sizes or rates: `7d`, `1GB`, `10MB/s`."""

from __future__ import annotations

from typing import Any

import click

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
