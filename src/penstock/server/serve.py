"""Runs a broker: opens the engine, listens, drains on a signal, closes.

SIGTERM or SIGINT: no new connections, streams end, what is under way is answered, the log is
synced, exit 0. Within three seconds. SIGHUP: the token files are read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import uvicorn
import uvloop

from penstock.api.engine import Engine
from penstock.engine.allocator import give_back
from penstock.engine.opening import open_in_memory, open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.errors import InvalidArgument
from penstock.server.app import make_app
from penstock.server.http.admission import Admission, is_loopback
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.registry.control_plane import Follower
from penstock.server.rotation import TokenRotation
from penstock.server.router_hook import make_router
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.settings import Settings, read_control_plane_token, read_token
from penstock.storage.log import WalOptions

DRAIN_SECONDS = 2
BACKLOG = 4096

Announce = Callable[[str, Engine], None]
"""Told the address once the broker answers there."""


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
    # Until there is a loop to handle it. A long recovery must not end with the terminal.
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
        answers = AnswerBudget(settings.answer_memory_bytes, settings.stalled_timeout_ms)
        answers.give_back = partial(loop.run_in_executor, None, give_back)
        dispatch = RequestDispatch(
            engine,
            admission,
            ROUTES,
            path_route,
            request_timeout_ms=settings.request_timeout_ms,
            idle_timeout_ms=settings.idle_timeout_ms,
            ws_ping_ms=settings.ws_ping_ms,
            answers=answers,
        )
        server = _Server(_uvicorn_config(dispatch, make_app(dispatch)), dispatch)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        rotation = TokenRotation(settings, dispatch, lambda: server.server_state.connections)
        loop.add_signal_handler(signal.SIGHUP, rotation.hung_up)
        async with _following(settings, dispatch):
            _settle_memory()
            # A newcomer's client gets an answer as soon as the address is printed.
            loop.call_soon(announce, _address(settings, listener), engine)
            await server.run_on(listener)
    finally:
        engine.close()


@contextlib.asynccontextmanager
async def _following(settings: Settings, dispatch: RequestDispatch) -> AsyncIterator[None]:
    """While the broker serves, its registry follows the control plane, if there is one."""
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


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which would not exit 0."""

    def __init__(self, config: uvicorn.Config, dispatch: RequestDispatch) -> None:
        super().__init__(config)
        self._dispatch = dispatch

    async def run_on(self, listener: socket.socket) -> None:
        sweep = asyncio.get_running_loop().create_task(self._sweep())
        try:
            await self._serve(sockets=[listener])
        finally:
            sweep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweep

    def stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._dispatch.is_draining = True
        self._dispatch.engine.end_streams("the broker is stopping")
        await super().shutdown(sockets)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1)
            connections = [
                connection
                for connection in self.server_state.connections
                if isinstance(connection, HttpConnection)
            ]
            self._dispatch.tick(connections)


def _uvicorn_config(dispatch: RequestDispatch, app: Any) -> uvicorn.Config:
    connection = type("BoundConnection", (HttpConnection,), {"dispatch": dispatch})
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        server_header=False,
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
    """What was recovered stays: the collector need not look at it again. Messages and entries
    are outside its reach, so it has little to do, and rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _raise_file_limit() -> None:
    """A connection is a file: as many as the system allows without asking."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
