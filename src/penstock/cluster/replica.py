"""One shard on one broker: a standby that may become the owner, and a standby again.

Invariant: an engine serves only on a log whose newest fence is this broker's, and whose state has
every message before it. When another broker's message takes the place of ours, the engine ends and
everything is opened again from the local files: memory was ahead of the log. Must not know leases,
nor why the broker is promoted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.api.messages import Router
from penstock.api.outcomes import Done
from penstock.cluster.copying import Copier, CopyProgress, PeerFiles
from penstock.cluster.promotion import Promotion
from penstock.cluster.replica_directory import ReplicaDirectory
from penstock.cluster.replicated_log import Deposed, ReplicatedLog
from penstock.cluster.shared import Bounds, SharedStream
from penstock.cluster.standby import CopyTooOld, Standby
from penstock.cluster.stream_audit import StreamAudit, StreamFindings
from penstock.engine.clock import Clock
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.engine.sealing import Sealing
from penstock.engine.wiring import Parts
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import Limits

REOPEN_MS = (100, 30_000)
"""The first and the longest pause before the local files are opened again after an error."""

FindPeers = Callable[[int], Sequence[PeerFiles]]
"""Returns the brokers to copy from, the best first. The stream begins with this message."""

OpenDirectory = Callable[[Scheduler, Callable[[BaseException], None]], ReplicaDirectory]
"""Makes the storage of one life of the copy, with its scheduler and what to tell of its end."""

logger = logging.getLogger("penstock.cluster")


class ReplicaListener(Protocol):
    """Hears when the engine of this shard begins and ends. Both are called in turns of the loop."""

    def engine_began(self, engine: EmbeddedEngine) -> None: ...

    def engine_ended(self, reason: PenstockError) -> None:
        """The engine was closed. The replica follows the stream again, or will."""
        ...


class Replica:
    """`serving_epoch` is that of the engine, 0 without one. Ownership uses it as its
    `ShardReplica`."""

    def __init__(
        self,
        name: str,
        stream: SharedStream,
        limits: Limits,
        clock: Clock,
        scheduler: Scheduler,
        new_scheduler: Callable[[], Scheduler],
        open_directory: OpenDirectory,
        listener: ReplicaListener,
        router: Router | None = None,
        *,
        copier: Copier | None = None,
        find_peers: FindPeers | None = None,
    ) -> None:
        """`copier` is used when the stream has left the local files behind. `scheduler` lives as
        long as the replica, one of `new_scheduler` as long as the local files are open."""
        self.serving_epoch = 0
        self.engine: EmbeddedEngine | None = None
        self.standby: Standby | None = None
        self.failure: BaseException | None = None
        """Why the last life of the copy ended."""
        self.name = name
        self.stream = stream
        self.scheduler = scheduler
        self._limits = limits
        self.clock = clock
        self._new_scheduler = new_scheduler
        self._open_directory = open_directory
        self._listener = listener
        self._router = router
        self._copier = copier
        self._find_peers = find_peers
        self._sealing: Sealing | None = None
        self._audit: StreamAudit | None = None
        self.findings = StreamFindings()
        self.furthest: Callable[[str], tuple[int, str]] = lambda identity: (0, "")
        """Returns how far any known copy of the stream with this identity goes, and whose it is."""
        self._life = 0
        self._scheduler: Scheduler
        self._directory: ReplicaDirectory
        self._log: ReplicatedLog | None = None
        self._promotion: Promotion | None = None
        self._reopening: Cancellable | None = None
        self._pause_ms = REOPEN_MS[0]
        self._is_closed = False

    def open(self) -> None:
        """Reads the local files and begins to follow the stream. Blocks. Raises StorageError if
        the files are damaged or in use."""
        self._life += 1
        ended = partial(self._ended, self._life)
        scheduler = self._scheduler = self._new_scheduler()
        self._directory = self._open_directory(scheduler, ended)
        self.standby = Standby(
            self._directory, self.stream, self._limits, self.clock, scheduler, ended
        )
        self._log = self.standby.log
        self._sealing = self.standby.sealing
        standby = self.standby
        standby.findings = self.findings
        self._audit = StreamAudit(
            standby.log,
            self.stream,
            scheduler,
            lambda: standby.identity,
            self.findings,
            standby.log.fail,
        )

    # -- what ownership asks ---------------------------------------------------------------------

    def position(self) -> int:
        """The last message that is applied, 0 while nothing is open."""
        return self._log.durable_seq if self._log is not None else 0

    def sealed_seq(self) -> int:
        """The last message that is in synced files here. While files are copied, the last one that
        is in the files at the other broker."""
        progress = self.copy_progress()
        if progress is not None:
            return progress.next_seq - 1
        return 0 if self._sealing is None else max(0, self._sealing.next_seq - 1)

    def seal_soon(self, bounds: Bounds) -> None:
        """Seals what is in the log, although its segment is not full, if most of what fills the
        stream is not sealed here."""
        log, sealing = self._log, self._sealing
        if log is None or sealing is None or sealing.is_running:
            return
        if bounds.last_seq - self.sealed_seq() > (bounds.last_seq - bounds.first_seq) // 2:
            log.roll()

    @property
    def identity(self) -> str:
        """The identity of the stream that the open local files are a copy of."""
        return self._directory.identity if self._log is not None else ""

    def copy_progress(self) -> CopyProgress | None:
        return None if self._copier is None else self._copier.progress

    def epoch(self) -> int:
        """Returns the epoch of the last fence that was read."""
        if self.engine is not None:
            return self.serving_epoch
        return self.standby.chain.epoch if self.standby is not None else 0

    def is_caught_up(self) -> bool:
        """Says whether everything was read that the stream had a moment ago."""
        return self.engine is not None or (self.standby is not None and self.standby.is_caught_up)

    def promote(self, epoch: int, done: Done[None]) -> None:
        """Becomes the owner of the log, as `epoch`: reads the stream to its end, appends a fence
        and serves behind it. Gives Deposed if another owner has a higher epoch."""
        standby = self.standby
        if standby is None or self._promotion is not None or self.engine is not None:
            done(Unavailable("this broker's copy of the shard is not ready"))
            return
        self._promotion = Promotion(self, standby, epoch, done)
        self._promotion.start()

    def drop(self, reason: str) -> None:
        """Ends the engine at once, because another broker owns the log. What waits is refused: it
        may be done, or not."""
        logger.info("this broker no longer owns the shard: %s", reason)
        if self.engine is not None and self._log is not None:
            self._log.depose()
        elif self._promotion is not None:
            self._promotion.end(Deposed())

    def drain(self, done: Callable[[], None]) -> None:
        """Ends streams, and calls `done` when everything that was accepted is answered."""
        engine = self.engine
        if engine is None:
            done()
            return
        engine.end_streams("the broker is stopping")
        self._when_settled(engine, done)

    def _when_settled(self, engine: EmbeddedEngine, done: Callable[[], None]) -> None:
        if self.engine is engine and engine.parts.log.has_pending:
            engine.parts.log.commit()
            self.scheduler.later(1, lambda: self._when_settled(engine, done))
        else:
            done()

    def close(self) -> None:
        self._is_closed = True
        if self._copier is not None:
            self._copier.end()
        if self._reopening is not None:
            self._reopening.cancel()
        self._close_life(Unavailable("the broker is stopping"))

    # -- promotion -------------------------------------------------------------------------------

    def serve(self, standby: Standby, epoch: int) -> None:
        """Makes the engine, behind our fence."""
        standby.hand_over()
        standby.log.own(epoch)
        self.clock.start_at(standby.state.last_ts)
        recovery = standby.recovery
        parts = Parts(
            recovery.checkpoint,
            recovery.window,
            standby.log,
            self._directory,
            self.clock,
            self._scheduler,
            standby.sealing,
            router=self._router,
        )
        self.standby = None
        self.serving_epoch = epoch
        self._promotion = None
        self._pause_ms = REOPEN_MS[0]
        self.engine = EmbeddedEngine(parts)
        self._listener.engine_began(self.engine)

    def find_pieces(self, epoch: int, done: Done[None]) -> None:
        """Finds the staged pieces of the owners before. Called behind our fence."""
        self._directory.staged.take_over(epoch, done)

    def promotion_failed(self) -> None:
        self._promotion = None

    # -- the end of a life -----------------------------------------------------------------------

    def _ended(self, life: int, error: BaseException) -> None:
        """The log cannot be used any more, or the copy does not fit the stream."""
        if self._is_closed or life != self._life or self._log is None:
            return
        self.failure = error
        if not isinstance(error, Deposed):
            logger.error("the copy of the shard is opened again: %s", error)
        self._close_life(error)
        if isinstance(error, CopyTooOld) and self._copier is not None:
            self._copy(self._copier, error.first_seq)
        else:
            self._reopen_later()

    def _copy(self, copier: Copier, first_seq: int) -> None:
        """Copies the files of another broker, then opens them."""
        peers = () if self._find_peers is None else self._find_peers(first_seq)
        scheduler = self._new_scheduler()

        def run() -> None:
            failure: BaseException | None = None
            try:
                copier.run(peers, first_seq)
            except Exception as error:  # noqa: BLE001 - told, and tried again
                failure = error
            scheduler.post(partial(self._copied, scheduler, failure))

        scheduler.in_background(run)

    def _copied(self, scheduler: Scheduler, failure: BaseException | None) -> None:
        scheduler.close()
        if self._is_closed:
            return
        if failure is None:
            self._reopen()
        else:
            self.failure = failure
            logger.error("the shard could not be copied: %s", failure)
            self._reopen_later()

    def _close_life(self, error: BaseException) -> None:
        promotion, self._promotion = self._promotion, None
        engine, self.engine = self.engine, None
        standby, self.standby = self.standby, None
        self._log = None
        self._sealing = None
        audit, self._audit = self._audit, None
        if audit is not None:
            audit.close()
        self.serving_epoch = 0
        self._directory.staged.end()
        if promotion is not None:
            promotion.end(_told(error))
        if engine is not None:
            engine.close()
            self._listener.engine_ended(_told(error))
        if standby is not None:
            standby.close()

    def _reopen_later(self) -> None:
        is_prompt = isinstance(self.failure, Deposed)
        pause_ms = 1 if is_prompt else self._pause_ms
        if not is_prompt:
            self._pause_ms = min(2 * self._pause_ms, REOPEN_MS[1])
        self._reopening = self.scheduler.later(pause_ms, self._reopen)

    def _reopen(self) -> None:
        self._reopening = None
        try:
            self.open()
        except Exception as error:  # noqa: BLE001 - tried again, and told
            self.failure = error
            logger.error("the local files cannot be opened: %s", error)
            self._reopen_later()


def _told(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return Unavailable(f"the broker's copy of the shard cannot go on: {error}")
