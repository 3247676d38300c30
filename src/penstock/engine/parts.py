"""The parts of an embedded engine, put together; who knows whom is decided here."""

from __future__ import annotations

from penstock.core.state import BrokerState
from penstock.engine.burial import Burials
from penstock.engine.caches import Caches
from penstock.engine.clock import Clock
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.drain import Drain
from penstock.engine.journal import Journal
from penstock.engine.leases import Leases
from penstock.engine.ledger import Ledger
from penstock.engine.lookups import Lookups
from penstock.engine.pages import Pages
from penstock.engine.progress import GroupProgress
from penstock.engine.ranges import Ranges
from penstock.engine.registrar import Registrar
from penstock.engine.scheduler import Scheduler
from penstock.engine.staging import Staging
from penstock.engine.streams import Streams
from penstock.engine.window import Window
from penstock.engine.writes import Writes
from penstock.storage.history_reader import HistoryReader
from penstock.storage.journal_files import JournalIndex, JournalReader
from penstock.storage.log import Log
from penstock.storage.staging import PieceStore, StagedInMemory, StagedPieceFiles
from penstock.storage.vfs import Vfs


class DataDirectory:
    """The disk behind a durable engine. `files` are the history files it was opened with, and
    `journal_index` those of the journal."""

    def __init__(
        self,
        vfs: Vfs,
        path: str,
        files: list[int],
        journal_index: JournalIndex,
        reserve_bytes: int = 0,
    ) -> None:
        self.vfs = vfs
        self.path = path
        self.files = files
        self.history = HistoryReader(vfs, path)
        self.journal = JournalReader(vfs, path)
        self.journal_index = journal_index
        self.staged = StagedPieceFiles(vfs, path, reserve_bytes)


class Parts:
    """`disk` is None in memory."""

    def __init__(
        self,
        state: BrokerState,
        log: Log,
        window: Window,
        clock: Clock,
        scheduler: Scheduler,
        disk: DataDirectory | None = None,
    ) -> None:
        self.state = state
        self.log = log
        self.window = window
        self.clock = clock
        self.scheduler = scheduler
        self.disk = disk
        self.pages = Pages(window, log, disk.history if disk else None, scheduler)
        self.ledger = Ledger(state, log, window, clock, scheduler)
        self.leases = Leases()
        self.dispatcher = Dispatcher(state, window, self.pages, self.ledger, self.leases)
        self.burials = Burials(state, window, self.pages, self.ledger)
        self.burials.on_buried = self.dispatcher.buried
        history = disk.history if disk else None
        lookups = Lookups(self.ledger, scheduler)
        self.ranges = Ranges(state, window, log, history, self.ledger, scheduler, lookups)
        self.journal = Journal(
            log,
            disk.journal if disk else None,
            disk.journal_index if disk else JournalIndex(),
            state,
            self.ledger,
            scheduler,
            lookups,
        )
        self.progress = GroupProgress(
            state, window, log, history, self.ledger, self.dispatcher, lookups
        )
        self.registry = Registrar(state, self.ledger)
        self.caches = Caches(state, self.ledger, self.registry)
        self.streams = Streams(state, self.ledger, self.registry, self.caches, scheduler)
        self.writes = self._writes()

    def _writes(self) -> Writes:
        state, ledger, scheduler = self.state, self.ledger, self.scheduler
        limit = state.limits.max_staged_bytes
        shelf: PieceStore
        if self.disk is None:
            shelf, limit = StagedInMemory(), min(limit, state.limits.memory_bytes)
        else:
            shelf = self.disk.staged
        staging = Staging(state, ledger, scheduler, shelf, limit)
        drain = Drain(state, ledger, scheduler, shelf, self.caches, self.dispatcher)
        return Writes(state, ledger, scheduler, staging, drain)
