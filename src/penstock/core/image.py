"""The image: all durable state as plain data, taken from a BrokerState and restored to one.

Invariant: restoring an image and applying records gives the same image as applying those records to
the original state. State that only the process knows (a cache's counters, the order of its reads)
is left out, and so is derived state: in-flight counts, open effects, the backlog's heaps. Fields
are only ever added at the end, because older snapshots must be readable. Must not know files.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.core.access import AccessSnapshot, snapshot_of_access
from penstock.core.cache import Cache, CacheEntry
from penstock.core.effects import Effect
from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Group, Progress, Unfinished
from penstock.core.publishers import Publisher
from penstock.core.state import BrokerState
from penstock.core.tenancy import snapshot_of
from penstock.core.topics import Partition, Topic
from penstock.core.transactions import RememberedTransaction
from penstock.core.writers import Storing, Writer
from penstock.model.envelope import RetryPolicy
from penstock.model.limits import Limits
from penstock.model.records import DEAD, StagedRows
from penstock.model.tenancy import Snapshot
from penstock.model.tokens import Token


class EntryImage(msgspec.Struct, array_like=True, gc=False):
    """One unfinished message of a group. `until` is the retry time if it is waiting, else 0. The
    numbers of deliveries are 0 in images from before there were any."""

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
    lease_ms: int = 0


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


class PublisherImage(msgspec.Struct, array_like=True):
    """`offsets[i]`, `counts[i]` and `digests[i]` are of the answer to number
    `next - len(offsets) + i`."""

    producer_id: str
    next: int
    last_ms: int
    offsets: list[int]
    counts: list[int]
    digests: list[int]


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
    publishers: list[PublisherImage] = []


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
    transactions: list[RememberedTransaction] = []
    tokens: list[Token] = []
    access: AccessSnapshot | None = None
    epoch: int = 0


Image = TypeVar("Image", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateImage)

encode_image = _encoder.encode
decode_image = _decoder.decode


def take_image(state: BrokerState) -> StateImage:
    """Returns an image that shares no mutable data with `state`. Leaves out idempotency keys,
    transactions and cache entries that have expired by the time of the last record."""
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
        [each for each in state.transactions.items() if each.expires > state.last_ts],
        list(state.tokens),
        snapshot_of_access(state.access),
        state.epoch,
    )


def restore_image(image: StateImage, limits: Limits) -> BrokerState:
    state = BrokerState(limits)
    state.next_id = image.next_id
    state.last_ts = image.last_ts
    state.journal_archived = image.journal_archived
    state.epoch = image.epoch
    for topic in image.topics:
        _restore_topic(state, topic)
    state.produced.restore(list(zip(image.produced_keys, image.produced_until, strict=True)))
    if image.registry is not None:
        state.registry.restore(image.registry)
    _restore_caches(state, image)
    for writer in image.writers:
        state.writers.add(_restored_writer(writer))
    state.transactions.restore(image.transactions)
    state.tokens.restore(image.tokens)
    if image.access is not None:
        state.access.restore(image.access)
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
    return _image_of(
        TopicImage,
        topic,
        partitions=[_partition_image(partition) for partition in topic.partitions],
        groups=[_group_image(group) for group in groups],
        effects=effects,
        publishers=[_publisher_image(each) for each in topic.publishers],
    )


def _publisher_image(publisher: Publisher) -> PublisherImage:
    answers = publisher.answers.values()
    return PublisherImage(
        publisher.producer_id,
        publisher.next,
        publisher.last_ms,
        [offset for offset, _, _ in answers],
        [count for _, count, _ in answers],
        [digest for _, _, digest in answers],
    )


def _image_of(kind: type[Image], source: object, **given: object) -> Image:
    """Makes an image from the attributes of `source` with its fields' names, except those given."""
    names = kind.__struct_fields__
    return kind(**{name: getattr(source, name) for name in names if name not in given}, **given)


def _partition_image(partition: Partition) -> PartitionImage:
    first, end = partition.first_offset, partition.end_offset
    return _image_of(PartitionImage, partition.backlog, first_offset=first, end_offset=end)


