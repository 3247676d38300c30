"""Handles SIGTERM and Ctrl-C for a run, and keeps SIGTERM from Java.

systemd, `timeout` and a shell send SIGTERM to all processes of a command. Java would end in the
middle of a batch. So Java and the Python processes that it starts ignore the signal. Java ends when
this process does, because this process holds its standard input. Invariant: no signal is lost, and
none leaves Java behind.
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
    """A request to stop, from a signal or any thread. The second request does not wait for
    batches."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.hurry = threading.Event()

    def request(self) -> None:
        if self.requested.is_set():
            self.hurry.set()
        self.requested.set()


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Requests a stop when a signal comes. Only for the main thread. Replaces Spark's handler for
    Ctrl-C, which would cancel jobs in the middle of a batch."""
    with _handled(lambda: stop.request()):
        yield


@contextmanager
def exit_on_signals(on_exit: Callable[[], int]) -> Iterator[None]:
    """Exits when a signal comes while Java starts. `on_exit` returns the exit code. The process
    exits at once: PySpark's own cleanup would remove the file through which it finds Java, and Java
    would stay for ever."""

    def leave() -> NoReturn:
        code = on_exit()
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


class _IgnoreTerm:
    """Makes child processes ignore SIGTERM. A signal that is ignored when a program starts stays
    ignored, also by Java. It is set in the child, before it becomes Java; this process still
    receives the signal."""

    is_on = False

    @classmethod
    def in_child(cls) -> None:
        if cls.is_on:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IgnoreTerm.in_child)


@contextmanager
def children_ignore_term() -> Iterator[None]:
    """The processes that PySpark starts in this block ignore SIGTERM. (For subprocess, those with a
    `preexec_fn`.)"""
    _IgnoreTerm.is_on = True
    try:
        yield
    finally:
        _IgnoreTerm.is_on = False
