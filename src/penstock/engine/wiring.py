"""Builds the parts of an embedded engine, each with those that it needs."""

from __future__ import annotations

from penstock.engine.caches import Caches
from penstock.engine.clock import Clock
from penstock.engine.dead_letters import DeadLetters
from penstock.engine.disk_lookups import DiskLookups
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.journal import JournalCommands, SealedJournal
from penstock.engine.leases import Leases
from penstock.engine.ledger import Ledger, Then
from penstock.engine.pages import Pages
from penstock.engine.producing import Producing
from penstock.engine.progress import ProgressCommands
from penstock.engine.ranges import Ranges
from penstock.engine.registry import RegistryCommands
from penstock.engine.retention import Retention
from penstock.engine.scheduler import Scheduler
from penstock.engine.sealing import Sealing
from penstock.engine.staging import PieceStaging
from penstock.engine.streams import Streams
from penstock.engine.window import Window
from penstock.engine.writes import Writes
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.log import Log, Storage


class Parts:
    """`sealed` and `sealing` are None where nothing is ever sealed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        window: Window,
        log: Log,
        storage: Storage,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        """`checkpoint` has the state, with the records of the log applied."""
        state = self.state = checkpoint.state
        self.log = log
        self.window = window
        self.clock = clock
        self.scheduler = scheduler
        self.capabilities = storage.capabilities
        sealed = self.sealed = storage.sealed
        history = sealed.history if sealed is not None else None
        ledger = self.ledger = Ledger(state, log, window, clock, scheduler)
        self.pages = Pages(window, log, history, scheduler)
        self.leases = Leases()
        self.dispatcher = Dispatcher(state, window, self.pages, ledger, self.leases)
        self.dead_letters = DeadLetters(state, window, self.pages, ledger, self.dispatcher)
        self.retention = Retention(state, window, history, ledger)
        self.producing = Producing(
            state, ledger, self.dispatcher, self.retention, is_in_memory=sealed is None
        )
        lookups = DiskLookups(ledger, scheduler)
        self.ranges = Ranges(state, window, log, history, ledger, scheduler, lookups)
        self.progress = ProgressCommands(
            state, window, log, history, ledger, self.dispatcher, lookups
        )
        index = SealedJournal(checkpoint.journal)
        self.sealing: Sealing | None = None
        if sealed is not None:
            self.sealing = Sealing(
                state.limits, log, window, index, clock, scheduler, sealed, checkpoint.files
            )
        self.journal = JournalCommands(
            log,
            sealed.journal if sealed is not None else None,
            index,
            self.sealing.requests.catch_up if self.sealing is not None else _at_once,
            state,
            ledger,
            scheduler,
            lookups,
        )
        self.caches = Caches(state, ledger)
        self.streams = Streams(state, ledger, self.caches, scheduler)
        self.registry = RegistryCommands(
            state, ledger, [self.caches.registry_changed, self.streams.registry_changed]
        )
        self.writes = self._writes(storage)

    def _writes(self, storage: Storage) -> Writes:
        limits = self.state.limits
        limit = limits.max_staged_bytes
        if storage.sealed is None:
            limit = min(limit, limits.memory_bytes)
        return Writes(
            self.state,
            self.ledger,
            self.scheduler,
            PieceStaging(self.state, self.ledger, self.scheduler, storage.staged, limit),
            storage.staged,
            self.caches,
            self.dispatcher,
            self.retention.check_memory,
        )


def _at_once(then: Then) -> None:
    then(None)
