"""The image: all durable state as plain data, taken from a BrokerState and restored to one.

Invariant: restoring an image and applying records gives the same image as applying those records to
the original state. State that only the process knows (leases, timers, consumers) is left out, and
so is derived state: in-flight counts, open effects, the backlog's heaps. Fields are only ever added
at the end, because older snapshots must be readable. Must not know files.
"""

from __future__ import annotations

import msgspec

from penstock.core.cache import Cache, CacheEntry
from penstock.core.effects import Effect
from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Group, Progress, Unfinished
from penstock.core.state import BrokerState
from penstock.core.tenancy import snapshot_of
from penstock.core.topics import Partition, Topic
from penstock.core.writers import Storing, Writer
from penstock.model.envelope import RetryPolicy
from penstock.model.limits import Limits
from penstock.model.records import DEAD, StagedRows
from penstock.model.tenancy import Snapshot


class EntryImage(msgspec.Struct, array_like=True, gc=False):
    """One unfinished message of a group. `until` is the retry time if it is waiting, else 0. The
    last three fields are 0 in images from before deliveries were numbered."""

    offset: int
    size: int
    state: int
    attempts: int
    owner: str
    previous_owner: str
    last_error: str
    until: int
    effect_key: str
    policy: RetryPolicy | None
    delivered_at: int = 0
    previous_delivered_at: int = 0
    deliveries: int = 0
    delivery: int = 0
    previous_delivery: int = 0


class ProgressImage(msgspec.Struct, array_like=True):
    """`ready` has the offsets of the ready entries in the order of their delivery."""

    cursor: int
    first_offset: int
    last_acked: int
    finished_msgs: int
    finished_bytes: int
    free_msgs: int
    free_bytes: int
    unfinished: list[EntryImage]
    ready: list[int]


class GroupImage(msgspec.Struct, array_like=True):
    id: int
    name: str
    created_ms: int
    progress: list[ProgressImage]


class PartitionImage(msgspec.Struct, array_like=True, gc=False):
    first_offset: int
    end_offset: int
    stored_msgs: int
    stored_bytes: int
    trimmed_msgs: int
    trimmed_bytes: int


class EffectImage(msgspec.Struct, array_like=True, gc=False):
    group: str
    effect_key: str
    status: int
    owner: str
    lease_until: int
    text: str
    expires: int


class TopicImage(msgspec.Struct, array_like=True):
    id: int
    name: str
    created_ms: int
    next_offset: int
    retention_ms: int
    retention_bytes: int
    partitions: list[PartitionImage]
    groups: list[GroupImage]
    effects: list[EffectImage]
    after_archive: bool = False
    max_attempts: int = 0
    retry_backoff_ms: int = 0
    retry_max_backoff_ms: int = 0


class CacheEntryImage(msgspec.Struct, array_like=True, gc=False):
    key: str
    value: bytes
    version: int
    expires: int


class CacheImage(msgspec.Struct, array_like=True):
    """Entries are in the order they were written. An ephemeral cache has only `first_version`."""

    id: int
    first_version: int
    version: int
    entries: list[CacheEntryImage]


class StoringImage(msgspec.Struct, array_like=True):
    batch: int
    rows: int
    done: int
    pieces: list[StagedRows]


class WriterImage(msgspec.Struct, array_like=True):
    producer: str
    last_batch: int
    rows: int
    committed_ms: int
    once: bool
    storing: list[StoringImage]


class StateImage(msgspec.Struct, array_like=True):
    """`produced_keys[i]` is remembered until `produced_until[i]`. Two lists decode fastest."""

    next_id: int
    last_ts: int
    topics: list[TopicImage]
    produced_keys: list[str]
    produced_until: list[int]
    registry: Snapshot | None = None
    caches: list[CacheImage] = []
    cache_floor: int = 0
    writers: list[WriterImage] = []
    journal_archived: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateImage)

encode_image = _encoder.encode
decode_image = _decoder.decode


