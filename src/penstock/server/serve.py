"""Runs a broker: opens the engine, listens, drains on a signal, closes.

SIGTERM or SIGINT: the broker accepts no new connections, ends streams, answers what is under way,
syncs the log and exits with 0, within three seconds. SIGHUP: it reads the files of tokens, keys and
TLS again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import uvloop

from penstock.api.durability import Capabilities
from penstock.api.engine import Engine
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.opening import open_in_memory, open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.audit import BROKER_ACTOR, Actor
from penstock.model.errors import InvalidArgument
from penstock.server.broker import open_broker
from penstock.server.declarations import DeclaredResources
from penstock.server.http.admission import is_loopback
from penstock.server.identity.jwt_settings import check_jwt_settings
from penstock.server.listening import STOPPING
from penstock.server.resources import declare
from penstock.server.router_hook import make_router
from penstock.server.settings import Settings, read_token
from penstock.storage.log import WalOptions

Announce = Callable[[str, Capabilities, str], None]
"""A function that is called when the broker accepts connections, with its address, what a success
means, and the first admin token if one was made."""

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
    run = _run
    if settings.cluster:
        # Other brokers start faster without it.
        from penstock.server.clustering import check_cluster_settings, run_clustered

        check_cluster_settings(settings, token)
        run = run_clustered
    _raise_file_limit()
    # Until the loop handles it: closing the terminal must not end a long recovery.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Without access control there is no audit log.
        actor = BROKER_ACTOR if settings.access_control else None
        before = partial(_declare, resources or DeclaredResources(), apply_changes, actor)
        runner.run(run(settings, token, announce, before))


async def _run(
    settings: Settings,
    token: str,
    announce: Announce,
    before: Callable[[Engine], Awaitable[None]],
) -> None:
    broker = await open_broker(settings, token, give_back=trim_memory)
    engine = open_engine(settings, asyncio.get_running_loop())
    try:
        await before(engine)
        first_token = await broker.begin(engine, makes_first_token=True)
        try:
            _settle_memory()
            await broker.run(partial(announce, broker.address, engine.capabilities, first_token))
        finally:
            await broker.end(STOPPING)
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
