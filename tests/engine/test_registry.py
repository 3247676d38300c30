"""The registry in the engine: durable as everything else, followed step by step, made to hold what
another one holds."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.core.tenancy import Registry, decide_reconcile
from penstock.engine.clock import ManualClock
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotYet,
    OutOfRange,
    PenstockError,
    Unavailable,
    VersionMismatch,
)
from penstock.model.limits import KIB, MAX_REGISTRY_CHANGES
from penstock.model.records import RegistryChanged
from penstock.model.tenancy import CacheConfig, Change, Entry, Kind, Path, Snapshot, StreamConfig
from penstock.storage.errors import StorageError
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, on_disk
from tests.engine.test_frames import frames
from tests.storage.faulty_vfs import FaultyVfs

SHORT_WRITE = 0
OPTIONS = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)


def tenant(tenant_id: str = "acme", **more: Any) -> Entry:
    return Entry(kind="tenant", tenant_id=tenant_id, **more)


def namespace(name: str = "prod", tenant_id: str = "acme", **more: Any) -> Entry:
    return Entry(kind="namespace", tenant_id=tenant_id, namespace=name, **more)


def stream(name: str = "orders", config: StreamConfig | None = None, **more: Any) -> Entry:
    return Entry(
        kind="stream", tenant_id="acme", namespace="prod", name=name,
        stream=config or StreamConfig(), **more,
    )  # fmt: skip


def cache(name: str = "sessions", config: CacheConfig | None = None, **more: Any) -> Entry:
    return Entry(
        kind="cache", tenant_id="acme", namespace="prod", name=name,
        cache=config or CacheConfig(), **more,
    )  # fmt: skip


def create(broker: Broker, *wanted: Entry) -> None:
    for entry in wanted:
        broker.must(broker.engine.registry.create, entry)


def create_all(broker: Broker) -> None:
    create(broker, tenant(), namespace(), stream(), cache())


def delete(broker: Broker, kind: Kind, path: Path, *, cascade: bool = False) -> Any:
    return broker.call(broker.engine.registry.delete, kind, path, cascade)


def change(broker: Broker, path: Path, **settings: Any) -> Any:
    outcomes: list[Any] = []
    broker.engine.registry.change(path, outcomes.append, **settings)
    broker.settle()
    return outcomes[0]


def snapshot(broker: Broker) -> Snapshot:
    found: Snapshot = broker.must(broker.engine.registry.snapshot)
    return found


def paths(broker: Broker) -> list[tuple[str, Path]]:
    return [(entry.kind, entry.path) for entry in snapshot(broker).entries]


def what(entries: list[Entry]) -> list[tuple[Any, ...]]:
    """Of entries what two registries may have in common."""
    return sorted((e.kind, e.path, e.stream, e.cache, e.created_ms) for e in entries)


# -- what there is -------------------------------------------------------------------------------


def test_creating_an_entry_that_exists_changes_nothing():
    broker = Broker()
    create_all(broker)
    before = broker.must(broker.engine.registry.position)
    _, is_new = broker.must(broker.engine.registry.create, stream())
    assert not is_new
    assert broker.must(broker.engine.registry.position) == before
    other = stream(config=StreamConfig(event_queue_depth=5))
    assert isinstance(broker.call(broker.engine.registry.create, other), AlreadyExists)


def test_what_is_in_use_is_deleted_only_with_all_that_is_in_it():
    broker = Broker()
    create_all(broker)
    create(broker, namespace("test"), tenant("other"), namespace(tenant_id="other"))
    path = ("acme", "prod", "")
    assert isinstance(delete(broker, "namespace", path), FailedPrecondition)
    assert isinstance(delete(broker, "tenant", ("acme", "", "")), FailedPrecondition)
    assert delete(broker, "tenant", ("acme", "", ""), cascade=True) is None
    left = [path for _, path in paths(broker) if path[0] != "default"]
    assert left == [("other", "", ""), ("other", "prod", "")]


def test_a_cascade_tells_of_children_before_their_parents():
    broker = Broker()
    create_all(broker)
    told: list[tuple[str, bool]] = []
    broker.engine.registry.listeners.append(lambda entry, gone: told.append((entry.kind, gone)))
    delete(broker, "tenant", ("acme", "", ""), cascade=True)
    assert {kind for kind, _ in told[:2]} == {"stream", "cache"}
    assert told[2:] == [("namespace", True), ("tenant", True)]


def test_a_change_that_looked_at_an_older_state_is_refused():
    """Two that change different settings at once must both count."""
    broker = Broker()
    create_all(broker)
    path = ("acme", "prod", "orders")
    seen = broker.must(broker.engine.registry.get, "stream", path)
    change(broker, path, stream=StreamConfig(event_queue_depth=5), if_revision=seen.revision)
    late = change(broker, path, stream=StreamConfig(pub_queue_depth=6), if_revision=seen.revision)
    assert isinstance(late, VersionMismatch)
    now = broker.must(broker.engine.registry.get, "stream", path)
    assert now.stream == StreamConfig(event_queue_depth=5)
    assert now.revision > seen.revision


# -- durability ----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["restart", "kill", "crash", "seal_and_crash"])
def test_the_registry_outlives_the_broker(end: str):
    """felix-105: it is in the log, and in a snapshot of it."""
    broker = on_disk()
    create_all(broker)
    change(broker, ("acme", "prod", "orders"), stream=StreamConfig(event_queue_depth=7))
    delete(broker, "stream", ("default", "default", "default"))
    before = snapshot(broker)
    getattr(broker, end)()
    assert snapshot(broker) == before
    broker.close()


def test_a_broker_that_deleted_its_defaults_does_not_get_them_back():
    broker = on_disk()
    delete(broker, "tenant", ("default", "", ""), cascade=True)
    broker.seal_and_crash()
    assert paths(broker) == []
    broker.restart()
    assert paths(broker) == []
    broker.close()


def test_a_cascade_and_a_reconcile_are_whole_or_not_at_all():
    """All their records are in one frame of the log, which a crash keeps whole or not at all."""
    broker = on_disk()
    create_all(broker)
    delete(broker, "tenant", ("acme", "", ""), cascade=True)
    broker.must(broker.engine.registry.reconcile, [])
    sizes = [len(frame) for frame in frames(broker) if isinstance(frame[-1], RegistryChanged)]
    assert sizes == [1, 1, 1, 1, 4, 4]
    broker.close()


def test_nothing_is_seen_before_it_is_durable():
    broker = on_disk()
    create(broker, tenant())
    broker.hold_writes()
    created = broker.submit(broker.engine.registry.create, namespace())
    looked = broker.submit(broker.engine.registry.get, "namespace", ("acme", "prod", ""))
    followed = broker.submit(broker.engine.registry.changes, 0, None)
    broker.scheduler.run()
    assert (created, looked, followed) == ([], [], [])
    broker.disk.release()
    broker.settle()
    assert (len(created), len(looked), len(followed)) == (1, 1, 1)
    broker.close()


class Life:
    """Registry commands on a disk of which one call fails, and what was answered."""

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.clock = ManualClock()
        self.answered: dict[tuple[Kind, Path], Entry] = {}
        self.open_question: set[tuple[Kind, Path]] = set()
        self.broker: Broker | None = None

    def live(self) -> None:
        try:
            self.broker = Broker(self.vfs, options=OPTIONS, clock=self.clock)
            for number in range(3):
                self.round(number)
                self.broker.log.roll()
                self.broker.settle()
            self.broker.close()
            self.broker = None
            self.broker = Broker(self.vfs, options=OPTIONS, clock=self.clock)
            self.round(3)
        except (OSError, StorageError, PenstockError, TimeoutError):
            pass

    def round(self, number: int) -> None:
        name = f"tenant-{number}"
        self.create(tenant(name))
        self.create(namespace("one", name))
        self.create(namespace("two", name))
        self.delete(namespace("one", name))
        self.create(namespace("one", name))

    def create(self, wanted: Entry) -> None:
        assert self.broker is not None
        key = (wanted.kind, wanted.path)
        self.open_question.add(key)
        entry, _ = self.broker.must(self.broker.engine.registry.create, wanted)
        self.answered[key] = entry
        self.open_question.discard(key)

    def delete(self, wanted: Entry) -> None:
        assert self.broker is not None
        key = (wanted.kind, wanted.path)
        self.open_question.add(key)
        self.broker.must(self.broker.engine.registry.delete, wanted.kind, wanted.path, False)
        del self.answered[key]
        self.open_question.discard(key)

    def check(self) -> None:
        survivor = self.vfs.crash("nothing")
        if self.broker is not None:
            self.broker.abandon()
        broker = Broker(survivor, options=OPTIONS, clock=self.clock)
        found = {(e.kind, e.path): e for e in snapshot(broker).entries if e.tenant_id != "default"}
        for key in {*found, *self.answered} - self.open_question:
            assert found.get(key) == self.answered.get(key), key
        broker.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, SHORT_WRITE])
def test_a_call_of_the_disk_that_fails_loses_nothing_that_was_answered(code: int):
    """Every call in turn, writes and syncs included; then the power goes."""
    whole = Life()
    whole.live()
    assert len(whole.answered) == 12
    calls = len(whole.vfs.calls)
    whole.check()
    hit = 0
    for number in range(1, calls + 1):
        life = Life()
        life.vfs.fail_call(number, code)
        life.live()
        hit += life.vfs.faults_hit
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"with call {number} failing: {error}") from error
    assert hit > 40


def test_a_failed_sync_refuses_what_was_asked_and_all_that_follows():
    broker = on_disk()
    create(broker, tenant())
    broker.disk.fail_call(1, errno.EIO, only=["write", "sync"], path=broker.log.files.active.path)
    assert isinstance(broker.call(broker.engine.registry.create, namespace()), Unavailable)
    assert isinstance(broker.call(broker.engine.registry.tenants), Unavailable)


# -- the feed of changes -------------------------------------------------------------------------


def test_the_changes_since_a_revision_are_all_steps_after_it_in_order():
    """felix-107"""
    broker = Broker()
    create_all(broker)
    epoch, start = broker.must(broker.engine.registry.position)
    change(broker, ("acme", "prod", "orders"), stream=StreamConfig(event_queue_depth=7))
    delete(broker, "namespace", ("acme", "prod", ""), cascade=True)
    news = broker.must(broker.engine.registry.changes, start, epoch)
    assert [each.entry.revision for each in news.changes] == list(range(start + 1, start + 5))
    assert news.revision == start + 4
    assert [each.deleted for each in news.changes] == [False, True, True, True]
    assert broker.must(broker.engine.registry.changes, start + 4, epoch).changes == []


def test_a_cursor_of_the_future_or_of_another_registry_is_out_of_range():
    broker = Broker()
    create_all(broker)
    epoch, revision = broker.must(broker.engine.registry.position)
    assert isinstance(broker.call(broker.engine.registry.changes, revision + 1, epoch), NotYet)
    other = broker.call(broker.engine.registry.changes, revision, epoch + 1)
    assert type(other) is OutOfRange


def test_a_cursor_older_than_what_is_kept_is_out_of_range():
    registry = Broker().state.registry
    for number in range(MAX_REGISTRY_CHANGES + 1):
        revision = registry.revision + 1
        entry = tenant(f"t{number}", id=revision, revision=revision)
        registry.apply(RegistryChanged(1, entry))
    broker = Broker()
    broker.engine.registry._registry = registry
    first = registry.revision - MAX_REGISTRY_CHANGES
    kept = broker.must(broker.engine.registry.changes, first, None)
    assert len(kept.changes) == MAX_REGISTRY_CHANGES
    assert isinstance(broker.call(broker.engine.registry.changes, first - 1, None), OutOfRange)


def test_after_a_start_the_changes_before_its_snapshot_are_no_longer_known():
    """Who follows takes a snapshot then; it must not be told of nothing."""
    broker = on_disk()
    create_all(broker)
    epoch, revision = broker.must(broker.engine.registry.position)
    broker.seal_and_crash()
    assert isinstance(broker.call(broker.engine.registry.changes, revision - 1, epoch), OutOfRange)
    assert broker.must(broker.engine.registry.changes, revision, epoch).changes == []
    broker.close()


# -- holding what another registry holds ---------------------------------------------------------


def test_a_registry_is_made_to_hold_what_another_one_holds():
    """felix-107: creations, changes and deletions."""
    plane, follower = Broker(), on_disk()
    create_all(plane)
    delete(plane, "cache", ("default", "default", "default"))
    wanted = snapshot(plane).entries
    # Its own `default` stream and cache go, though the other has such a stream too.
    assert follower.must(follower.engine.registry.reconcile, wanted) == 7
    assert what(snapshot(follower).entries) == what(wanted)
    change(plane, ("acme", "prod", "sessions"), cache=CacheConfig(max_entries=5))
    delete(plane, "stream", ("acme", "prod", "orders"))
    wanted = snapshot(plane).entries
    assert follower.must(follower.engine.registry.reconcile, wanted) == 2
    assert what(snapshot(follower).entries) == what(wanted)
    before = snapshot(follower)
    assert follower.must(follower.engine.registry.reconcile, wanted) == 0
    follower.crash()
    assert snapshot(follower) == before
    follower.close()


def test_what_was_deleted_and_made_anew_begins_empty_here_too():
    """felix-67: a tenant of the same name is another tenant, even if nobody saw it go."""
    plane, follower = Broker(clock=ManualClock()), Broker()
    create_all(plane)
    follower.must(follower.engine.registry.reconcile, snapshot(plane).entries)
    told: list[tuple[str, bool]] = []
    follower.engine.registry.listeners.append(lambda entry, gone: told.append((entry.kind, gone)))
    delete(plane, "cache", ("acme", "prod", "sessions"))
    plane.clock.advance(5)
    create(plane, cache())
    follower.must(follower.engine.registry.reconcile, snapshot(plane).entries)
    assert told == [("cache", True), ("cache", False)]
    assert what(snapshot(follower).entries) == what(snapshot(plane).entries)


def test_a_cache_that_became_durable_elsewhere_is_made_anew():
    plane, follower = Broker(), Broker()
    create_all(plane)
    follower.must(follower.engine.registry.reconcile, snapshot(plane).entries)
    wanted = [
        cache(config=CacheConfig(durable=True), created_ms=entry.created_ms)
        if entry.path == ("acme", "prod", "sessions")
        else entry
        for entry in snapshot(plane).entries
    ]
    assert follower.must(follower.engine.registry.reconcile, wanted) == 2
    assert what(snapshot(follower).entries) == what(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        [stream()],
        [tenant(), stream()],
        [tenant(), namespace(), stream(config=StreamConfig(delivery="exactly_once"))],
        [tenant(namespace="n")],
        [tenant(), Entry(kind="namespace", tenant_id="acme")],
        [tenant(), namespace(), Entry(kind="stream", tenant_id="acme", namespace="prod", name="s")],
        [tenant(stream=StreamConfig())],
    ],
)
def test_what_cannot_be_a_registry_is_refused_whole(wanted: list[Entry]):
    broker = Broker()
    before = snapshot(broker)
    assert isinstance(broker.call(broker.engine.registry.reconcile, wanted), InvalidArgument)
    assert snapshot(broker) == before


def test_every_step_of_a_reconcile_leaves_no_child_without_its_parent():
    old, new = Registry(), Registry()
    for number, entry in enumerate((tenant(), namespace(), stream(), cache()), start=5):
        old.apply(RegistryChanged(1, _numbered(entry, number)))
    steps = decide_reconcile(old, new.entries(), 9)
    seen: set[tuple[str, Path]] = {(e.kind, e.path) for e in old.entries()}
    for step in (Change(entry=step.entry, deleted=step.deleted) for step in steps):
        old.apply(RegistryChanged(9, step.entry, step.deleted))
        seen.discard((step.entry.kind, step.entry.path))
        for _, (tenant_id, space, name) in seen:
            assert not space or ("tenant", (tenant_id, "", "")) in seen
            assert not name or ("namespace", (tenant_id, space, "")) in seen


def _numbered(entry: Entry, revision: int) -> Entry:
    return Entry(
        kind=entry.kind, tenant_id=entry.tenant_id, namespace=entry.namespace, name=entry.name,
        stream=entry.stream, cache=entry.cache, id=revision, revision=revision, created_ms=1,
    )  # fmt: skip
