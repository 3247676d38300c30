"""The calls on the cluster of a broker, and their answers. No IO."""

from __future__ import annotations

import msgspec

from penstock.client.calls import Call, encode, nothing, query_of, reader, segment


class ClusterBroker(msgspec.Struct, frozen=True):
    """`state` is starting, standby, owner, draining or gone. `lag` is how many frames of the log it
    was behind the owner when both announced themselves last, `age_ms` ago."""

    name: str
    url: str
    version: str = ""
    state: str = ""
    position: int = 0
    lag: int = 0
    age_ms: int = 0


class ShardOwner(msgspec.Struct, frozen=True):
    """The broker that serves a shard. `epoch` rises with every change of the owner."""

    shard: int
    owner: str
    url: str
    epoch: int


class NatsServer(msgspec.Struct, frozen=True):
    """`role` is leader or follower; `state` is current, behind or offline."""

    name: str
    role: str
    state: str
    lag: int = 0


class ClusterLog(msgspec.Struct, frozen=True):
    """The stream that is the log. `max_bytes` -1: it has no limit."""

    name: str
    first: int
    last: int
    bytes: int
    max_bytes: int
    servers: list[NatsServer]


class ClusterDescription(msgspec.Struct, frozen=True):
    """`name` is the broker that answered; empty if it is not part of a cluster. `log` is None if it
    was not asked for, or if NATS does not answer: then `log_error` says why."""

    name: str
    brokers: list[ClusterBroker]
    shards: list[ShardOwner]
    cluster: str = ""
    durability: str = ""
    log: ClusterLog | None = None
    log_error: str = ""


def describe_cluster(*, log: bool = False) -> Call[ClusterDescription]:
    """Returns the brokers of the cluster and their states; with `log` also the NATS servers."""
    query = f"?{query_of(log='true')}" if log else ""
    return Call("GET", f"/v1/cluster{query}", reader(ClusterDescription))


def move_shard(to: str) -> Call[list[ShardOwner]]:
    """Lets the broker `to` own the shard. Returns when this begins, with the owner until then."""
    return _hand_over("move", {"to": to})


def drain_broker(broker: str) -> Call[list[ShardOwner]]:
    """Lets a broker own nothing. Returns what it owned when this begins."""
    return _hand_over("drain", {"broker": broker})


def remove_broker(broker: str) -> Call[None]:
    """Forgets a broker that is gone. Raises FailedPrecondition if it is live."""
    return Call("DELETE", f"/v1/cluster/brokers/{segment(broker)}", nothing)


class _HandOver(msgspec.Struct):
    shards: list[ShardOwner]


def _hand_over(verb: str, body: dict[str, str]) -> Call[list[ShardOwner]]:
    read = reader(_HandOver)
    return Call("POST", f"/v1/cluster/{verb}", lambda answer: read(answer).shards, encode(body))
