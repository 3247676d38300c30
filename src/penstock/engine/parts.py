"""The parts of an embedded engine, put together; who knows whom is decided here."""

from __future__ import annotations

from penstock.core.state import BrokerState
from penstock.engine.burial import Burials
from penstock.engine.caches import Caches
from penstock.engine.clock import Clock
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.pages import Pages
from penstock.engine.ranges import Ranges
from penstock.engine.registrar import Registrar
from penstock.engine.scheduler import Scheduler
from penstock.engine.streams import Streams
from penstock.engine.window import Window
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log
from penstock.storage.vfs import Vfs


class DataDirectory:
    """The disk behind a durable engine. `files` are the history files it was opened with."""

    def __init__(self, vfs: Vfs, path: str, files: list[int]) -> None:
        self.vfs = vfs
        self.path = path
        self.files = files
        self.history = HistoryReader(vfs, path)


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
        self.dispatcher = Dispatcher(state, window, self.pages, self.ledger)
        self.burials = Burials(state, window, self.pages, self.ledger)
        self.burials.on_buried = self.dispatcher.buried
        self.ranges = Ranges(
            state, window, log, disk.history if disk else None, self.ledger, scheduler
        )
        self.registry = Registrar(state, self.ledger)
        self.caches = Caches(state, self.ledger, self.registry)
        self.streams = Streams(state, self.ledger, self.registry, self.caches, scheduler)
