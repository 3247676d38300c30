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
    """A request to stop, from a signal or any thread. The second one does not wait for batches."""

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
    """Exits at once with the code of `on_exit` if a signal comes while Java starts. PySpark's own
    cleanup would remove the file through which it finds Java, and Java would stay."""

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
    """Makes child processes ignore SIGTERM: a signal that is ignored when a program starts stays
    ignored, also by Java. This process still receives it."""

    is_on = False

    @classmethod
    def in_child(cls) -> None:
        if cls.is_on:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IgnoreTerm.in_child)


@contextmanager
def children_ignore_term() -> Iterator[None]:
    """Lets processes that PySpark starts in this block (those with `preexec_fn`) ignore SIGTERM."""
    _IgnoreTerm.is_on = True
    try:
        yield
    finally:
        _IgnoreTerm.is_on = False