def _group_image(group: Group) -> GroupImage:
    progress = [_progress_image(progress) for progress in group.progress]
    return GroupImage(group.id, group.name, group.created_ms, progress)


def _progress_image(progress: Progress) -> ProgressImage:
    entries = sorted(progress.unfinished.values(), key=lambda entry: entry.offset)
    unfinished = [_entry_image(entry) for entry in entries]
    return _image_of(ProgressImage, progress, unfinished=unfinished, ready=list(progress.ready))


def _entry_image(entry: Unfinished) -> EntryImage:
    return EntryImage(
        entry.offset,
        entry.size,
        entry.state,
        entry.attempts,
        entry.owner,
        entry.previous_owner,
        entry.last_error,
        entry.retry_at if entry.state == WAITING else 0,
        entry.effect_key,
        entry.policy,
        entry.delivered_at,
        entry.previous_delivered_at,
        entry.deliveries,
        entry.delivery,
        entry.previous_delivery,
        entry.lease_ms,
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
    storing = [_image_of(StoringImage, each) for each in writer.storing.values()]
    return _image_of(WriterImage, writer, storing=storing)


# Restoring an image


def _restore_topic(state: BrokerState, image: TopicImage) -> None:
    partitions = len(image.partitions)
    topic = Topic(image.id, image.name, partitions, image.created_ms, state.effect_totals)
    _restore_fields(topic, image, except_for=("partitions", "groups", "effects", "publishers"))
    for partition, kept in zip(topic.partitions, image.partitions, strict=True):
        partition.first_offset = kept.first_offset
        partition.end_offset = kept.end_offset
        _restore_fields(partition.backlog, kept, except_for=("first_offset", "end_offset"))
    for group in image.groups:
        _restore_group(state, topic, group)
    topic.effects.restore([_effect(effect) for effect in image.effects])
    for publisher in image.publishers:
        topic.publishers.restore(_restored_publisher(publisher))
    state.topics[topic.name] = topic
    state.topics_by_id[topic.id] = topic


def _restored_publisher(image: PublisherImage) -> Publisher:
    publisher = Publisher(image.producer_id, image.next, image.last_ms)
    numbers = range(image.next - len(image.offsets), image.next)
    answers = zip(image.offsets, image.counts, image.digests, strict=True)
    publisher.answers.update(zip(numbers, answers, strict=True))
    return publisher


def _restore_fields(target: object, image: msgspec.Struct, except_for: tuple[str, ...]) -> None:
    """Sets the attributes of `target` that have the names of the image's fields."""
    for name in image.__struct_fields__:
        if name not in except_for:
            setattr(target, name, getattr(image, name))


def _effect(image: EffectImage) -> tuple[str, str, Effect]:
    effect = Effect(image.status, image.owner, image.lease_until, image.text, image.expires)
    return image.group, image.effect_key, effect


def _restore_group(state: BrokerState, topic: Topic, image: GroupImage) -> None:
    group = Group(image.id, image.name, topic, image.created_ms)
    for index, kept in enumerate(image.progress):
        progress = Progress(group, index, kept.first_offset)
        _restore_fields(progress, kept, except_for=("unfinished", "ready"))
        for entry in kept.unfinished:
            _restore_entry(progress, entry)
        for offset in kept.ready:
            progress.ready[offset] = progress.unfinished[offset]
        topic.partitions[index].backlog.restore(progress)
        group.progress.append(progress)
    topic.groups[group.name] = group
    state.groups[group.id] = group


def _restore_entry(progress: Progress, image: EntryImage) -> None:
    entry = Unfinished(progress, image.offset, image.size, image.policy, image.effect_key)
    entry.state = image.state
    entry.attempts = image.attempts
    entry.owner = image.owner
    entry.previous_owner = image.previous_owner
    entry.last_error = image.last_error
    entry.delivered_at = image.delivered_at
    entry.previous_delivered_at = image.previous_delivered_at
    entry.lease_ms = image.lease_ms
    _restore_numbers(entry, image)
    progress.unfinished[image.offset] = entry
    if image.state == WAITING:
        entry.retry_at = image.until
    elif image.state == DYING:
        entry.retry_at = DEAD
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
