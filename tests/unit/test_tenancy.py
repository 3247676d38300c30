"""The registry's rules, and sizes and durations as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core import tenancy
from penstock.core.tenancy import (
    Registry,
    changes_since,
    decide_change,
    decide_create,
    decide_delete,
    decide_reconcile,
    find,
    snapshot_of,
)
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
    ResourceExhausted,
    VersionMismatch,
)
from penstock.model.records import RegistryChanged, decode_record, encode_record
from penstock.model.tenancy import CacheConfig, Entry, StreamConfig
from penstock.model.units import format_duration, parse_duration_ms, parse_size

NOW = 1_700_000_000_000


def tenant(name: str = "t") -> Entry:
    return Entry(kind="tenant", tenant_id=name)


def namespace(name: str = "n", of: str = "t") -> Entry:
    return Entry(kind="namespace", tenant_id=of, namespace=name)


def stream(name: str = "s", of: tuple[str, str] = ("t", "n"), **config: Any) -> Entry:
    return Entry(
        kind="stream",
        tenant_id=of[0],
        namespace=of[1],
        name=name,
        stream=StreamConfig(**config),
    )


def cache(name: str = "c", of: tuple[str, str] = ("t", "n"), **config: Any) -> Entry:
    return Entry(
        kind="cache", tenant_id=of[0], namespace=of[1], name=name, cache=CacheConfig(**config)
    )


def made(*entries: Entry, now_ms: int = NOW) -> Registry:
    registry = Registry()
    for entry in entries:
        create(registry, entry, now_ms)
    return registry


def create(registry: Registry, entry: Entry, now_ms: int = NOW) -> Entry:
    record = decide_create(registry, entry, now_ms)
    assert record is not None
    registry.apply(record)
    return find(registry, entry.kind, entry.path)


def apply_all(registry: Registry, records: list[RegistryChanged]) -> None:
    for record in records:
        registry.apply(record)
        for entry in registry.entries():
            tenancy.find_parent(registry, entry.kind, entry.path)


def whole() -> Registry:
    return made(tenant(), namespace(), stream(), cache(durable=True))


# -- what there is ----------------------------------------------------------------------------


def test_a_fresh_registry_has_the_defaults_and_they_are_ordinary_entries():
    registry = Registry()
    assert [entry.kind for entry in registry.entries()] == [
        "tenant",
        "namespace",
        "stream",
        "cache",
    ]
    assert all(set(entry.path) <= {"default", ""} for entry in registry.entries())
    records = decide_delete(registry, "tenant", ("default", "", ""), NOW, cascade=True)
    apply_all(registry, records)
    assert registry.entries() == []


def test_a_stream_and_a_cache_may_have_the_same_name():
    registry = made(tenant(), namespace(), stream("same"), cache("same"))
    assert find(registry, "stream", ("t", "n", "same")).stream is not None
    assert find(registry, "cache", ("t", "n", "same")).cache is not None


def test_children_are_the_direct_entries():
    registry = made(
        tenant(),
        tenant("t2"),
        namespace(),
        namespace("n", of="t2"),
        stream(),
        cache(),
        cache("c", of=("t2", "n")),
    )
    assert [e.path for e in registry.children(find(registry, "tenant", ("t", "", "")))] == [
        ("t", "n", "")
    ]
    inside = registry.children(find(registry, "namespace", ("t", "n", "")))
    assert [e.kind for e in inside] == ["stream", "cache"]
    assert registry.children(find(registry, "cache", ("t", "n", "c"))) == []


# -- creating ---------------------------------------------------------------------------------


def test_a_created_entry_has_an_id_a_revision_and_its_time():
    registry = Registry()
    before = registry.revision
    entry = create(registry, tenant())
    assert (entry.id, entry.revision, entry.created_ms) == (before + 1, before + 1, NOW)
    assert registry.revision == before + 1


def test_creating_an_entry_again_changes_nothing_or_is_refused_if_it_differs():
    registry = whole()
    assert decide_create(registry, cache(durable=True), NOW) is None
    with pytest.raises(AlreadyExists) as refusal:
        decide_create(registry, cache(max_entries=5, durable=True), NOW)
    assert refusal.value.http_status == 409


@pytest.mark.parametrize("entry", [namespace(of="x"), stream(of=("t", "x")), cache(of=("x", "n"))])
def test_nothing_is_created_without_its_parent(entry: Entry):
    with pytest.raises(NotFound):
        decide_create(whole(), entry, NOW)


@pytest.mark.parametrize("config", [{"delivery": "at_least_once"}, {"delivery": "exactly_once"}])
def test_a_guarantee_needs_a_durable_stream(config: dict[str, Any]):
    """felix-120."""
    registry = whole()
    with pytest.raises(InvalidArgument, match="needs a durable stream"):
        decide_create(registry, stream("new", **config), NOW)
    with pytest.raises(InvalidArgument, match="needs a durable stream"):
        decide_change(registry, ("t", "n", "s"), NOW, stream=StreamConfig(**config))
    entries = [*registry.entries(), stream("new", **config)]
    with pytest.raises(InvalidArgument, match="needs a durable stream"):
        decide_reconcile(registry, entries, NOW)


def test_the_registry_is_bounded(monkeypatch: pytest.MonkeyPatch):
    registry = whole()
    monkeypatch.setattr(tenancy, "MAX_REGISTRY_ENTRIES", len(registry.entries()))
    with pytest.raises(ResourceExhausted) as refusal:
        decide_create(registry, tenant("more"), NOW)
    assert refusal.value.limit == "registry_entries"
    with pytest.raises(InvalidArgument, match="at most"):
        decide_reconcile(registry, [*registry.entries(), tenant("more")], NOW)


# -- changing ---------------------------------------------------------------------------------


def test_a_change_keeps_the_id_and_counts_the_revision():
    registry = whole()
    path = ("t", "n", "c")
    before = find(registry, "cache", path)
    record = decide_change(registry, path, NOW + 5, cache=CacheConfig(max_entries=3, durable=True))
    assert record is not None
    registry.apply(record)
    after = find(registry, "cache", path)
    assert (after.id, after.created_ms) == (before.id, before.created_ms)
    assert after.revision == registry.revision > before.revision
    assert after.cache == CacheConfig(max_entries=3, durable=True)
    assert decide_change(registry, path, NOW, cache=after.cache) is None


def test_whether_a_cache_is_durable_cannot_change():
    with pytest.raises(FailedPrecondition, match="durable"):
        decide_change(whole(), ("t", "n", "c"), NOW, cache=CacheConfig(durable=False))


def test_a_change_of_something_that_changed_meanwhile_is_refused():
    registry = whole()
    path, revision = ("t", "n", "s"), find(whole(), "stream", ("t", "n", "s")).revision
    config = StreamConfig(event_queue_depth=5)
    record = decide_change(registry, path, NOW, stream=config, if_revision=revision)
    assert record is not None
    registry.apply(record)
    with pytest.raises(VersionMismatch):
        decide_change(registry, path, NOW, stream=StreamConfig(), if_revision=revision)


# -- deleting ---------------------------------------------------------------------------------


def test_an_entry_with_children_is_deleted_only_with_cascade():
    registry = whole()
    for kind, path in (("tenant", ("t", "", "")), ("namespace", ("t", "n", ""))):
        with pytest.raises(FailedPrecondition, match="not empty"):
            decide_delete(registry, kind, path, NOW, cascade=False)  # type: ignore[arg-type]
    records = decide_delete(registry, "tenant", ("t", "", ""), NOW, cascade=True)
    assert [r.entry.kind for r in records][-2:] == ["namespace", "tenant"]
    apply_all(registry, records)
    with pytest.raises(NotFound):
        find(registry, "tenant", ("t", "", ""))
    assert len(registry.entries()) == 4, "the other tenant is as it was"


def test_an_id_is_never_used_again():
    registry = whole()
    first = find(registry, "cache", ("t", "n", "c")).id
    apply_all(registry, decide_delete(registry, "cache", ("t", "n", "c"), NOW, cascade=False))
    assert create(registry, cache()).id > first


# -- following --------------------------------------------------------------------------------


def test_changes_list_everything_since_a_revision_in_order():
    registry = Registry()
    start = registry.revision
    for entry in (tenant(), namespace(), cache()):
        create(registry, entry)
    apply_all(registry, decide_delete(registry, "cache", ("t", "n", "c"), NOW, cascade=False))
    found = changes_since(registry, start + 1, registry.epoch)
    assert [(c.entry.kind, c.deleted) for c in found.changes] == [
        ("namespace", False),
        ("cache", False),
        ("cache", True),
    ]
    assert [c.entry.revision for c in found.changes] == [start + 2, start + 3, start + 4]
    assert found.revision == registry.revision
    assert changes_since(registry, registry.revision, None).changes == []


def test_a_cursor_that_is_too_old_too_new_or_of_another_registry_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(tenancy, "MAX_REGISTRY_CHANGES", 3)
    registry = made(*(tenant(f"t{n}") for n in range(5)))
    assert len(changes_since(registry, registry.revision - 3, None).changes) == 3
    with pytest.raises(OutOfRange) as old:
        changes_since(registry, registry.revision - 4, None)
    assert old.value.http_status == 410
    with pytest.raises(NotYet) as new:
        changes_since(registry, registry.revision + 1, None)
    assert new.value.http_status == 416
    with pytest.raises(OutOfRange):
        changes_since(registry, registry.revision, registry.epoch + 1)


def test_the_epoch_is_that_of_the_first_change_and_stays():
    registry = Registry()
    assert registry.epoch == 0
    create(registry, tenant("a"), NOW)
    create(registry, tenant("b"), NOW + 9)
    assert registry.epoch == NOW


def test_a_restored_registry_goes_on_as_the_old_one():
    registry = whole()
    again = Registry()
    again.restore(snapshot_of(registry))
    assert snapshot_of(again) == snapshot_of(registry)
    assert decide_create(again, tenant("x"), NOW) == decide_create(registry, tenant("x"), NOW)


# -- reconciling ------------------------------------------------------------------------------


def test_a_follower_gives_up_the_stream_and_cache_that_it_began_with_once():
    """felix-107: they look like those of the source, and are its own; from then on they are not."""
    source, follower = Registry(), Registry()
    steps = decide_reconcile(follower, source.entries(), NOW)
    assert [(s.entry.kind, s.entry.name, s.deleted) for s in steps] == [
        ("cache", "default", True),
        ("stream", "default", True),
        ("stream", "default", False),
        ("cache", "default", False),
    ]
    apply_all(follower, steps)
    assert content(follower) == content(source)
    assert decide_reconcile(follower, source.entries(), NOW + 1) == []
    again = Registry()
    again.restore(snapshot_of(follower))
    assert decide_reconcile(again, source.entries(), NOW + 2) == []


def test_a_follower_gives_up_what_it_began_with_if_the_source_has_none():
    """felix-107."""
    source, follower = Registry(), Registry()
    apply_all(source, decide_delete(source, "tenant", ("default", "", ""), NOW, cascade=True))
    apply_all(follower, decide_reconcile(follower, source.entries(), NOW))
    assert follower.entries() == []


def test_retention_of_a_stream_that_keeps_nothing_is_refused():
    """felix-120, 126: it would not do what it says."""
    registry = whole()
    with pytest.raises(InvalidArgument, match="retention"):
        decide_create(registry, stream("s2", retention_ms=1), NOW)
    with pytest.raises(InvalidArgument, match="retention"):
        decide_change(registry, ("t", "n", "s"), NOW, stream=StreamConfig(retention_ms=1))


def test_a_stream_that_has_retention_from_an_earlier_version_can_be_changed_and_followed():
    old = Registry()
    for number, entry in enumerate([tenant(), namespace(), stream(retention_ms=7)], 5):
        old.apply(RegistryChanged(NOW, replace(entry, id=number, revision=number)))
    config = StreamConfig(retention_ms=7, lag_alert_events=1)
    assert decide_change(old, ("t", "n", "s"), NOW, stream=config) is not None
    with pytest.raises(InvalidArgument, match="retention"):
        decide_change(old, ("t", "n", "s"), NOW, stream=StreamConfig(retention_ms=8))
    assert decide_change(old, ("t", "n", "s"), NOW, stream=StreamConfig()) is not None
    follower = Registry()
    apply_all(follower, decide_reconcile(follower, old.entries(), NOW))
    assert content(follower) == content(old)


@pytest.mark.parametrize("is_durable", [False, True])
def test_an_entry_deleted_and_created_again_at_the_source_is_new_at_the_follower(is_durable: bool):
    """felix-107: its entries are gone there, and so here."""
    source, follower = whole(), Registry()
    apply_all(follower, decide_reconcile(follower, source.entries(), NOW))
    before = find(follower, "cache", ("t", "n", "c")).id
    apply_all(source, decide_delete(source, "cache", ("t", "n", "c"), NOW, cascade=False))
    create(source, cache(durable=is_durable), NOW + 50)
    steps = decide_reconcile(follower, source.entries(), NOW + 60)
    assert [s.deleted for s in steps] == [True, False]
    apply_all(follower, steps)
    assert find(follower, "cache", ("t", "n", "c")).id > before
    assert content(follower) == content(source)


@pytest.mark.parametrize(
    "entry",
    [
        namespace(of="x"),
        cache(of=("t", "x")),
        Entry(kind="cache", tenant_id="t", namespace="n", name="bare"),
        Entry(kind="tenant", tenant_id="t", name="named"),
        tenant(" padded "),
        tenant("nul\0"),
        tenant("x" * 201),
        Entry(kind="tenant", tenant_id="later", created_ms=10**30),
        Entry(kind="tenant", tenant_id="before", created_ms=-1),
        stream("s2", event_queue_depth=0),
        stream("s2", pub_queue_depth=-1),
        stream("s2", event_queue_depth=65_537),
        stream("s2", publish_queue_wait_timeout_ms=-7),
        cache("c2", max_bytes=10**40),
        cache("c2", max_entries=-1),
        Entry(kind="stream", tenant_id="t", namespace="n", name="s2", cache=CacheConfig()),
    ],
)
def test_an_invalid_registry_is_refused_as_a_whole(entry: Entry):
    registry = whole()
    with pytest.raises(InvalidArgument):
        decide_reconcile(Registry(), [*registry.entries(), entry], NOW)


def content(registry: Registry) -> list[tuple[Any, ...]]:
    return [(e.kind, e.path, e.stream, e.cache, e.created_ms) for e in registry.entries()]


actions = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=30
)


@given(actions, st.integers(0, 30))
def test_any_steps_replay_to_the_same_registry(history: list[tuple[int, int, int, bool]], at: int):
    """And a follower that looks in between ends up with the same."""
    registry, records = Registry(), list[RegistryChanged]()
    follower = Registry()
    for n, (what, a, b, flag) in enumerate(history):
        try:
            made = _step(registry, what, f"t{a}", f"c{b}", flag, NOW + n)
        except PenstockError:
            made = []
        apply_all(registry, made)
        records += made
        if n == at:
            apply_all(follower, decide_reconcile(follower, registry.entries(), NOW + n))
    replayed = Registry()
    for record in records:
        again = decode_record(encode_record(record))
        assert isinstance(again, RegistryChanged)
        replayed.apply(again)
    assert snapshot_of(replayed) == snapshot_of(registry)
    apply_all(follower, decide_reconcile(follower, registry.entries(), NOW + 99))
    assert content(follower) == content(registry)


def _step(
    registry: Registry, what: int, of: str, name: str, flag: bool, now_ms: int
) -> list[RegistryChanged]:
    if what == 4:
        return decide_delete(registry, "tenant", (of, "", ""), now_ms, cascade=flag)
    if what == 3:
        config = CacheConfig(max_entries=int(flag) + 1)
        record = decide_change(registry, (of, "n", name), now_ms, cache=config)
    else:
        entry = [tenant(of), namespace("n", of), cache(name, (of, "n"), durable=flag)][what]
        record = decide_create(registry, entry, now_ms)
    return [record] if record is not None else []


# -- sizes and durations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1KB", 1024),
        ("1kib", 1024),
        (" 64 MB ", 64 * 2**20),
        ("1GB", 2**30),
        ("2TiB", 2**41),
        ("", None),
        ("MB", None),
        ("-1", None),
        ("1.5GB", None),
        ("1PB", None),
        ("1 0", None),
        ("9" * 16, None),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int | None):
    """felix-73."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("250", 250),
        ("250ms", 250),
        ("2s", 2000),
        ("5m", 300_000),
        ("1h", 3_600_000),
        (" 7d ", 604_800_000),
        ("", None),
        ("d", None),
        ("-1s", None),
        ("1.5h", None),
        ("1w", None),
        ("1S", None),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, ms: int | None):
    """felix-125."""
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (1, "1ms"), (1500, "1500ms"), (2000, "2s"), (90_000, "90s"), (604_800_000, "7d")],
)
def test_a_duration_is_written_in_the_largest_unit_that_is_exact(ms: int, text: str):
    assert format_duration(ms) == text


@given(st.integers(0, 10**15))
def test_a_written_duration_reads_as_itself(ms: int):
    assert parse_duration_ms(format_duration(ms)) == ms
