"""What is piped into a command: its lines as they come, or all of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from penstock.cli.terminal import CommandFailed
from penstock.model.limits import MAX_BATCH_ITEMS

READ_BYTES = 1 << 20
"""What is read from a pipe at once goes out in one request, if it is not too many lines."""


def batches_of_lines() -> Iterator[list[bytes]]:
    """The lines that are there already: a slow writer's leave at once, a file's in batches."""
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
