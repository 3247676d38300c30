"""`penstock cluster demo`: a cluster on this machine, some processes of which are killed.

Invariant: it says what it measured, and fails if anything was lost or doubled.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import click

from penstock.cli.demo_load import DemoLoad
from penstock.cli.demo_processes import COUNT, DemoProcess, DemoProcesses
from penstock.cli.terminal import CommandFailed, show
from penstock.client.aio import AsyncClient
from penstock.client.cluster import ClusterDescription

POLL_S = 0.1
QUIET_S = 3.0
"""How long the load runs before, between and after the kills."""
RECOVERY_S = 60.0
LAST_S = 60.0


@click.command()
def demo() -> None:
    """Start a cluster on this machine and kill parts of it.

    Three NATS servers and three brokers run in a temporary folder while messages are produced and
    consumed. The owner, a NATS follower and the NATS leader are killed. At the end every
    acknowledged message must be there, once. It takes less than a minute and leaves nothing behind.
    """
    # Both end the block below, so that no process is left.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    processes = DemoProcesses()
    try:
        started = time.monotonic()
        show(f"starting {COUNT} NATS servers and {COUNT} brokers in a temporary folder")
        processes.start_nats()
        processes.start_brokers()
        show(f"  ready after {time.monotonic() - started:.1f} s: {processes.addresses}")
        asyncio.run(Demo(processes).run())
        show(f"it took {time.monotonic() - started:.0f} s")
    finally:
        processes.close()


class Demo:
    """The story: a load, three kills, and the count at the end."""

    def __init__(self, processes: DemoProcesses) -> None:
        self._processes = processes

    async def run(self) -> None:
        load = DemoLoad(self._processes.addresses)
        try:
            async with AsyncClient(self._processes.addresses) as client:
                self._client = client
                await self._tell(load)
        except TimeoutError as error:
            raise CommandFailed("the cluster has not answered in time") from error
        finally:
            await load.close()

    async def _tell(self, load: DemoLoad) -> None:
        await self._whole()
        await load.start()
        await load.wait_for_answers(1, RECOVERY_S)
        await self._quiet(load)
        await self._kill("the owner", load, self._owner)
        await self._kill("a NATS follower", load, self._follower)
        await self._kill("the NATS leader", load, self._leader)
        await self._count(load)

    async def _quiet(self, load: DemoLoad) -> None:
        load.measure()
        before = len(load.acknowledged)
        await asyncio.sleep(QUIET_S)
        rate = (len(load.acknowledged) - before) / QUIET_S
        show(f"  {rate:,.0f} messages a second are acknowledged")

    async def _kill(
        self, what: str, load: DemoLoad, find: Callable[[], Awaitable[DemoProcess]]
    ) -> None:
        victim = await find()
        show(f"killing {what}, {victim.name}")
        load.measure()
        victim.kill()
        # Longer than it takes to notice, and until there are answers again.
        await asyncio.sleep(1.0)
        await load.wait_for_answers(100, RECOVERY_S)
        seen = await self._client.describe_cluster()
        owners = ", ".join(f"{each.owner} owns the shard" for each in seen.shards)
        show(f"  nobody answered for {load.longest_s * 1000:,.0f} ms; {owners}")
        victim.start()
        await asyncio.to_thread(self._processes.wait_until_ready, victim)
        await self._whole()
        show(f"  {victim.name} is back")

    async def _count(self, load: DemoLoad) -> None:
        try:
            await load.finish(LAST_S)
        except TimeoutError:
            missing = len(load.acknowledged - load.received)
            show(f"  {missing} messages have not been delivered after {LAST_S:.0f} s")
        stored = await load.stored()
        lost = len(load.acknowledged - stored.keys())
        missed = len(load.acknowledged - load.received)
        doubled = sum(number > 1 for number in stored.values())
        show(f"{len(load.acknowledged):,} messages were acknowledged")
        show(f"  lost: {lost}, stored twice: {doubled}, never delivered: {missed}")
        show(f"  delivered again after their ack: {load.came_again}")
        if lost or doubled or missed or load.came_again:
            raise CommandFailed("the cluster has broken its promise; please report it")

    # -- who is who ------------------------------------------------------------------------------

    async def _owner(self) -> DemoProcess:
        seen = await self._client.describe_cluster()
        return self._processes.find(seen.shards[0].owner)

    async def _follower(self) -> DemoProcess:
        return self._processes.find(await self._server("follower"))

    async def _leader(self) -> DemoProcess:
        return self._processes.find(await self._server("leader"))

    async def _server(self, role: str) -> str:
        seen = await self._client.describe_cluster(log=True)
        servers = seen.log.servers if seen.log is not None else []
        return next(each.name for each in servers if each.role == role)

    async def _whole(self) -> None:
        """Waits until every broker and every server takes part again."""
        async with asyncio.timeout(RECOVERY_S):
            while True:
                seen = await self._client.describe_cluster(log=True)
                if _is_whole(seen):
                    return
                await asyncio.sleep(POLL_S)


def _is_whole(seen: ClusterDescription) -> bool:
    states = sorted(each.state for each in seen.brokers)
    servers = seen.log.servers if seen.log is not None else []
    return (
        states == ["owner", *["standby"] * (COUNT - 1)]
        and len(servers) == COUNT
        and all(each.state == "current" for each in servers)
    )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
