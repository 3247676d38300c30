"""Runs a broker: opens the engine, listens, drains on a signal, closes.

SIGTERM or SIGINT: the broker accepts no new connections, ends streams, answers what is under way,
syncs the log and exits with 0, within three seconds. SIGHUP: it reads the token files again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

import uvloop

from penstock.api.engine import Engine
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.opening import open_in_memory, open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.errors import InvalidArgument
from penstock.server.http.admission import Admission, is_loopback
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.pages import WebPages
from penstock.server.registry.control_plane import Follower
from penstock.server.rotation import TokenRotation
from penstock.server.router_hook import make_router
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.settings import Settings, read_control_plane_token, read_token
from penstock.server.websocket.connection import WebSocketConnection
from penstock.storage.log import WalOptions

DRAIN_SECONDS = 2
BACKLOG = 4096

Announce = Callable[[str, Engine], None]
"""Is told the address when the broker accepts connections there."""

_log = logging.getLogger("penstock.server")


def serve(settings: Settings, announce: Announce) -> None:
    """Blocks until a signal ends the broker."""
    token = read_token(settings)
    is_local = is_loopback(settings.host)
    if not is_local and not token and not settings.allow_insecure_bind:
        raise InvalidArgument(
            f"binding to {settings.host} without a token lets anyone on the network in; set "
            "token_file, or allow it by name with --allow-insecure-bind"
        )
    _raise_file_limit()
    # Until the loop handles it: closing the terminal must not end a long recovery.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, token, is_local, announce))


async def _run(settings: Settings, token: str, is_local: bool, announce: Announce) -> None:
    loop = asyncio.get_running_loop()
    listener = _listen(settings)
    engine = open_engine(settings, loop)
    try:
        admission = Admission(
            loopback_only=is_local, token=token, allowed_origins=settings.allowed_origins
        )
        answers = AnswerBudget(
            settings.answer_memory_bytes,
            settings.stalled_timeout_ms,
            give_back=partial(loop.run_in_executor, None, trim_memory),
        )
        address = _address(settings, listener)
        dispatch = RequestDispatch(
            engine,
            admission,
            ROUTES | WebPages(address).routes(),
            path_route,
            request_timeout_ms=settings.request_timeout_ms,
            idle_timeout_ms=settings.idle_timeout_ms,
            ws_ping_ms=settings.ws_ping_ms,
            answers=answers,
        )
        server = _Server(dispatch)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        rotation = TokenRotation(settings, dispatch, server.connections)
        loop.add_signal_handler(signal.SIGHUP, rotation.read_again)
        async with _following(settings, dispatch):
            _settle_memory()
            await server.run(listener, partial(announce, address, engine))
    finally:
        engine.close()


@contextlib.asynccontextmanager
async def _following(settings: Settings, dispatch: RequestDispatch) -> AsyncIterator[None]:
    """Lets the registry follow the control plane, if there is one, while the broker serves."""
    if not settings.control_plane:
        yield
        return
    dispatch.follower = Follower(
        dispatch.engine.registry,
        dispatch.instance,
        settings.control_plane,
        token=read_control_plane_token(settings),
        sync_ms=settings.registry_sync_ms,
    )
    try:
        await dispatch.follower.start()
        yield
    finally:
        await dispatch.follower.close()


def open_engine(settings: Settings, loop: asyncio.AbstractEventLoop) -> Engine:
    scheduler = LoopScheduler(loop)
    router = make_router(settings.router, settings.router_timeout_ms, loop)
    if settings.memory:
        return open_in_memory(settings.limits(), scheduler, router=router)
    options = WalOptions(
        segment_bytes=settings.segment_bytes,
        fsync=settings.fsync,
        fsync_interval_ms=settings.fsync_interval_ms,
        reserve_bytes=settings.reserve_bytes,
    )
    return open_on_disk(settings.data_dir, options, settings.limits(), scheduler, router=router)


class _Server:
    """Accepts connections until `stop` is called, then drains them."""

    def __init__(self, dispatch: RequestDispatch) -> None:
        self.connections: set[HttpConnection | WebSocketConnection] = set()
        self._dispatch = dispatch
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._next_sweep: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        self._is_stopping.set()

    async def run(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Calls `started` when clients can connect; returns when the broker has drained."""
        connect = partial(HttpConnection, self._dispatch, self.connections)
        server = await self._loop.create_server(connect, sock=listener, backlog=BACKLOG)
        self._sweep()
        try:
            started()
            await self._is_stopping.wait()
            server.close()
            listener.close()
            await self._drain()
        finally:
            if self._next_sweep is not None:
                self._next_sweep.cancel()

    def _sweep(self) -> None:
        self._next_sweep = self._loop.call_later(1, self._sweep)
        self._dispatch.tick([each for each in self.connections if isinstance(each, HttpConnection)])

    async def _drain(self) -> None:
        """Ends streams, and waits until connections have their answers and are closed."""
        self._dispatch.is_draining = True
        self._dispatch.engine.end_streams("the broker is stopping")
        for connection in list(self.connections):
            connection.shutdown()
        deadline = self._loop.time() + DRAIN_SECONDS
        while self.connections and self._loop.time() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
        if self.connections:
            _log.warning(
                "%d connections did not close within %d s", len(self.connections), DRAIN_SECONDS
            )


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        cure = "; is a broker there already? --port takes another, 0 any" if is_taken else ""
        raise InvalidArgument(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}{cure}"
        ) from error
    listener.setblocking(False)
    return listener


def _address(settings: Settings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _settle_memory() -> None:
    """Excludes recovered objects from garbage collection, and makes it rare: messages and entries
    are not tracked, so it has little to do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _raise_file_limit() -> None:
    """Allows as many open files as the system grants: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
