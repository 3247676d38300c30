"""Reads the lines that are piped into a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from penstock.cli.terminal import CommandFailed
from penstock.model.limits import MAX_BATCH_ITEMS

READ_BYTES = 1 << 20
"""Most bytes of one read. The lines of a read go out in one request, unless there are too many."""


def batches_of_lines() -> Iterator[list[bytes]]:
    """Yields the lines that are there: a slow writer's at once, those of a file in batches."""
    rest = b""
    while chunk := os.read(sys.stdin.fileno(), READ_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        for start in range(0, len(whole), MAX_BATCH_ITEMS):
            yield [line.removesuffix(b"\r") for line in whole[start : start + MAX_BATCH_ITEMS]]
    if rest:
        yield [rest.removesuffix(b"\r")]


def text_of(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise CommandFailed(f"stdin is not UTF-8: {error.reason}") from error
