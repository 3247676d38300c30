"""An engine driven by hand: time moves and threads are waited for only when a test says so.

`Broker` is one broker's life on a disk that can fail (or in memory); `Reader` is a consumer with
everything it was given. Commands return their outcome once it is durable; `submit` does not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.api.effects import BegunEffect, EffectCommand
from penstock.api.messages import Produce, Router, Settle
from penstock.core.state import BrokerState
from penstock.engine.clock import ManualClock
from penstock.engine.consumers import OpenConsumer
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.opening import open_in_memory, open_on_disk
from penstock.engine.scheduler import ManualScheduler
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import PenstockError
from penstock.model.item import Item
from penstock.model.limits import KIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from penstock.storage.vfs import Vfs
from penstock.storage.wal import Wal
from tests.engine.inline_sealing import InlineSealer
from tests.storage.faulty_vfs import FaultyVfs

DIRECTORY = "/data"
SMALL = WalOptions(segment_bytes=256 * KIB, reserve_bytes=0)
LEASE_MS = 1000
LONG_MS = 10 * 3600 * 1000
"""Longer than anything a test waits for."""


class Turns(ManualScheduler):
    """Notices a broker that keeps itself busy with nothing, and can hold back reads from disk."""

    MOST_TURNS = 20_000

    def __init__(self) -> None:
        super().__init__()
        self.is_holding_reads = False
        self.held_reads: list[Callable[[], None]] = []

    def run(self) -> None:
        turns = 0
        while self._turns:
            self._turns.popleft()()
            turns += 1
            if turns > self.MOST_TURNS:
                raise AssertionError("the broker spins: it never comes to rest")

    def run_until(self, is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Waits longer: on a busy machine, a sealing process takes seconds to start."""
        super().run_until(is_true, timeout_s)

    def in_thread(self, work: Callable[[], None]) -> None:
        if self.is_holding_reads:
            self.held_reads.append(work)
        else:
            work()

    def release_reads(self) -> None:
        self.is_holding_reads = False
        held, self.held_reads = self.held_reads, []
        for work in held:
            work()


class Reader:
    """A consumer's far end: keeps what it was given, and why it was ended."""

    def __init__(self, topic: str, group: str, owner: str) -> None:
        self.topic = topic
        self.group = group
        self.owner = owner
        self.items: list[Item] = []
        self.ended: list[str] = []
        self.consumer: OpenConsumer | None = None

    def write(self, items: list[Item]) -> None:
        self.items += items

    def end(self, reason: str) -> None:
        self.ended.append(reason)

    def offsets(self) -> list[int]:
        return [item.offset for item in self.items]

    def attempts(self) -> list[int]:
        return [item.attempts for item in self.items]

    def take(self) -> list[Item]:
        """What came since the last time."""
        taken, self.items = self.items, []
        return taken

    def one(self) -> Item:
        """The one item that came since the last time."""
        taken = self.take()
        assert len(taken) == 1, taken
        return taken[0]

    @property
    def live(self) -> OpenConsumer:
        assert self.consumer is not None
        return self.consumer


