"""The commands of an operator to a cluster: move the shard, drain a broker, forget one.

Invariant: the server has stopped serving before the node hands the shard over, so that nothing is
accepted that nobody answers. Must not know HTTP, nor how owners are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.api.cluster import FIRST_SHARD, LogReport, OwnerReport
from penstock.api.outcomes import Done
from penstock.model.errors import FailedPrecondition, NotFound, Unavailable
from penstock.server.broker import Broker


class MovableNode(Protocol):
    """This broker as a member of its cluster: `cluster.node.ClusterNode`."""

    name: str

    def owner_of(self, shard: int) -> OwnerReport | None: ...

    def successors(self) -> list[str]: ...

    def check_successor(self, name: str) -> None: ...

    def is_live(self, name: str) -> bool: ...

    def move(self, successor: str, *, yields: bool) -> None: ...

    def remove(self, name: str, done: Done[None]) -> None: ...


class ClusterCommands:
    """See `ClusterControl`. `describe` asks the servers of the log."""

    def __init__(
        self,
        node: MovableNode,
        broker: Broker,
        durability: str,
        describe: Callable[[Done[LogReport]], None],
    ) -> None:
        self.durability = durability
        self._node = node
        self._broker = broker
        self._describe = describe
        self._moving: asyncio.Task[None] | None = None

    def describe_log(self, done: Done[LogReport]) -> None:
        self._describe(done)

    def move(self, to: str) -> OwnerReport:
        owner = self._owner()
        self._node.check_successor(to)
        self._begin_move(to, yields=False)
        return owner

    def drain(self, name: str) -> OwnerReport | None:
        owner = self._owner()
        if owner.owner != name:
            if not self._node.is_live(name):
                raise NotFound(f"no live broker of this cluster has the name {name!r}")
            return None
        successors = self._node.successors()
        if not successors:
            raise FailedPrecondition(
                f"no other broker could take over from {name}: none has caught up with the log"
            )
        self._begin_move("", yields=True)
        return owner

    def remove(self, name: str, done: Done[None]) -> None:
        self._node.remove(name, done)

    def _owner(self) -> OwnerReport:
        owner = self._node.owner_of(FIRST_SHARD)
        if owner is None or owner.owner != self._node.name:
            raise Unavailable("this broker does not own the shard at the moment; try again")
        if self._moving is not None and not self._moving.done():
            raise FailedPrecondition("the shard is being handed over already")
        return owner

    def _begin_move(self, to: str, *, yields: bool) -> None:
        loop = asyncio.get_running_loop()
        # Later, so that the answer to this very request is written first.
        self._moving = loop.create_task(self._move(to, yields=yields))

    async def _move(self, to: str, *, yields: bool) -> None:
        await self._broker.end(f"the shard moves to {to or 'another broker'}")
        self._node.move(to, yields=yields)
