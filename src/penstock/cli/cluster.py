"""`penstock cluster`: shows the cluster, hands shards over, forgets brokers that are gone.

Invariant: how long a hand-over takes is measured from outside, by requests that are answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click

from penstock.cli.cluster_demo import demo
from penstock.cli.connection import json_flag, with_client
from penstock.cli.terminal import CommandFailed, printable, show, show_json, show_table, size
from penstock.client.cluster import ClusterDescription, ShardOwner
from penstock.client.sync import Client
from penstock.model.errors import PenstockError

HAND_OVER_S = 20.0
"""How long a hand-over may take: the owner drains for 5 s, and a lease ends after 3 s."""
PROBE = "penstock.no-such-topic"
"""A request about this topic is answered by the owner, which has no such topic."""
PROBE_PAUSE_S = 0.002


@click.group()
def cluster() -> None:
    """Show and run a cluster of brokers. See docs/cluster.md."""


cluster.add_command(demo)


@cluster.command()
@json_flag
@with_client
def status(client: Client, as_json: bool) -> None:
    """Show the brokers, who owns the shard, and the NATS servers that keep the log."""
    found = _described(client)
    if as_json:
        show_json(found)
        return
    show(printable(f"cluster {found.cluster}, as {found.name} knows it"))
    rows = [
        (
            each.name,
            each.state,
            each.url,
            each.version,
            f"{each.lag:,}" if each.state in ("standby", "starting") else "-",
            f"{each.age_ms / 1000:.1f} s ago",
        )
        for each in found.brokers
    ]
    show_table(("BROKER", "STATE", "ADDRESS", "VERSION", " FRAMES BEHIND", " ANNOUNCED"), rows)
    for each in found.shards:
        show(printable(f"shard {each.shard} is owned by {each.owner}, epoch {each.epoch}"))
    if not found.shards:
        show("nobody owns the shard: requests wait, or are answered with 503")
    _show_log(found)
    show(printable(f"what a success means: {found.durability or 'unknown'}"))


def _show_log(found: ClusterDescription) -> None:
    log = found.log
    if log is None:
        show(printable(f"the log: {found.log_error or 'not known'}"))
        return
    limit = "no limit" if log.max_bytes < 0 else f"at most {size(log.max_bytes)}"
    frames = f"frames {log.first:,} to {log.last:,}" if log.last >= log.first else "no frames"
    show(printable(f"the log {log.name}: {frames}, {size(log.bytes)}, {limit}"))
    rows = [(each.name, each.role, each.state, f"{each.lag:,}") for each in log.servers]
    show_table(("NATS SERVER", "ROLE", "STATE", " BEHIND"), rows)


@cluster.command()
@click.option("--to", required=True, metavar="NAME", help="The broker that is to own the shard.")
@json_flag
@with_client
def move(client: Client, to: str, as_json: bool) -> None:
    """Let another broker own the shard, in order."""
    _hand_over(client, lambda: client.move_shard(to), as_json)


@cluster.command()
@click.argument("name")
@json_flag
@with_client
def drain(client: Client, name: str, as_json: bool) -> None:
    """Let the broker NAME own nothing, before it is stopped.

    Afterwards it takes the shard only if no other broker does, until it is started again.
    """
    _hand_over(client, lambda: client.drain_broker(name), as_json)


@cluster.command()
@click.argument("name")
@json_flag
@with_client
def remove(client: Client, name: str, as_json: bool) -> None:
    """Forget the broker NAME, which is gone for good. A live one is refused."""
    client.remove_broker(name)
    if as_json:
        show_json({"removed": name})
    else:
        show(printable(f"{name} is forgotten; if it is started again, it announces itself"))


def _hand_over(client: Client, begin: Callable[[], list[ShardOwner]], as_json: bool) -> None:
    """Begins a hand-over, waits until there is another owner, and says how long nobody answered."""
    with OwnerProbe(client) as probe:
        before = begin()
        after = [_wait_for_next(client, each) for each in before]
    if as_json:
        show_json({"before": before, "after": after, "longest_ms": probe.longest_ms})
        return
    if not before:
        show("it owns nothing: nothing has to be handed over")
    for old, new in zip(before, after, strict=True):
        show(
            printable(
                f"shard {new.shard} has moved from {old.owner} to {new.owner}, epoch {new.epoch}; "
                f"the longest time without an answer was {probe.longest_ms} ms"
            )
        )


def _wait_for_next(client: Client, before: ShardOwner) -> ShardOwner:
    until = time.monotonic() + HAND_OVER_S
    while time.monotonic() < until:
        for each in client.describe_cluster().shards:
            if each.shard == before.shard and each.epoch > before.epoch:
                return each
        time.sleep(0.02)
    raise CommandFailed(
        f"nobody has taken over shard {before.shard} from {before.owner} within "
        f"{HAND_OVER_S:.0f} s; `penstock cluster status` shows who owns it now"
    )


def _described(client: Client) -> ClusterDescription:
    found = client.describe_cluster(log=True)
    if not found.name:
        raise CommandFailed(f"the broker at {client.url} is not part of a cluster")
    return found


class OwnerProbe:
    """Asks the owner again and again. `longest_ms` is the longest time between two answers; a
    refusal by the owner is an answer, and one because nobody owns the shard is none."""

    def __init__(self, client: Client) -> None:
        self.longest_ms = 0
        self._client = client
        self._ends = threading.Event()
        self._has_answer = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-probe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_answer.wait(HAND_OVER_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            # The first answer of the next owner ends the time without one.
            self._has_answer.clear()
            self._has_answer.wait(HAND_OVER_S)
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ends.wait(PROBE_PAUSE_S):
            try:
                self._client.describe_topic(PROBE)
            except PenstockError as error:
                if error.retryable:
                    continue
            now = time.monotonic()
            self.longest_ms = max(self.longest_ms, round((now - last) * 1000))
            last = now
            self._has_answer.set()