def take_image(state: BrokerState) -> StateImage:
    """Returns an image that shares no mutable data with `state`. Leaves out idempotency keys and
    cache entries that have expired by the time of the last record."""
    topics = sorted(state.topics.values(), key=lambda topic: topic.id)
    kept = [item for item in state.produced.items() if item[1] > state.last_ts]
    return StateImage(
        state.next_id,
        state.last_ts,
        [_topic_image(topic) for topic in topics],
        [identity for identity, _ in kept],
        [expires for _, expires in kept],
        snapshot_of(state.registry),
        [_cache_image(cache, state.last_ts) for _, cache in sorted(state.caches.items())],
        state.cache_floor,
        [_writer_image(writer) for writer in state.writers],
        state.journal_archived,
    )


def restore_image(image: StateImage, limits: Limits) -> BrokerState:
    state = BrokerState(limits)
    state.next_id = image.next_id
    state.last_ts = image.last_ts
    state.journal_archived = image.journal_archived
    for topic in image.topics:
        _restore_topic(state, topic)
    state.produced.restore(list(zip(image.produced_keys, image.produced_until, strict=True)))
    if image.registry is not None:
        state.registry.restore(image.registry)
    _restore_caches(state, image)
    for writer in image.writers:
        state.writers.add(_restored_writer(writer))
    return state


# Taking an image


def _topic_image(topic: Topic) -> TopicImage:
    groups = sorted(topic.groups.values(), key=lambda group: group.id)
    effects = [
        EffectImage(
            group, key, effect.status, effect.owner, effect.lease_until, effect.text, effect.expires
        )
        for group, key, effect in topic.effects.items()
    ]
    effects.sort(key=lambda effect: (effect.expires, effect.group, effect.effect_key))
    return TopicImage(
        topic.id,
        topic.name,
        topic.created_ms,
        topic.next_offset,
        topic.retention_ms,
        topic.retention_bytes,
        [_partition_image(partition) for partition in topic.partitions],
        [_group_image(group) for group in groups],
        effects,
        topic.after_archive,
        topic.max_attempts,
        topic.retry_backoff_ms,
        topic.retry_max_backoff_ms,
    )


def _partition_image(partition: Partition) -> PartitionImage:
    backlog = partition.backlog
    return PartitionImage(
        partition.first_offset,
        partition.end_offset,
        backlog.stored_msgs,
        backlog.stored_bytes,
        backlog.trimmed_msgs,
        backlog.trimmed_bytes,
    )


def _group_image(group: Group) -> GroupImage:
    progress = [_progress_image(progress) for progress in group.progress]
    return GroupImage(group.id, group.name, group.created_ms, progress)


def _progress_image(progress: Progress) -> ProgressImage:
    entries = sorted(progress.unfinished.values(), key=lambda entry: entry.offset)
    return ProgressImage(
        progress.cursor,
        progress.first_offset,
        progress.last_acked,
        progress.finished_msgs,
        progress.finished_bytes,
        progress.free_msgs,
        progress.free_bytes,
        [_entry_image(entry) for entry in entries],
        list(progress.ready),
    )


def _entry_image(entry: Unfinished) -> EntryImage:
    return EntryImage(
        entry.offset,
        entry.size,
        entry.state,
        entry.attempts,
        entry.owner,
        entry.previous_owner,
        entry.last_error,
        entry.until if entry.state == WAITING else 0,
        entry.effect_key,
        entry.policy,
        entry.delivered_at,
        entry.previous_delivered_at,
        entry.deliveries,
        entry.delivery,
        entry.previous_delivery,
    )


def _cache_image(cache: Cache, now_ms: int) -> CacheImage:
    if not cache.is_durable:
        return CacheImage(cache.id, cache.first_version, cache.first_version, [])
    entries = [
        CacheEntryImage(key, entry.value, entry.version, entry.expires)
        for key, entry in cache.entries.items()
        if not 0 < entry.expires <= now_ms
    ]
    entries.sort(key=lambda entry: entry.version)
    return CacheImage(cache.id, cache.first_version, cache.version, entries)


def _writer_image(writer: Writer) -> WriterImage:
    return WriterImage(
        writer.producer,
        writer.last_batch,
        writer.rows,
        writer.committed_ms,
        writer.once,
        [
            StoringImage(each.batch, each.rows, each.done, each.pieces)
            for each in writer.storing.values()
        ],
    )


# Restoring an image


