"""Starts a broker of a cluster, and lets its server serve while the broker owns the shard.

Invariant: the server has the engine exactly between `began` and `ended` of the node, in their
order, although both take time. Must not know how owners are chosen, nor how the log is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.api.durability import Capabilities
from penstock.api.engine import Engine
from penstock.cluster.agreement import CLUSTER_FORMAT, Agreement
from penstock.cluster.copy_source import SealedFileSource
from penstock.cluster.copying import Copier
from penstock.cluster.http_peer import HttpPeer
from penstock.cluster.jetstream.addresses import read_addresses
from penstock.cluster.jetstream.errors import NatsError
from penstock.cluster.jetstream.promise import ClusterPromise
from penstock.cluster.jetstream.report import describe_stream
from penstock.cluster.jetstream.services import JetStreamServices, NatsSettings
from penstock.cluster.jetstream.setup import ClusterNames
from penstock.cluster.lease import MIN_TTL_MS, LeaseTimes
from penstock.cluster.loop_calls import LoopCalls
from penstock.cluster.node import ClusterNode, identity_of
from penstock.cluster.pieces import SharedPieceStore
from penstock.cluster.probe import TcpProbe
from penstock.cluster.replica import Replica
from penstock.cluster.replica_directory import ReplicaDirectory
from penstock.cluster.shared import SharedPieces, SharedStream
from penstock.cluster.surroundings import monotonic_ms
from penstock.engine.clock import SystemClock
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.scheduler import LoopScheduler, Scheduler
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.server.broker import Broker, open_broker
from penstock.server.cluster_commands import ClusterCommands
from penstock.server.forwarding.tls import upstream_tls
from penstock.server.listening import STOPPING, address_of, listen
from penstock.server.router_hook import make_router
from penstock.server.routes import replica_copy
from penstock.server.settings import Settings
from penstock.storage.log import WalOptions
from penstock.storage.segments import list_segments
from penstock.storage.vfs import Vfs

MESSAGE_ROOM_BYTES = 64 * 1024
"""The bytes that a message of the stream may have beside the largest message of a topic."""

SHARD = "shard-0"
"""The name of the only shard, in the data directory and among the streams."""

PIECES = "pieces-0"
"""The name of the stream with its staged pieces."""

DECIDING_LIMITS = (
    "idempotency_ttl_ms",
    "max_idempotency_keys",
    "max_message_bytes",
    "max_partition_msgs",
    "max_partition_bytes",
    "max_in_flight",
    "lease_ms",
    "retry_backoff_ms",
    "retry_max_backoff_ms",
    "journal_retention_ms",
)
"""Limits that all brokers of a cluster have in common: a takeover must change no decision. With
another idempotency_ttl_ms, two brokers would even make different states of the same log."""

BEGIN_AGAIN_S = 1.0

_log = logging.getLogger("penstock.server")

AnnounceCluster = Callable[[str, Capabilities, str], None]
"""Is told the address when the broker accepts connections there, and what a success means. There is
no first token to tell."""


def check_cluster_settings(settings: Settings, token: str) -> None:
    """Raises InvalidArgument if a broker of a cluster cannot have these settings."""
    if not settings.name:
        raise InvalidArgument("a broker of a cluster needs a name that no other has: --name b1")
    if settings.memory:
        raise InvalidArgument("a broker of a cluster keeps its data on disk: leave out --memory")
    if settings.cluster_lease_ms < MIN_TTL_MS:
        raise InvalidArgument(f"cluster_lease_ms must be {MIN_TTL_MS} or more")
    if settings.control_plane:
        raise InvalidArgument("a cluster has a registry of its own: leave out control_plane")
    if settings.access_control and not token:
        raise InvalidArgument(
            "a cluster with access_control needs token_file, the same on every broker: each may be "
            "the first that serves, and a first admin token would be printed by that one only"
        )
    if settings.host in ("0.0.0.0", "::") and not settings.advertise:
        raise InvalidArgument(
            f"{settings.host} is no address that others can connect to: set advertise to this "
            "broker's own, such as http://10.0.0.1:8080"
        )
    if list_segments(Vfs(), settings.data_dir) if os.path.isdir(settings.data_dir) else ():
        raise InvalidArgument(
            f"{settings.data_dir} is the data directory of a broker without a cluster; give this "
            "one another directory"
        )


async def run_clustered(
    settings: Settings,
    token: str,
    announce: AnnounceCluster,
    before: Callable[[Engine], Awaitable[None]],
) -> None:
    """Serves as a broker of a cluster until a signal."""
    services = _services(settings)
    try:
        await services.open()
        stream = await services.stream(SHARD, settings.cluster_stream_bytes)
        staged_bytes = settings.cluster_staged_bytes or settings.cluster_stream_bytes // 4
        pieces = await services.pieces(PIECES, staged_bytes)
        clustered = ClusteredBroker(settings, before)
        await clustered.run(token, services, stream, pieces, announce)
    except NatsError as error:
        raise InvalidArgument(str(error)) from error
    finally:
        await services.close()


def _services(settings: Settings) -> JetStreamServices:
    try:
        wanted = NatsSettings(
            read_addresses(settings.cluster),
            settings.cluster_name,
            settings.max_message_bytes + MESSAGE_ROOM_BYTES,
            monitors=settings.cluster_monitors,
            accept=frozenset(settings.cluster_accept),
        )
        return JetStreamServices(wanted, settings.name)
    except NatsError as error:
        raise InvalidArgument(str(error)) from error


def durability_of(promise: ClusterPromise) -> str:
    """Says in words what a success means."""
    if promise.replicas < 2:
        stored = "every answer waits until one NATS server has stored its data"
    else:
        most = promise.replicas // 2 + 1
        stored = (
            f"every answer waits until {most} of {promise.replicas} NATS servers have stored its "
            "data"
        )
    return (
        stored
        + {
            "always": " and synced it to disk",
            "stated": " and, as the operator states, synced it to disk",
            "less": "; they sync it to disk later: power cuts may lose recent answers",
        }[promise.sync]
    )


class ClusteredBroker:
    """The `ServingListener` of its node. `before` runs on each engine before it serves."""

    def __init__(self, settings: Settings, before: Callable[[Engine], Awaitable[None]]) -> None:
        self._settings = settings
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._changes: asyncio.Queue[EmbeddedEngine | PenstockError] = asyncio.Queue()
        self._refusal: PenstockError | None = None
        self._broker: Broker
        self._node: ClusterNode

    async def run(
        self,
        token: str,
        services: JetStreamServices,
        stream: SharedStream,
        pieces: SharedPieces,
        announce: AnnounceCluster,
    ) -> None:
        settings = self._settings
        listener = listen(settings)
        address = address_of(settings, listener)
        capabilities = Capabilities(True, "commit", durability_of(services.promise))
        url = settings.advertise or address
        self._node = self._make_node(services, stream, pieces, url, capabilities)
        self._broker = await open_broker(
            settings, token, self._node, give_back=trim_memory, listener=listener
        )
        dispatch = self._broker.dispatch
        dispatch.routes[replica_copy.ROUTE] = {b"GET": replica_copy.read_copy}
        dispatch.copies = SealedFileSource(
            Vfs(),
            os.path.join(settings.data_dir, SHARD),
            LoopScheduler(self._loop),
            monotonic_ms,
            settings.cluster_copy_bytes,
        )
        dispatch.copy_figures = self._node.copy_figures
        dispatch.cluster = ClusterCommands(
            self._node,
            self._broker,
            capabilities.durability,
            partial(
                describe_stream,
                services.connection,
                ClusterNames(settings.cluster_name).stream(SHARD),
            ),
        )
        await self._join()
        following = self._loop.create_task(self._follow_changes())
        self._broker.server.farewell = self._hand_over
        try:
            await self._broker.run(partial(announce, self._broker.address, capabilities, ""))
            await self._call_node(self._node.leave)
            await self._broker.end(STOPPING)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        if self._refusal is not None:
            raise self._refusal

    # -- what the node tells ---------------------------------------------------------------------

    def began(self, engine: EmbeddedEngine) -> None:
        self._changes.put_nowait(engine)

    def ended(self, reason: PenstockError) -> None:
        self._changes.put_nowait(reason)

    def refused(self, reason: PenstockError) -> None:
        _log.error("this broker leaves the cluster: %s", reason.message)
        self._refusal = reason
        self._broker.server.stop()

    async def _follow_changes(self) -> None:
        while True:
            change = await self._changes.get()
            if isinstance(change, PenstockError):
                await self._broker.end(change.message)
                self._broker.refuse_unanswered(change.message)
            elif change is self._node.replica.engine:
                await self._begin(change)

    async def _begin(self, engine: EmbeddedEngine) -> None:
        """Serves from the engine. Resources that cannot be declared end the broker, as they do
        without a cluster; what is only unavailable is tried again."""
        while self._node.replica.engine is engine:
            try:
                await self._before(engine)
                await self._broker.begin(engine)
                return
            except PenstockError as error:
                # If the engine has ended meanwhile, that is the next change.
                if self._node.replica.engine is engine:
                    if not error.retryable:
                        self.refused(error)
                        return
                    _log.warning("the broker cannot begin to serve yet: %s", error.message)
            await asyncio.sleep(BEGIN_AGAIN_S)

    # -- joining and leaving ---------------------------------------------------------------------

    async def _join(self) -> None:
        joined: asyncio.Future[PenstockError | None] = self._loop.create_future()
        self._node.start(joined.set_result)
        refusal = await joined
        if refusal is not None:
            raise refusal

    async def _hand_over(self) -> None:
        """Lets another broker serve. Requests that come meanwhile wait and are forwarded to it."""
        await self._broker.end(STOPPING)
        await self._call_node(self._node.hand_over)

    async def _call_node(self, step: Callable[[Callable[[], None]], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        step(partial(done.set_result, None))
        await done

    # -- the node --------------------------------------------------------------------------------

    def _make_node(
        self,
        services: JetStreamServices,
        stream: SharedStream,
        pieces: SharedPieces,
        url: str,
        promised: Capabilities,
    ) -> ClusterNode:
        settings, vfs = self._settings, Vfs()
        scheduler, clock = LoopScheduler(self._loop), SystemClock()
        limits = settings.limits()
        options = WalOptions(
            segment_bytes=settings.segment_bytes, reserve_bytes=settings.reserve_bytes
        )
        directory = os.path.join(settings.data_dir, SHARD)

        def make_replica(node: ClusterNode) -> Replica:
            def open_directory(
                life: Scheduler, ended: Callable[[BaseException], None]
            ) -> ReplicaDirectory:
                return ReplicaDirectory(
                    vfs,
                    directory,
                    options,
                    stream,
                    SharedPieceStore(pieces, life, LoopCalls(life)),
                    life,
                    promised.durability,
                    is_current=node.is_current,
                    on_ended=ended,
                )

            def find_peers(first_seq: int) -> list[HttpPeer]:
                tls = partial(upstream_tls, settings)
                return [
                    HttpPeer(each.name, each.url, self._token, tls)
                    for each in node.copy_peers(first_seq)
                ]

            return Replica(
                settings.name,
                stream,
                limits,
                clock,
                scheduler,
                lambda: LoopScheduler(self._loop),
                open_directory,
                node,
                make_router(settings.router, settings.router_timeout_ms, self._loop),
                copier=Copier(vfs, directory, options.segment_bytes, options.reserve_bytes),
                find_peers=find_peers,
            )

        me = identity_of(vfs, settings.data_dir, settings.name, url)
        shared = {name: getattr(limits, name) for name in DECIDING_LIMITS}
        agreement = Agreement(CLUSTER_FORMAT, shared | {"lease_ms": settings.cluster_lease_ms})
        return ClusterNode(
            me,
            settings.cluster_name,
            agreement,
            services.keys,
            scheduler,
            clock,
            TcpProbe(self._loop),
            LeaseTimes(settings.cluster_lease_ms),
            make_replica,
            self,
            copies=settings.cluster_copies,
        )

    def _token(self) -> str:
        return self._broker.dispatch.admission.token