class Broker:
    """`vfs` None: in memory. `crash` and `restart` go on with what the disk then holds."""

    def __init__(
        self,
        vfs: Vfs | None = None,
        *,
        limits: Limits | None = None,
        options: WalOptions = SMALL,
        router: Router | None = None,
        directory: str = DIRECTORY,
        clock: ManualClock | None = None,
        waits_for_sealing: bool = True,
        opens: bool = True,
    ) -> None:
        self.vfs = vfs
        self.waits_for_sealing = waits_for_sealing
        self.limits = limits or Limits(lease_ms=LEASE_MS)
        self.options = options
        self.router = router
        self.directory = directory
        self.clock = clock or ManualClock()
        if opens:
            self.open()

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        self.scheduler = Turns()
        if self.vfs is None:
            self.engine: EmbeddedEngine = open_in_memory(
                self.limits, self.scheduler, clock=self.clock, router=self.router
            )
        else:
            if isinstance(self.vfs, FaultyVfs):
                InlineSealer.disks[self.directory] = self.vfs
            self.engine = open_on_disk(
                self.directory,
                self.options,
                self.limits,
                self.scheduler,
                clock=self.clock,
                router=self.router,
                vfs=self.vfs,
            )
        self.settle()

    def close(self) -> None:
        self.engine.close()
        self.scheduler.run()

    def restart(self) -> None:
        """A clean stop and a new start."""
        self.close()
        self.open()

    def crash(self, flavour: str = "nothing", seed: int = 0) -> None:
        """The process and what was not synced are gone; a new broker starts on the rest."""
        assert isinstance(self.vfs, FaultyVfs)
        survivor = self.vfs.crash(flavour, seed)
        self.abandon()
        self.vfs = survivor
        self.open()

    def kill(self) -> None:
        """SIGKILL: the process is gone, the page cache stays."""
        assert isinstance(self.vfs, FaultyVfs)
        survivor = self.vfs.restarted()
        self.abandon()
        self.vfs = survivor
        self.open()

    def seal(self) -> None:
        """All that was recorded so far is in a snapshot and in history, and no more in the log."""
        sealing = self.engine.maintenance.sealing
        assert sealing is not None
        if not self.log.files.active.offsets:
            return  # nothing was recorded since the last time
        runs = sealing.runs
        self.log.roll()
        self.scheduler.run_until(lambda: sealing.runs > runs)
        self.settle()

    def seal_and_crash(self) -> None:
        """The next start finds a snapshot and hardly any log."""
        self.seal()
        self.crash()

    def abandon(self) -> None:
        """Ends the threads of a broker that is no longer there; nobody sees what it writes."""
        if isinstance(self.vfs, FaultyVfs):
            self.vfs.release()
        self.log.close()
        self.scheduler.close()

    # -- turns and time -----------------------------------------------------------------------

    def settle(self) -> None:
        """Runs until there is nothing to do and everything appended is on disk (or lost)."""
        self.scheduler.run_until(self.is_settled)

    def is_settled(self) -> bool:
        log = self.log
        if isinstance(log, Wal):
            supply = log.files.supply
            sealing = self.engine.maintenance.sealing
            if supply.preparing or supply._measuring:
                return False
            if self.waits_for_sealing and sealing is not None and sealing.is_running:
                return False
            if log._is_busy and log.failed is None:  # a roll, too, though it has nothing pending
                return False
        return log.failed is not None or not log.has_pending

    def pass_ms(self, ms: int) -> None:
        """Time goes by, stopping wherever a timer is due."""
        while ms > 0:
            timers = self.scheduler._timers
            wait = timers[0][0] - self.scheduler._now_ms if timers else ms
            step = max(1, min(ms, wait))
            self.clock.advance(step)
            self.scheduler.advance(step)
            self.settle()
            ms -= step

    def submit(self, command: Callable[..., None], *arguments: Any) -> list[Any]:
        """Gives the command; its outcome will be in the list once there is one."""
        outcomes: list[Any] = []
        command(*arguments, outcomes.append)
        return outcomes

    def call(self, command: Callable[..., None], *arguments: Any) -> Any:
        outcomes = self.submit(command, *arguments)
        self.settle()
        assert len(outcomes) == 1, f"{command} was answered {len(outcomes)} times"
        return outcomes[0]

    def must(self, command: Callable[..., None], *arguments: Any) -> Any:
        """The outcome; an error is raised."""
        outcome = self.call(command, *arguments)
        if isinstance(outcome, PenstockError):
            raise outcome
        return outcome

    # -- commands -----------------------------------------------------------------------------

    def topic(self, name: str = "t", partitions: int = 1) -> str:
        self.must(self.engine.create_topic, name, partitions)
        return name

    @staticmethod
    def command(topic: str, value: str, key: str = "", envelope: Envelope | None = None) -> Produce:
        return Produce(topic, key, value, envelope)

    def produce(
        self, topic: str, value: str, key: str = "", envelope: Envelope | None = None
    ) -> Message:
        message = self.must(self.engine.produce, Produce(topic, key, value, envelope))
        assert isinstance(message, Message), "a duplicate"
        return message

    def put(self, topic: str, *values: str) -> list[int]:
        """Offsets of these values."""
        return [self.produce(topic, value).offset for value in values]

    def try_produce(
        self, topic: str, value: str, key: str = "", envelope: Envelope | None = None
    ) -> Message | PenstockError | None:
        outcome: Message | PenstockError | None = self.call(
            self.engine.produce, Produce(topic, key, value, envelope)
        )
        return outcome

    def consume(
        self,
        topic: str = "t",
        group: str = "g",
        owner: str = "o",
        *,
        lease_ms: int = 0,
        prefetch: int = 0,
        reader: Reader | None = None,
    ) -> Reader:
        """An open consumer, with all that it is given at once."""
        reader = reader or Reader(topic, group, owner)
        reader.consumer = self.must(
            self.engine.open_consumer, topic, group, owner, lease_ms, prefetch, reader
        )
        self.settle()
        return reader

    def ack(self, reader: Reader, item: Item | int, **changes: Any) -> PenstockError | None:
        outcome: PenstockError | None = self.call(
            self.engine.ack, self.naming(reader, item, **changes)
        )
        return outcome

    def nack(
        self,
        reader: Reader,
        item: Item | int,
        reason: str = "because",
        *,
        delay_ms: int | None = None,
        dead: bool = False,
        **changes: Any,
    ) -> PenstockError | None:
        nack = partial(self.engine.nack, delay_ms=delay_ms, dead=dead)
        outcome: PenstockError | None = self.call(
            nack, self.naming(reader, item, **changes), reason
        )
        return outcome

    def release(self, reader: Reader, item: Item | int, **changes: Any) -> PenstockError | None:
        outcome: PenstockError | None = self.call(
            self.engine.release, self.naming(reader, item, **changes)
        )
        return outcome

    def extend(
        self, reader: Reader, item: Item | int, lease_ms: int, **changes: Any
    ) -> PenstockError | None:
        outcome: PenstockError | None = self.call(
            self.engine.extend, self.naming(reader, item, **changes), lease_ms
        )
        return outcome

    def naming(self, reader: Reader, item: Item | int, **changes: Any) -> Settle:
        """The delivery meant, with `changes` to owner, group, partition, delivery_id."""
        offset = item if isinstance(item, int) else item.offset
        partition = 0 if isinstance(item, int) else item.partition
        named = {"topic": reader.topic, "group": reader.group, "owner": reader.owner} | changes
        return Settle(
            named["topic"],
            named["group"],
            named.get("partition", partition),
            offset,
            named["owner"],
            named.get("delivery_id", ""),
        )

    def begin(
        self,
        key: str,
        *,
        owner: str = "o",
        group: str = "g",
        topic: str = "t",
        lease_ms: int = 1000,
    ) -> BegunEffect | PenstockError | None:
        """None: run it. Why it failed last is not said."""
        command = EffectCommand("", topic, group, key, owner)
        outcome: BegunEffect | PenstockError = self.call(
            self.engine.effects.begin, command, lease_ms
        )
        if isinstance(outcome, BegunEffect) and not outcome.is_committed:
            return None
        return outcome

    def commit(
        self, key: str, result: str = "", *, owner: str = "o", group: str = "g", topic: str = "t"
    ) -> PenstockError | None:
        command = EffectCommand("", topic, group, key, owner)
        outcome: PenstockError | None = self.call(self.engine.effects.commit, command, result)
        return outcome

    def give_unwritten(self, reader: Reader, *values: str, topic: str = "t") -> None:
        """Produces what is decided for this reader, the only one, and is not durable yet."""
        for value in values:
            self.submit(self.engine.produce, self.command(topic, value))
        self.scheduler._turns.popleft()()
        assert len(reader.live.unwritten) == len(values)

    # -- looking inside -----------------------------------------------------------------------

    @property
    def state(self) -> BrokerState:
        return self.engine.parts.state

    @property
    def log(self) -> Any:
        """A Wal or a MemoryLog, with its inside."""
        return self.engine.parts.log

    @property
    def disk(self) -> FaultyVfs:
        assert isinstance(self.vfs, FaultyVfs)
        return self.vfs

    def hold_writes(self) -> None:
        """From now on the log's syncs do not end, until `disk.release()`."""
        self.disk.hold(self.log.files.active.path, lambda: self.scheduler.post(_nothing))

    def in_flight(self, topic: str = "t", group: str = "g", partition: int = 0) -> int:
        return self.state.topics[topic].groups[group].progress[partition].in_flight

    def stored(self, topic: str, partition: int = 0, first_offset: int = 0) -> list[Message]:
        """Every retained message of a partition, read the way a group reads it."""
        parts = self.engine.parts
        held = self.state.topics[topic].partitions[partition]
        log = parts.window.log(self.state.topics[topic].id, partition)
        found: list[Any] = []
        cursor = max(first_offset, held.first_offset)
        while cursor < held.end_offset:
            page = parts.pages.page(log, cursor)
            if page is None:
                parts.pages.load(log, cursor, _nothing)
                self.settle()
                page = parts.pages.page(log, cursor)
            new = [message for message in page or [] if message.offset >= cursor]
            assert new, f"nothing to read at {cursor} of {held.end_offset}"
            found += new
            cursor = new[-1].offset + 1
        return found


def _nothing() -> None:
    """Somebody was told."""


def policy(
    max_attempts: int = 0, backoff_ms: int = 0, max_backoff_ms: int = 0, **fields: Any
) -> Envelope:
    """An envelope with a retry policy."""
    return Envelope(retry_policy=RetryPolicy(max_attempts, backoff_ms, max_backoff_ms), **fields)


def values(items: Sequence[Item | Message]) -> list[str]:
    return [item.value for item in items]


def on_disk(**options: Any) -> Broker:
    return Broker(FaultyVfs(), **options)


def segment_paths(vfs: FaultyVfs) -> list[str]:
    return [path for path in vfs.paths() if os.path.basename(path).startswith("wal-")]
