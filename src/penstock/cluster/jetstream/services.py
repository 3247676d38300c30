"""Everything that a broker uses of NATS, over one connection: the cluster's streams and its keys.

Opens what is there and makes what is absent, after checking that it promises enough. Closing it
ends the connection and with it all tails and watches.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import msgspec

from penstock.cluster.jetstream import api, promise, setup
from penstock.cluster.jetstream.addresses import NatsAddress
from penstock.cluster.jetstream.api import JetStreamApi, JetStreamConfig, StreamInfo
from penstock.cluster.jetstream.connection import REQUEST_TIMEOUT_S, NatsConnection
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.jetstream.keys import JetStreamKeys
from penstock.cluster.jetstream.pieces import JetStreamPieces
from penstock.cluster.jetstream.promise import ClusterPromise
from penstock.cluster.jetstream.stream import HEADER_BYTES, JetStreamStream
from penstock.cluster.jetstream.tail import StreamPlace


class NatsSettings(msgspec.Struct, frozen=True):
    """Addresses of the NATS servers, and what Penstock requires of them. `accept` has names of
    `promise.ACCEPTABLE`; `monitors` are the monitoring addresses of the servers. `ca` is a file of
    certificates by which TLS servers are verified; empty: those that the system trusts."""

    addresses: tuple[NatsAddress, ...]
    cluster: str
    max_message_bytes: int
    monitors: tuple[str, ...] = ()
    accept: frozenset[str] = frozenset()
    request_timeout_s: float = REQUEST_TIMEOUT_S
    ca: str = ""


class JetStreamServices:
    """Call `open` first. `promise` and `cluster_id` are known from then on."""

    def __init__(self, settings: NatsSettings, name: str) -> None:
        """Raises ClusterRefused."""
        self._settings = settings
        self._accept = promise.check_names(settings.accept)
        self._names = setup.ClusterNames(settings.cluster)
        self.connection = NatsConnection(
            settings.addresses, name=name, tls=_tls_context(settings.ca)
        )
        self._api = JetStreamApi(self.connection)
        self.cluster_id = ""
        self.promise = ClusterPromise(0, "")
        self.keys = JetStreamKeys(self._api, self._names.bucket, settings.request_timeout_s)

    async def open(self) -> None:
        """Waits for the servers as long as it takes. Raises ClusterRefused."""
        self.connection.open()
        await self.connection.connected()
        wanted = setup.bucket_config(self._names, setup.REPLICAS)
        found = await setup.find_or_make(self._api, wanted, self._accept)
        self.cluster_id = found.config.metadata.get(setup.CLUSTER_ID, "")
        self.promise = await self._check(found, wanted)
        if found.config.subjects != wanted.subjects:
            raise ClusterRefused(f"the bucket {self._names.bucket} has other subjects than its own")
        key = wanted.subjects[0].replace(">", "permission")
        await setup.check_append(self._api, key, setup.IMPOSSIBLE_LAST_OF_KEY)

    async def stream(self, purpose: str, max_bytes: int) -> JetStreamStream:
        """Opens a stream of the cluster, such as `shard-0`. Raises ClusterRefused."""
        names = self._names
        wanted = setup.stream_config(names, purpose, self.cluster_id, max_bytes, setup.REPLICAS)
        found = await setup.find_or_make(self._api, wanted, self._accept)
        self.promise = _weaker(self.promise, await self._check(found, wanted))
        expected = names.subject(purpose, found.config.metadata.get(api.IDENTITY, ""))
        if found.config.subjects != (expected,):
            raise ClusterRefused(f"the stream {wanted.name} has other subjects than its own")
        await setup.check_append(self._api, expected, setup.IMPOSSIBLE_LAST)
        place = StreamPlace(wanted.name, expected, found.identity)
        settings = self._settings
        return JetStreamStream(
            self._api, place, settings.max_message_bytes, settings.request_timeout_s
        )

    async def pieces(self, purpose: str, max_bytes: int) -> JetStreamPieces:
        """Opens the stream of a shard's staged pieces. Raises ClusterRefused."""
        names = self._names
        wanted = setup.pieces_config(names, purpose, self.cluster_id, max_bytes, setup.REPLICAS)
        found = await setup.find_or_make(self._api, wanted, self._accept)
        subject = names.subject(purpose, found.config.metadata.get(api.IDENTITY, ""))
        if found.config.subjects != (f"{subject}.>",):
            raise ClusterRefused(f"the stream {wanted.name} has other subjects than its own")
        self.promise = _weaker(self.promise, await self._check(found, wanted))
        settings = self._settings
        return JetStreamPieces(
            self._api,
            wanted.name,
            f"{subject}.",
            settings.max_message_bytes,
            settings.request_timeout_s,
        )

    async def close(self) -> None:
        await self.connection.close()

    async def _check(self, found: StreamInfo, wanted: JetStreamConfig) -> ClusterPromise:
        connection, accept = self.connection, self._accept
        promise.check_config(found, wanted, self.cluster_id)
        promise.check_replicas(found, accept)
        monitored = await promise.read_monitors(self._settings.monitors)
        payloads = {name: each.max_payload for name, each in monitored.items()}
        await connection.connected()
        payloads.setdefault(connection.server, connection.max_payload)
        promise.check_payload(payloads, self._settings.max_message_bytes + HEADER_BYTES)
        holders = promise.holders_of(found, connection.server_name)
        sync = promise.check_sync(holders, monitored, accept)
        return ClusterPromise(found.config.num_replicas, sync)


def _tls_context(ca: str) -> ssl.SSLContext | None:
    if not ca:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # SSLError is one
        reason = error.strerror or type(error).__name__
        raise ClusterRefused(f"the file {ca} with the NATS servers' CA: {reason}") from error


def _weaker(one: ClusterPromise, other: ClusterPromise) -> ClusterPromise:
    order: Sequence[str] = ("less", "stated", "always")
    return ClusterPromise(
        min(one.replicas, other.replicas), min(one.sync, other.sync, key=order.index)
    )
