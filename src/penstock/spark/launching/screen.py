"""Shows a run: a line of progress while it runs, and a table at the end.

On a terminal the line is drawn again in its place; elsewhere a new line comes every ten seconds.
Invariant: progress and warnings go to stderr, results to stdout; no message moves the cursor.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from penstock.spark.launching.register import Figures

LINE_EVERY_S = 10.0
REDRAWN_EVERY_S = 0.5
_CLEAR = "\r\x1b[K"


class Screen:
    """Safe for several threads: jobs report from their own."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._is_terminal = self._err.isatty()
        self._lock = threading.Lock()
        self._is_drawn = False
        self._next = time.monotonic() + (0 if self._is_terminal else LINE_EVERY_S)

    def print(self, text: str) -> None:
        """Prints a result."""
        with self._lock:
            self._clear()
            print(safe(text), file=self._out, flush=True)

    def warn(self, text: str) -> None:
        with self._lock:
            self._clear()
            print(safe(text), file=self._err, flush=True)

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def progress(self, figures: Sequence[Figures]) -> None:
        line = safe(" | ".join(progress_text(each) for each in figures))
        with self._lock:
            if self._is_terminal:
                width = shutil.get_terminal_size().columns - 1
                self._err.write(_CLEAR + (line if len(line) <= width else line[: width - 1] + "…"))
                self._is_drawn = True
                self._next = time.monotonic() + REDRAWN_EVERY_S
            else:
                self._err.write(line + "\n")
                self._next = time.monotonic() + LINE_EVERY_S
            self._err.flush()

    def clear(self) -> None:
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_drawn:
            self._err.write(_CLEAR)
            self._err.flush()
            self._is_drawn = False


def progress_text(figures: Figures) -> str:
    lag = "" if figures.lag is None else f", lag {figures.lag:,}"
    rate = rate_text(figures.rows_per_s)
    return f"{figures.pipeline} {figures.name}: {figures.rows:,} rows, {rate} rows/s{lag}"


def rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"


def safe(text: str) -> str:
    """Keeps line breaks and escapes all other control characters."""
    return "".join(
        char
        if char.isprintable() or char == "\n"
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text.expandtabs()
    )
