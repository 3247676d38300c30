"""Runs a `SocketCore` in a thread of its own, for blocking code: the part that
`aio_socket_runner` has to do differently.

Both modules are written by hand and offer the same names. A connection that answers pings,
reconnects and receives events while nobody calls it needs a thread anyway, so that thread runs the
event loop of the asyncio client, instead of a second implementation with locks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from penstock.client.socket_core import SocketCore
from penstock.client.socket_exchange import Outgoing
from penstock.model.errors import Unavailable
from penstock.model.limits import KIB

STAGED_BYTES = 256 * KIB
"""Publishes that callers have handed over and the thread has not taken. Beyond it, they wait."""

CHECK_S = 1.0
"""How often a caller that waits looks whether the thread is there."""

T = TypeVar("T")


class SocketRunner:
    """Any thread may call it. `_staged` passes publishes without an answer to the thread: one
    wake-up for many, because waking another thread costs more than a publish."""

    def __init__(self, core: SocketCore) -> None:
        self._core = core
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._staged: list[Outgoing] = []
        self._staged_bytes = 0

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        if self._thread is None:
            loop = self._loop = asyncio.new_event_loop()
            # A program that forgets to close the socket can end nevertheless.
            self._thread = threading.Thread(
                target=self._serve, args=(loop,), name="penstock-socket", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread and waits for its result."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            coroutine.close()
            raise Unavailable("the socket is not open; use it in a `with`")
        if threading.current_thread() is thread:
            coroutine.close()
            raise RuntimeError("on_error and token functions must not call the socket")
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise Unavailable("the socket is closed") from error
        try:
            return _result(running, thread)
        except BaseException:
            # After a KeyboardInterrupt nobody waits for it any more.
            running.cancel()
            raise

    def post(self, item: Outgoing) -> None:
        core, loop = self._core, self._loop
        core.check_posts()
        if core.is_full() or self._staged_bytes >= STAGED_BYTES:
            self.run(core.room())
        with self._lock:
            self._staged.append(item)
            self._staged_bytes += len(item.frame)
            is_first = len(self._staged) == 1
        if is_first and loop is not None:
            loop.call_soon_threadsafe(self._take_staged)

    def _take_staged(self) -> None:
        with self._lock:
            staged, self._staged, self._staged_bytes = self._staged, [], 0
        for item in staged:
            self._core.put(item)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()


def _result(running: Future[T], thread: threading.Thread) -> T:
    """Waits for a result. The thread may end without one when another closes the socket."""
    while True:
        try:
            return running.result(CHECK_S)
        except CancelledError as error:
            raise Unavailable("the socket is closed") from error
        except TimeoutError:
            if running.done():
                raise
            if not thread.is_alive():
                raise Unavailable("the socket is closed") from None
