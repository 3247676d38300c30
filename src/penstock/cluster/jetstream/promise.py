"""Checks how durable a cluster's streams are, and refuses those that promise too little.

Three replicas, each synced to its disk before it answers, on servers that take messages of the size
that the log writes. The operator may accept less, by the names in `ACCEPTABLE`.

A client cannot ask a NATS server how it syncs: the server tells that to its system account and on
its monitoring port only. With the monitoring addresses of all servers the setting is read; without
them the operator has to state it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import httpx
import msgspec

from penstock.cluster.jetstream.api import JetStreamConfig, StreamInfo
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.jetstream.setup import CLUSTER_ID, REPLICAS

ACCEPTABLE = {
    "replicas": "fewer than three replicas: what one server loses is lost",
    "sync": "servers that do not sync every write: what several servers lose at once is lost",
    "unread-sync": "the operator's word that all servers have sync_interval: always",
}
"""Weaker promises that an operator may accept, by name, with what each one risks."""
MONITOR_TIMEOUT_S = 5.0


class ClusterPromise(msgspec.Struct, frozen=True):
    """The meaning of a success. `sync` is `always` (read from every server), `stated` (by the
    operator, not read), or `less` (accepted)."""

    replicas: int
    sync: str


class MonitoredJetStream(msgspec.Struct, frozen=True):
    sync_always: bool = False


class MonitoredSection(msgspec.Struct, frozen=True):
    config: MonitoredJetStream | None = None


class MonitoredServer(msgspec.Struct, frozen=True):
    """A NATS server as its monitoring port describes it, under /varz."""

    server_name: str
    max_payload: int = 0
    jetstream: MonitoredSection = MonitoredSection()

    @property
    def syncs_always(self) -> bool:
        return self.jetstream.config is not None and self.jetstream.config.sync_always


def check_names(accept: Iterable[str]) -> frozenset[str]:
    """Raises ClusterRefused for a name that nobody can accept."""
    names = frozenset(accept)
    unknown = sorted(names - ACCEPTABLE.keys())
    if unknown:
        known = "; ".join(f"`{name}`: {meaning}" for name, meaning in ACCEPTABLE.items())
        raise ClusterRefused(f"there is no {', '.join(map(repr, unknown))} to accept. {known}")
    return names


def check_config(found: StreamInfo, wanted: JetStreamConfig, cluster_id: str) -> None:
    """Raises ClusterRefused if a stream under this name is none of this cluster's, or was changed
    so that it could lose or invent messages. Its size may be another one."""
    config = found.config
    if config.metadata.get(CLUSTER_ID, "") != cluster_id or not cluster_id:
        raise ClusterRefused(
            f"the stream {config.name} is not of this cluster: its metadata has another "
            f"{CLUSTER_ID} than the bucket of keys. Give this cluster another name. If somebody "
            "removed the bucket, bring it back, or remove the cluster's streams as well"
        )
    differing = [
        f"{name} is {getattr(config, name)!r}, not {expected!r}"
        for name, expected in _expected(wanted).items()
        if getattr(config, name) != expected
    ]
    if config.persist_mode not in ("", "default"):
        differing.append(f"persist_mode is {config.persist_mode!r}")
    if config.mirror is not None or config.sources or config.subject_transform is not None:
        differing.append("it copies or renames messages (mirror, sources or subject_transform)")
    if differing:
        raise ClusterRefused(
            f"the stream {config.name} was changed: {'; '.join(differing)}. Change it back with "
            "the tools of NATS"
        )


def check_replicas(found: StreamInfo, accept: frozenset[str]) -> None:
    count = found.config.num_replicas
    if count < REPLICAS and "replicas" not in accept:
        raise ClusterRefused(
            f"the stream {found.config.name} has {count} replicas, not {REPLICAS}: edit it with "
            f"the tools of NATS, or accept `replicas` ({ACCEPTABLE['replicas']})",
            "replicas",
        )


def check_payload(servers: Mapping[str, int], wanted_bytes: int) -> None:
    """Raises ClusterRefused if a server takes smaller messages than `wanted_bytes`."""
    for name, max_payload in servers.items():
        if max_payload < wanted_bytes:
            raise ClusterRefused(
                f"the NATS server {name} has a max_payload of {max_payload} bytes; the log's "
                f"largest message needs {wanted_bytes}. Raise max_payload on every server, or "
                "lower max_message_bytes"
            )


async def read_monitors(urls: Sequence[str]) -> dict[str, MonitoredServer]:
    """Returns the servers behind the monitoring addresses, by name. Raises ClusterRefused for an
    address that does not answer."""
    servers: dict[str, MonitoredServer] = {}
    async with httpx.AsyncClient(timeout=MONITOR_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            try:
                address = httpx.URL(url).join("/varz")
                if address.port is not None and address.port > 65535:
                    raise httpx.InvalidURL("the port is too large")
                reply = await client.get(address)
                reply.raise_for_status()
                server = msgspec.json.decode(reply.content, type=MonitoredServer)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                place = _place(url)
                raise ClusterRefused(
                    f"the monitoring address {place} of a NATS server does not answer as one: "
                    f"{type(error).__name__}. Give the address of `http_port` or `https_port`"
                ) from None
            servers[server.server_name] = server
    return servers


def check_sync(
    holders: Iterable[str], monitored: Mapping[str, MonitoredServer], accept: frozenset[str]
) -> str:
    """Returns what is known of the syncing on the servers that hold replicas. Raises ClusterRefused
    if that is too little."""
    lax = sorted(server.server_name for server in monitored.values() if not server.syncs_always)
    if lax:
        if "sync" in accept:
            return "less"
        raise ClusterRefused(
            f"the NATS servers {', '.join(lax)} do not sync every write: set `sync_interval: "
            f"always` in their jetstream section, or accept `sync` ({ACCEPTABLE['sync']})",
            "sync",
        )
    unread = sorted(set(holders) - monitored.keys())
    if not unread:
        return "always"
    if "sync" in accept:
        return "less"
    if "unread-sync" in accept:
        return "stated"
    raise ClusterRefused(
        f"nobody can tell how the NATS servers {', '.join(unread)} sync: a server tells it on its "
        "monitoring port only. Give the monitoring addresses of all servers, or accept "
        f"`unread-sync` ({ACCEPTABLE['unread-sync']})",
        "unread-sync",
    )


def holders_of(found: StreamInfo, connected_server: str) -> set[str]:
    """Returns the names of the servers that hold replicas of a stream."""
    if found.cluster is None:
        return {connected_server}
    names = {found.cluster.leader, *(each.name for each in found.cluster.replicas)}
    return {name for name in names if name} or {connected_server}


def _expected(wanted: JetStreamConfig) -> dict[str, object]:
    """The configuration that must not have changed since the stream was made. Leaves out the
    subject of a shard, which has its stream's own id."""
    names = (
        "retention", "storage", "discard", "max_msgs", "max_msgs_per_subject", "max_msg_size",
        "max_age", "deny_delete", "deny_purge", "allow_rollup_hdrs", "no_ack", "sealed",
    )  # fmt: skip
    return {name: getattr(wanted, name) for name in names}


def _place(url: str) -> str:
    """The address without what may be secret in it."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return "(not a URL)"
    return f"{parsed.scheme}://{parsed.host}:{parsed.port}" if parsed.port else parsed.host