def _restore_topic(state: BrokerState, image: TopicImage) -> None:
    partitions = len(image.partitions)
    topic = Topic(image.id, image.name, partitions, image.created_ms, state.effect_totals)
    topic.next_offset = image.next_offset
    topic.retention_ms = image.retention_ms
    topic.retention_bytes = image.retention_bytes
    topic.after_archive = image.after_archive
    topic.max_attempts = image.max_attempts
    topic.retry_backoff_ms = image.retry_backoff_ms
    topic.retry_max_backoff_ms = image.retry_max_backoff_ms
    for partition, kept in zip(topic.partitions, image.partitions, strict=True):
        partition.first_offset = kept.first_offset
        partition.end_offset = kept.end_offset
        backlog = partition.backlog
        backlog.stored_msgs = kept.stored_msgs
        backlog.stored_bytes = kept.stored_bytes
        backlog.trimmed_msgs = kept.trimmed_msgs
        backlog.trimmed_bytes = kept.trimmed_bytes
    for group in image.groups:
        _restore_group(state, topic, group)
    topic.effects.restore([_effect(effect) for effect in image.effects])
    state.topics[topic.name] = topic
    state.topics_by_id[topic.id] = topic


def _effect(image: EffectImage) -> tuple[str, str, Effect]:
    effect = Effect(image.status, image.owner, image.lease_until, image.text, image.expires)
    return image.group, image.effect_key, effect


def _restore_group(state: BrokerState, topic: Topic, image: GroupImage) -> None:
    group = Group(image.id, image.name, topic, image.created_ms)
    for index, kept in enumerate(image.progress):
        progress = Progress(group, index, kept.first_offset)
        progress.cursor = kept.cursor
        progress.last_acked = kept.last_acked
        progress.finished_msgs = kept.finished_msgs
        progress.finished_bytes = kept.finished_bytes
        progress.free_msgs = kept.free_msgs
        progress.free_bytes = kept.free_bytes
        for entry in kept.unfinished:
            _restore_entry(state, progress, entry)
        for offset in kept.ready:
            progress.ready[offset] = progress.unfinished[offset]
        topic.partitions[index].backlog.restore(progress)
        group.progress.append(progress)
    topic.groups[group.name] = group
    state.groups[group.id] = group


def _restore_entry(state: BrokerState, progress: Progress, image: EntryImage) -> None:
    entry = Unfinished(progress, image.offset, image.size, image.policy, image.effect_key)
    entry.state = image.state
    entry.attempts = image.attempts
    entry.owner = image.owner
    entry.previous_owner = image.previous_owner
    entry.last_error = image.last_error
    entry.delivered_at = image.delivered_at
    entry.previous_delivered_at = image.previous_delivered_at
    _restore_numbers(entry, image)
    progress.unfinished[image.offset] = entry
    if image.state == WAITING:
        entry.until = image.until
        state.timers.set(entry, image.until)
    elif image.state == DYING:
        entry.until = DEAD
    elif image.state == IN_FLIGHT:
        progress.in_flight += 1
    if image.effect_key:
        open_effects = progress.group.open_effects
        open_effects[image.effect_key] = open_effects.get(image.effect_key, 0) + 1


def _restore_numbers(entry: Unfinished, image: EntryImage) -> None:
    """Restores the delivery numbers. In older images a delivery's number is its attempt."""
    if image.deliveries:
        entry.deliveries = image.deliveries
        entry.delivery = image.delivery
        entry.previous_delivery = image.previous_delivery
    else:
        entry.deliveries = entry.delivery = image.attempts
        entry.previous_delivery = max(image.attempts - 1, 0)


def _restore_caches(state: BrokerState, image: StateImage) -> None:
    state.cache_floor = image.cache_floor
    kept = {cache.id: cache for cache in image.caches}
    state.caches.clear()
    for entry in state.registry.caches.values():
        of_cache = kept.get(entry.id, CacheImage(entry.id, 0, 0, []))
        cache = Cache(entry, of_cache.first_version, state.cache_memory)
        entries = [(e.key, CacheEntry(e.value, e.version, e.expires)) for e in of_cache.entries]
        cache.restore(of_cache.version, entries)
        state.caches[entry.id] = cache


def _restored_writer(image: WriterImage) -> Writer:
    writer = Writer(image.producer, image.last_batch, image.rows, image.committed_ms, image.once)
    for each in image.storing:
        writer.storing[each.batch] = Storing(each.batch, each.rows, each.pieces, each.done)
    return writer
