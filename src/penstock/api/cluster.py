"""The owners of shards and the brokers: what a server needs to forward requests.

The cluster's own code implements `OwnerMap`. All its methods answer at once from memory, and all
calls are made on the loop's thread. Must not know how owners are chosen, or how requests travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from penstock.api.outcomes import Done

FIRST_SHARD = 0
"""The shard of every request, as long as there is one only."""

BrokerState = Literal["starting", "copying", "standby", "owner", "draining", "gone"]


class OwnerReport(msgspec.Struct, frozen=True):
    """The broker that owns a shard. Two reports with the same `epoch` name the same owner. `owner`
    is its name, and `url` is where other brokers and clients reach it: scheme, host and port."""

    shard: int
    owner: str
    url: str
    epoch: int


class BrokerReport(msgspec.Struct, frozen=True):
    """A broker of the cluster, as it described itself last, `age_ms` ago. `position` is the last
    frame of the log that it has; `lag` is how many frames the owner's last description is ahead."""

    name: str
    url: str
    version: str
    state: BrokerState
    position: int = 0
    lag: int = 0
    age_ms: int = 0


class LogServer(msgspec.Struct, frozen=True):
    """A server that keeps a replica of the log. `lag` is how many operations it is behind."""

    name: str
    role: Literal["leader", "follower"]
    state: Literal["current", "behind", "offline"]
    lag: int = 0


class LogReport(msgspec.Struct, frozen=True):
    """The stream that is the log of a shard. It refuses what would take it above `max_bytes`;
    -1: it has no limit. It holds the frames from `first` to `last`."""

    name: str
    first: int
    last: int
    bytes: int
    max_bytes: int
    servers: list[LogServer]


class ClusterControl(Protocol):
    """The part of a cluster that operators use. `durability` says what a success means."""

    durability: str

    def describe_log(self, done: Done[LogReport]) -> None:
        """Asks the servers. Gives Unavailable if they do not answer within a second or two."""
        ...

    def move(self, to: str) -> OwnerReport:
        """Begins to hand the shard from this broker, its owner, to another one. Returns who owns
        it until then. Raises FailedPrecondition if that is no standby that has caught up."""
        ...

    def drain(self, name: str) -> OwnerReport | None:
        """Begins to hand over what a broker owns. From then on it takes a shard only if no other
        does, until it is started again or moved to. Returns None if it owns nothing; raises
        FailedPrecondition if no standby could take over, and NotFound for a name that is not
        live."""
        ...

    def remove(self, name: str, done: Done[None]) -> None:
        """Forgets a broker that is gone. Gives FailedPrecondition if it is live, NotFound if nobody
        knows it."""
        ...


class CopyFigures(msgspec.Struct, frozen=True):
    """A broker's copy of a shard. Positions are numbers of messages. `copied_bytes` of
    `copying_bytes` are here while it copies the files of another broker."""

    position: int
    sealed: int
    stream_first: int
    audits: int
    faults: int
    repaired: int
    copied_bytes: int
    copying_bytes: int


COPY_PATH = "/v1/cluster/copy"
"""The internal path from which other brokers copy sealed files."""


class CopySource(Protocol):
    """The sealed files of this broker, for other brokers that copy them. What is read may be too
    much for the moment: then the outcome is ResourceExhausted."""

    def manifest(self, done: Done[bytes]) -> None:
        """Gives the content of the manifest, NotFound if nothing is sealed."""
        ...

    def read(self, name: str, offset: int, length: int, done: Done[bytes]) -> None:
        """Gives a part of a file, shorter at its end. NotFound: it was removed meanwhile."""
        ...


class OwnerMap(Protocol):
    """`name` is the name of this broker, and `cluster` that of the cluster."""

    name: str
    cluster: str

    def owner_of(self, shard: int) -> OwnerReport | None:
        """Returns the owner of a shard, which may be this broker; None while nobody is known to own
        it. May be out of date: an owner that is none refuses what is forwarded to it."""
        ...

    def owners(self) -> list[OwnerReport]:
        """Returns the known owners, in the order of their shards."""
        ...

    def brokers(self) -> list[BrokerReport]:
        """Returns the brokers of the cluster, this one too, in the order of their names."""
        ...

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after each change of an owner, for ever. It takes no time, raises
        nothing, and may be called once for several changes."""
        ...
