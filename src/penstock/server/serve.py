"""Runs a broker: opens the engine, listens, drains on a signal, closes.

SIGTERM or SIGINT: the broker accepts no new connections, ends streams, answers what is under way,
syncs the log and exits with 0, within three seconds. SIGHUP: it reads the files of tokens, keys and
TLS again.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import uvloop

from penstock.api.engine import Engine
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.opening import open_in_memory, open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.audit import BROKER_ACTOR, Actor
from penstock.model.errors import InvalidArgument
from penstock.server.declarations import DeclaredResources
from penstock.server.http.admission import Admission, is_loopback
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.authenticator import Authenticator
from penstock.server.identity.expulsion import CredentialWatch
from penstock.server.identity.first_token import make_first_token
from penstock.server.identity.jwt_settings import Jwt, check_jwt_settings, start_jwt
from penstock.server.listening import BrokerServer
from penstock.server.pages import WebPages
from penstock.server.registry.control_plane import Follower
from penstock.server.resources import declare
from penstock.server.rotation import TokenRotation
from penstock.server.router_hook import make_router
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.settings import Settings, read_control_plane_token, read_token
from penstock.server.tls import open_tls
from penstock.storage.log import WalOptions

Announce = Callable[[str, Engine, str], None]
"""Is told the address when the broker accepts connections there, and the first admin token if one
was made."""

_log = logging.getLogger("penstock.server")


def serve(
    settings: Settings,
    announce: Announce,
    resources: DeclaredResources | None = None,
    *,
    apply_changes: bool = False,
) -> None:
    """Blocks until a signal ends the broker. Creates declared resources before it listens; with
    `apply_changes` it also changes those that differ."""
    token = read_token(settings)
    is_local = is_loopback(settings.host)
    is_open = not token and not settings.access_control
    if not is_local and is_open and not settings.allow_insecure_bind:
        raise InvalidArgument(
            f"binding to {settings.host} without a token lets anyone on the network in; set "
            "access_control or token_file, or allow it by name with --allow-insecure-bind"
        )
    if settings.control_plane and resources is not None and resources.has_entries():
        raise InvalidArgument(
            "a broker that follows a control plane declares only topics; declare tenants, streams "
            "and caches at the control plane"
        )
    check_jwt_settings(settings)
    _raise_file_limit()
    # Until the loop handles it: closing the terminal must not end a long recovery.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Without access control there is no audit log.
        actor = BROKER_ACTOR if settings.access_control else None
        before = partial(_declare, resources or DeclaredResources(), apply_changes, actor)
        runner.run(_run(settings, token, is_local, announce, before))


async def _run(
    settings: Settings,
    token: str,
    is_local: bool,
    announce: Announce,
    before: Callable[[Engine], Awaitable[None]],
) -> None:
    loop = asyncio.get_running_loop()
    tls = open_tls(settings)
    jwt = await start_jwt(settings)
    listener = _listen(settings)
    engine = open_engine(settings, loop)
    try:
        await before(engine)
        authenticator = None
        first_token = ""
        if settings.access_control:
            verifier = None if jwt is None else jwt[0]
            authenticator = Authenticator(engine.tokens, static_token=token, jwt=verifier)
            first_token = "" if token else await make_first_token(engine.tokens, engine.audit)
        admission = Admission(
            loopback_only=is_local,
            token=token,
            allowed_origins=settings.allowed_origins,
            authenticator=authenticator,
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
        server = BrokerServer(dispatch, tls)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        _watch_credentials(settings, dispatch, server, authenticator, jwt)
        async with _following(settings, dispatch):
            _settle_memory()
            await server.run(listener, partial(announce, address, engine, first_token))
    finally:
        engine.close()


async def _declare(
    resources: DeclaredResources, changes: bool, actor: Actor | None, engine: Engine
) -> None:
    """Creates declared resources, and logs what was done and what differs."""
    for step in await declare(engine, resources, changes=changes, actor=actor):
        if step.action == "create":
            _log.info("created %s %r, as the configuration declares", step.kind, step.name)
        elif step.action != "keep":
            told = ", ".join(
                f"{each.setting} is {each.before!r}, declared is {each.after!r}"
                for each in step.changes
            )
            if step.action == "conflict":
                _log.warning("%s %r differs: %s", step.kind, step.name, step.reason or told)
            elif changes:
                _log.info("changed %s %r: %s", step.kind, step.name, told)
            else:
                _log.warning(
                    "%s %r differs from the configuration: %s; --apply changes it",
                    step.kind,
                    step.name,
                    told,
                )


def _watch_credentials(
    settings: Settings,
    dispatch: RequestDispatch,
    server: BrokerServer,
    authenticator: Authenticator | None,
    jwt: Jwt | None,
) -> None:
    """Lets connections end with their credentials, and SIGHUP read all files again."""
    watch = None
    if authenticator is not None:
        watch = CredentialWatch(dispatch, server.connections, authenticator)
        dispatch.engine.tokens.listen(watch.changed)
        server.sweeps.append(watch.sweep)
    rotation = TokenRotation(settings, dispatch, server.connections, watch)

    def read_again() -> None:
        rotation.read_again()
        server.reload_tls(is_asked=True)
        if jwt is not None:
            jwt[1].read_again()

    if jwt is not None and watch is not None:
        jwt[0].follow_keys(watch.changed)
        server.sweeps.append(jwt[1].tick)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)


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
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


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
