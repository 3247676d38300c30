"""The registry: which tenants, namespaces, streams and caches exist, and the rules to change it.

Invariant: every entry has its parents in the registry, and `revision` counts every change ever
applied. The last changes are kept for followers; they are not part of the image. Must not know what
streams and caches hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from penstock.core.scope_counts import ScopeCounts
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    NotYet,
    OutOfRange,
    ResourceExhausted,
    VersionMismatch,
)
from penstock.model.limits import (
    MAX_OFFSET,
    MAX_QUEUE_DEPTH,
    MAX_REGISTRY_CHANGES,
    MAX_REGISTRY_ENTRIES,
)
from penstock.model.names import clean_name
from penstock.model.quotas import Quota
from penstock.model.records import RegistryChanged
from penstock.model.scopes import Scope
from penstock.model.tenancy import (
    DEFAULT,
    CacheConfig,
    Change,
    Changes,
    Entry,
    Kind,
    Path,
    Snapshot,
    StreamConfig,
)

_KINDS: tuple[Kind, ...] = ("tenant", "namespace", "stream", "cache")
"""Parents before their children."""

_PARENTS: dict[Kind, Kind] = {"namespace": "tenant", "stream": "namespace", "cache": "namespace"}


class Registry:
    """`counts` has the number of entries of each kind in every tenant and namespace."""

    __slots__ = ("by_kind", "caches", "changes", "counts", "epoch", "namespaces", "revision",
                 "streams", "tenants")  # fmt: skip

    def __init__(self) -> None:
        self.tenants: dict[Path, Entry] = {}
        self.namespaces: dict[Path, Entry] = {}
        self.streams: dict[Path, Entry] = {}
        self.caches: dict[Path, Entry] = {}
        self.by_kind: dict[Kind, dict[Path, Entry]] = {
            "tenant": self.tenants,
            "namespace": self.namespaces,
            "stream": self.streams,
            "cache": self.caches,
        }
        self.counts: dict[Kind, ScopeCounts] = {kind: ScopeCounts() for kind in _KINDS}
        self.epoch = 0
        self.revision = 0
        self.changes: deque[Change] = deque(maxlen=MAX_REGISTRY_CHANGES)
        for entry in _first_entries():
            self.put(entry)

    def put(self, entry: Entry) -> None:
        entries = self.by_kind[entry.kind]
        if entry.path not in entries:
            self.counts[entry.kind].add(_scope(entry), 1)
        entries[entry.path] = entry
        self.revision = max(self.revision, entry.revision)

    def apply(self, record: RegistryChanged) -> None:
        entry = record.entry
        if record.deleted:
            del self.by_kind[entry.kind][entry.path]
            self.counts[entry.kind].add(_scope(entry), -1)
            self.revision = entry.revision
        else:
            self.put(entry)
        # The time of the first change identifies this registry, so that its revisions are not
        # mistaken for those of another.
        self.epoch = self.epoch or record.ts
        self.changes.append(Change(entry=entry, deleted=record.deleted))

    def restore(self, snapshot: Snapshot) -> None:
        for entries in self.by_kind.values():
            entries.clear()
        self.counts = {kind: ScopeCounts() for kind in _KINDS}
        for entry in snapshot.entries:
            self.put(entry)
        self.epoch, self.revision = snapshot.epoch, snapshot.revision

    def entries(self) -> list[Entry]:
        """Returns all entries, parents before children, each kind sorted by path."""
        return [entry for kind in _KINDS for _, entry in sorted(self.by_kind[kind].items())]

    def children(self, parent: Entry) -> list[Entry]:
        """Returns the entries directly in `parent`."""
        if parent.kind == "tenant":
            kinds: tuple[Kind, ...] = ("namespace",)
        elif parent.kind == "namespace":
            kinds = ("stream", "cache")
        else:
            return []
        found = (entry for kind in kinds for entry in self.by_kind[kind].values())
        return [entry for entry in found if _is_in(entry, parent)]


def find(registry: Registry, kind: Kind, path: Path) -> Entry:
    """Returns the entry. Otherwise raises NotFound, which names the first unknown part of the
    path."""
    entry = registry.by_kind[kind].get(path)
    if entry is not None:
        return entry
    tenant, namespace, name = path
    if (tenant, "", "") not in registry.tenants:
        raise NotFound(f"unknown tenant {tenant!r}")
    if (tenant, namespace, "") not in registry.namespaces:
        raise NotFound(f"unknown namespace {namespace!r} of tenant {tenant!r}")
    what = "stream not found" if kind == "stream" else "cache scope not found"
    raise NotFound(f"{what}: {f'{tenant}/{namespace}/{name}'!r}")


def find_parent(registry: Registry, kind: Kind, path: Path) -> None:
    """Raises NotFound if the parent does not exist."""
    tenant, namespace, _ = path
    if kind == "namespace":
        find(registry, "tenant", (tenant, "", ""))
    elif kind != "tenant":
        find(registry, "namespace", (tenant, namespace, ""))


def snapshot_of(registry: Registry) -> Snapshot:
    return Snapshot(epoch=registry.epoch, revision=registry.revision, entries=registry.entries())


def changes_since(registry: Registry, since: int, epoch: int | None) -> Changes:
    """Returns the changes after revision `since`. Raises OutOfRange if they are no longer kept."""
    if epoch is not None and epoch != registry.epoch:
        raise OutOfRange("this epoch belongs to another registry; take a snapshot")
    if since > registry.revision:
        raise NotYet(f"revision {since} does not exist yet; the registry is at {registry.revision}")
    kept = registry.changes
    if since < registry.revision - len(kept):
        raise OutOfRange(f"changes after revision {since} are no longer kept; take a snapshot")
    found = [change for change in kept if change.entry.revision > since]
    return Changes(epoch=registry.epoch, revision=registry.revision, changes=found)


def decide_create(registry: Registry, wanted: Entry, now_ms: int) -> RegistryChanged | None:
    """Returns None if the entry exists with the same settings."""
    find_parent(registry, wanted.kind, wanted.path)
    _check_stream(wanted.stream)
    _check_retention(wanted.stream)
    existing = registry.by_kind[wanted.kind].get(wanted.path)
    if existing is not None:
        is_same = (existing.stream, existing.cache) == (wanted.stream, wanted.cache)
        if is_same and wanted.quota in (None, existing.quota):
            return None
        raise AlreadyExists(f"{wanted.kind} {_name(wanted)!r} exists with other settings")
    if sum(map(len, registry.by_kind.values())) >= MAX_REGISTRY_ENTRIES:
        raise ResourceExhausted(
            f"the registry has {MAX_REGISTRY_ENTRIES} entries", limit="registry_entries"
        )
    return RegistryChanged(now_ms, _created(wanted, registry.revision + 1, now_ms))


def decide_change(
    registry: Registry,
    path: Path,
    now_ms: int,
    *,
    stream: StreamConfig | None = None,
    cache: CacheConfig | None = None,
    quota: Quota | None = None,
    if_revision: int | None = None,
) -> RegistryChanged | None:
    """Changes the settings of a stream or cache, or the quota of a tenant or namespace. Returns
    None if it has them already. Raises VersionMismatch if it has changed since `if_revision`."""
    entry = find(registry, kind_to_change(path, stream, cache), path)
    if if_revision not in (None, entry.revision):
        raise VersionMismatch(f"{entry.kind} {_name(entry)!r} has changed; look at it again")
    _check_stream(stream)
    if (entry.stream, entry.cache, entry.quota) == (stream, cache, quota):
        return None
    if stream is not None and _retention(stream) != _retention(entry.stream):
        _check_retention(stream)
    _check_lasting(entry, stream, cache)
    changed = msgspec.structs.replace(
        entry, stream=stream, cache=cache, quota=quota, revision=registry.revision + 1
    )
    return RegistryChanged(now_ms, changed)


def kind_to_change(path: Path, stream: StreamConfig | None, cache: CacheConfig | None) -> Kind:
    """Returns the kind of entry that these settings belong to."""
    if stream is not None:
        return "stream"
    if cache is not None:
        return "cache"
    return "namespace" if path[1] else "tenant"


def decide_delete(
    registry: Registry, kind: Kind, path: Path, now_ms: int, *, cascade: bool
) -> list[RegistryChanged]:
    """Deletes children first, so that a follower never sees an entry without its parent."""
    entry = find(registry, kind, path)
    if registry.children(entry) and not cascade:
        raise FailedPrecondition(
            f"{kind} {_name(entry)!r} is not empty; use cascade to delete its content too"
        )
    return _numbered(registry, _with_children(registry, entry), now_ms)


def decide_reconcile(
    registry: Registry, wanted: Iterable[Entry], now_ms: int
) -> list[RegistryChanged]:
    """Returns the changes that make this registry equal to another one. Entries keep the other's
    `created_ms`: an entry that was deleted and created again there differs in it, and begins empty
    here too. The default stream and cache of this broker are replaced in any case."""
    there = {(entry.kind, entry.path): entry for entry in wanted}
    _check_whole(there)
    kept = {}
    gone = []
    for entry in reversed(registry.entries()):
        other = there.get((entry.kind, entry.path))
        if other is None or not _is_the_same(other, entry):
            gone.append(entry)
        else:
            kept[entry.kind, entry.path] = entry
    steps = _numbered(registry, gone, now_ms)
    revision = registry.revision + len(steps)
    for entry in sorted(there.values(), key=lambda entry: _KINDS.index(entry.kind)):
        existing = kept.get((entry.kind, entry.path))
        if existing is None:
            revision += 1
            steps.append(RegistryChanged(now_ms, _created(entry, revision, entry.created_ms)))
        elif _settings(existing) != _settings(entry):
            revision += 1
            changed = msgspec.structs.replace(
                existing,
                stream=entry.stream,
                cache=entry.cache,
                quota=entry.quota,
                revision=revision,
            )
            steps.append(RegistryChanged(now_ms, changed))
    return steps


def _settings(entry: Entry) -> tuple[StreamConfig | None, CacheConfig | None, Quota | None]:
    return entry.stream, entry.cache, entry.quota


def _created(wanted: Entry, revision: int, created_ms: int) -> Entry:
    return msgspec.structs.replace(wanted, id=revision, revision=revision, created_ms=created_ms)


def _numbered(registry: Registry, gone: list[Entry], now_ms: int) -> list[RegistryChanged]:
    return [
        RegistryChanged(now_ms, msgspec.structs.replace(entry, revision=revision), True)
        for revision, entry in enumerate(gone, registry.revision + 1)
    ]


def _with_children(registry: Registry, entry: Entry) -> list[Entry]:
    """Returns everything in the entry, at any depth, and then the entry."""
    if entry.kind not in ("tenant", "namespace"):
        return [entry]
    kinds = reversed(_KINDS[_KINDS.index(entry.kind) + 1 :])
    found = (child for kind in kinds for child in registry.by_kind[kind].values())
    return [*(child for child in found if _is_in(child, entry)), entry]


def _is_in(entry: Entry, parent: Entry) -> bool:
    if parent.kind == "tenant":
        return entry.tenant_id == parent.tenant_id
    return (entry.tenant_id, entry.namespace) == (parent.tenant_id, parent.namespace)


def _scope(entry: Entry) -> Scope:
    return entry.tenant_id, entry.namespace


def _name(entry: Entry) -> str:
    return "/".join(part for part in entry.path if part)


def _check_stream(config: StreamConfig | None) -> None:
    """Raises if the settings contradict each other."""
    if config is not None and config.delivery != "at_most_once" and not config.durable:
        raise InvalidArgument(
            f"delivery {config.delivery} needs a durable stream; leave durable out, or set it to "
            "true"
        )


def _check_retention(config: StreamConfig | None) -> None:
    """Raises if an ephemeral stream shall keep events. Earlier versions accepted the setting
    without effect; existing streams and followed registries may still have it."""
    if config is not None and not config.durable and _retention(config) != (0, 0):
        raise InvalidArgument(
            "retention needs a durable stream: this one keeps no events; create it with durable, "
            "or with delivery at_least_once"
        )


def _retention(config: StreamConfig | None) -> tuple[int, int]:
    return (0, 0) if config is None else (config.retention_ms, config.retention_bytes)


def _check_lasting(entry: Entry, stream: StreamConfig | None, cache: CacheConfig | None) -> None:
    """Raises if `durable` or the delivery would change."""
    if stream is not None and entry.stream is not None and stream.delivery != entry.stream.delivery:
        raise FailedPrecondition(f"delivery of stream {_name(entry)!r} cannot change")
    changed = msgspec.structs.replace(entry, stream=stream, cache=cache)
    if _is_durable(changed) != _is_durable(entry):
        raise FailedPrecondition(f"durable of {entry.kind} {_name(entry)!r} cannot change")


def _check_whole(entries: dict[tuple[Kind, Path], Entry]) -> None:
    """Raises if the entries are no valid registry, or need a feature that is not built here."""
    if len(entries) > MAX_REGISTRY_ENTRIES:
        raise InvalidArgument(f"a registry has at most {MAX_REGISTRY_ENTRIES} entries")
    for (kind, (tenant, namespace, name)), entry in entries.items():
        parent = _PARENTS.get(kind)
        at = (tenant, namespace if parent == "namespace" else "", "")
        has_config = (entry.stream is not None, entry.cache is not None)
        if (
            (parent is not None and (parent, at) not in entries)
            or has_config != (kind == "stream", kind == "cache")
            or (entry.quota is not None and kind not in ("tenant", "namespace"))
            or (bool(tenant), bool(namespace), bool(name))
            != (True, kind != "tenant", parent == "namespace")
        ):
            raise InvalidArgument(
                f"invalid registry: {kind} {_name(entry)!r} does not belong in it"
            )
        _check_entry(entry)
        _check_stream(entry.stream)


def _check_entry(entry: Entry) -> None:
    """Raises if no client could have created such an entry."""
    own = entry.name or entry.namespace or entry.tenant_id
    if clean_name(own, entry.kind) != own:
        raise InvalidArgument(f"invalid registry: {entry.kind} {own[:40]!r} is no valid name")
    config: StreamConfig | CacheConfig | Quota | None = entry.stream or entry.cache or entry.quota
    numbers = [entry.created_ms, *(msgspec.structs.astuple(config) if config else ())]
    depths = (entry.stream.event_queue_depth, entry.stream.pub_queue_depth) if entry.stream else ()
    if not (
        all(0 <= number <= MAX_OFFSET for number in numbers if isinstance(number, int))
        and all(0 < depth <= MAX_QUEUE_DEPTH for depth in depths if depth is not None)
    ):
        raise InvalidArgument(f"invalid registry: {entry.kind} {own!r} has numbers out of range")


def _is_the_same(other: Entry, entry: Entry) -> bool:
    if _is_first(entry):
        return False
    return other.created_ms == entry.created_ms and _is_durable(other) == _is_durable(entry)


def _is_first(entry: Entry) -> bool:
    """Returns True for the default stream and cache of a new broker. Those taken over from another
    registry have later ids."""
    return entry.id in _FIRST_IDS and entry.kind in ("stream", "cache")


def _is_durable(entry: Entry) -> bool:
    config = entry.stream or entry.cache
    return config is not None and config.durable


def _first_entries() -> list[Entry]:
    tenant = Entry(kind="tenant", tenant_id=DEFAULT)
    namespace = msgspec.structs.replace(tenant, kind="namespace", namespace=DEFAULT)
    stream = msgspec.structs.replace(namespace, kind="stream", name=DEFAULT, stream=StreamConfig())
    cache = msgspec.structs.replace(namespace, kind="cache", name=DEFAULT, cache=CacheConfig())
    return [
        msgspec.structs.replace(entry, id=number, revision=number)
        for number, entry in enumerate((tenant, namespace, stream, cache), 1)
    ]


_FIRST_IDS = frozenset(entry.id for entry in _first_entries())
