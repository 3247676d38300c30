"""Builds the parts of an embedded engine, each with those that it needs."""

from __future__ import annotations

from penstock.api.messages import Router
from penstock.core.scope_counts import ScopeCounts
from penstock.engine.access import AccessCommands
from penstock.engine.audit import AuditTrail
from penstock.engine.cache_snapshots import CacheSnapshots
from penstock.engine.caches import Caches
from penstock.engine.clock import Clock
from penstock.engine.dead_letters import DeadLetters
from penstock.engine.disk_lookups import DiskLookups
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.effects import EffectCommands
from penstock.engine.event_reading import EventReading
from penstock.engine.journal import JournalCommands, SealedJournal
from penstock.engine.leases import Leases
from penstock.engine.ledger import Ledger, Then
from penstock.engine.named_subscriptions import NamedSubscriptions
from penstock.engine.pages import Pages
from penstock.engine.producing import Producing
from penstock.engine.progress import ProgressCommands
from penstock.engine.quotas import Quotas
from penstock.engine.ranges import Ranges
from penstock.engine.registry import Listener, RegistryCommands
from penstock.engine.retention import Retention
from penstock.engine.routing import PendingRoutes
from penstock.engine.scheduler import Scheduler
from penstock.engine.sealing import Sealing
from penstock.engine.staging import PieceStaging
from penstock.engine.streams import Streams
from penstock.engine.tokens import TokenCommands
from penstock.engine.topic_removal import TopicRemoval
from penstock.engine.transactions import TransactionCommands
from penstock.engine.window import Window
from penstock.engine.write_quotas import WriteQuotas
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
        sealing: Sealing | None = None,
        *,
        router: Router | None = None,
    ) -> None:
        """`checkpoint` has the state, with the records of the log applied. `sealing` goes on if it
        has begun already."""
        state = self.state = checkpoint.state
        self.log = log
        self.window = window
        self.clock = clock
        self.scheduler = scheduler
        self.capabilities = storage.capabilities
        sealed = self.sealed = storage.sealed
        history = sealed.history if sealed is not None else None
        ledger = self.ledger = Ledger(state, log, window, clock, scheduler)
        self.routing = None if router is None else PendingRoutes(state, router, ledger.now_ms)
        self.pages = Pages(window, log, history, scheduler)
        self.leases = Leases()
        opened = ScopeCounts()
        self.quotas = Quotas(state, ledger, opened)
        self.dispatcher = Dispatcher(state, self.pages, ledger, self.leases, opened)
        self.dead_letters = DeadLetters(state, window, self.pages, ledger, self.dispatcher)
        self.retention = Retention(state, window, history, ledger, self.quotas)
        self.producing = Producing(
            state,
            ledger,
            self.dispatcher,
            self.retention,
            self.quotas,
            is_in_memory=sealed is None,
        )
        lookups = DiskLookups(ledger, scheduler)
        self.ranges = Ranges(state, window, log, history, ledger, scheduler, lookups)
        self.progress = ProgressCommands(
            state, window, log, history, ledger, self.dispatcher, lookups, self.quotas
        )
        if sealed is not None and sealing is None:
            sealing = Sealing(checkpoint, window, log, sealed, clock, scheduler)
        self.sealing = sealing
        self.journal = self._journal(checkpoint, lookups)
        self.effects = EffectCommands(state, ledger)
        snapshots = CacheSnapshots(state, ledger, scheduler)
        self.caches = Caches(state, ledger, self.quotas, opened, snapshots)
        reading = EventReading(state.topics_by_id, window, log, history)
        self.streams = self._streams(reading, opened)
        self.topic_removal = self._topic_removal()
        self.audit = AuditTrail(state, ledger, window, is_in_memory=sealed is None)
        self.access = AccessCommands(state, ledger, self.audit)
        self.tokens = TokenCommands(state, ledger, self.audit)
        self.writes = self._writes(storage)
        self.registry = self._registry()
        self.transactions = self._transactions()

    def start(self) -> None:
        """Builds what is volatile from the state. Called once, when the ledger has started."""
        self.quotas.start()
        self.caches.start()
        self.writes.start()

    def _journal(self, checkpoint: Checkpoint, lookups: DiskLookups) -> JournalCommands:
        sealed, sealing = self.sealed, self.sealing
        return JournalCommands(
            self.log,
            sealed.journal if sealed is not None else None,
            sealing.journal if sealing is not None else SealedJournal(checkpoint.journal),
            sealing.requests.catch_up if sealing is not None else _at_once,
            self.state,
            self.ledger,
            self.scheduler,
            lookups,
        )

    def _registry(self) -> RegistryCommands:
        listeners: list[Listener] = [
            self.caches.registry_changed,
            self.streams.registry_changed,
            self.quotas.registry_changed,
            self.access.registry_changed,
            self.tokens.registry_changed,
            self.writes.registry_changed,
        ]
        return RegistryCommands(
            self.state,
            self.ledger,
            listeners,
            self.topic_removal,
            self.audit,
            self.window,
            self.quotas,
            self.capabilities,
        )

    def _transactions(self) -> TransactionCommands:
        return TransactionCommands(
            self.state,
            self.ledger,
            self.dispatcher,
            self.dead_letters,
            self.producing,
            self.caches,
            self.retention.check_memory,
            self.quotas,
            self.streams,
            self.routing,
        )

    def _topic_removal(self) -> TopicRemoval:
        return TopicRemoval(
            self.state,
            self.ledger,
            self.window,
            self.leases,
            self.dispatcher,
            self.dead_letters,
            self.producing,
            self.quotas,
            self.sealing,
        )

    def _streams(self, reading: EventReading, opened: ScopeCounts) -> Streams:
        state, ledger, ranges = self.state, self.ledger, self.ranges
        named = NamedSubscriptions(
            state, ledger, self.dispatcher, self.progress, ranges, self.quotas
        )
        return Streams(
            state,
            ledger,
            self.caches,
            self.scheduler,
            self.quotas,
            opened,
            self.producing.mark,
            reading,
            ranges,
            named,
        )

    def _writes(self, storage: Storage) -> Writes:
        limits = self.state.limits
        limit = limits.max_staged_bytes
        if storage.sealed is None:
            limit = min(limit, limits.memory_bytes)
        quotas = WriteQuotas(self.state, self.quotas)
        return Writes(
            self.state,
            self.ledger,
            self.scheduler,
            PieceStaging(self.state, self.ledger, self.scheduler, storage.staged, quotas, limit),
            storage.staged,
            self.caches,
            self.dispatcher,
            self.streams,
            quotas,
            self.retention.check_memory,
        )


def _at_once(then: Then) -> None:
    then(None)
