"""SIGTERM and Ctrl-C: what they mean to a run, and that Java does not hear them.

systemd, `timeout` and a shell send SIGTERM to everything that a command has started. Java would end
in the middle of a batch; so it ignores the signal, as do the Pythons it starts, and ends when this
process does, which holds its standard input. Invariant: no signal is lost, and none leaves Java
behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Asked for by a signal, or from any thread; the second time it is not to wait for batches."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.hurry = threading.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
        self.asked.set()


@contextmanager
def asked_by_signals(stop: Stop) -> Iterator[None]:
    """Only in the main thread. Spark has a handler of its own for Ctrl-C, which would cancel jobs
    in the middle."""
    with _handled(lambda: stop.ask()):
        yield


@contextmanager
def left_by_signals(left: Callable[[], int]) -> Iterator[None]:
    """While Java starts: `left` says what is to be said, and the exit code. The process is ended
    then and there, since PySpark, on its way out, would remove the file by which it meets Java, and
    Java would stay for ever."""

    def leave() -> NoReturn:
        code = left()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    with _handled(leave):
        try:
            yield
        except KeyboardInterrupt:  # Spark's handler, which it sets when it has started
            leave()


@contextmanager
def _handled(act: Callable[[], None]) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        act()

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Deafening:
    """A signal that is ignored when a program begins stays ignored, and Java leaves it so. Done in
    the child, before it becomes Java: here the signal is heard all the time."""

    is_on = False

    @classmethod
    def in_child(cls) -> None:
        if cls.is_on:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Deafening.in_child)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Those that PySpark starts ignore SIGTERM. (Of subprocess, those with a `preexec_fn`.)"""
    _Deafening.is_on = True
    try:
        yield
    finally:
        _Deafening.is_on = False
