"""Checks every promise that core modules make of their state, for tests.

`check` reads the whole state and changes nothing but the backlog's cache. It must not know how a
state came about: live, replayed, or restored from an image, the same promises hold.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.cache import Cache, entry_bytes
from penstock.core.groups import DYING, IN_FLIGHT, READY, WAITING, Group, Progress
from penstock.core.groups import Unfinished as Entry
from penstock.core.idempotency import ProducedKeys
from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.model.access import ANY, BROKER
from penstock.model.limits import MAX_PUBLISH_ANSWERS, MAX_TOKENS
from penstock.model.permissions import ALL_PERMISSIONS
from penstock.model.records import DEAD
from penstock.model.scopes import Scope, is_stream_log, stream_log_name


class BrokenInvariant(Exception):
    """The state contradicts itself: a defect. The message names the promise and the place."""


def check(state: BrokerState) -> None:
    """Raises BrokenInvariant unless every promise of the core holds."""
    _check_names(state)
    for topic in state.topics.values():
        _check_topic(state, topic)
    _check_produced(state.produced)
    _check_effect_totals(state)
    _check_caches(state)
    _check_stream_logs(state)
    _check_writers(state)
    _check_transactions(state)
    _check_tokens(state)
    _check_access(state)


def _must(holds: bool, promise: str, *place: object) -> None:
    if not holds:
        raise BrokenInvariant(f"{promise}: {', '.join(map(str, place))}")


def _check_names(state: BrokerState) -> None:
    by_name, by_id = state.topics, state.topics_by_id
    _must(
        {topic.id: topic for topic in by_name.values()} == by_id
        and all(topic.name == name for name, topic in by_name.items()),
        "topics are known by name and by id alike",
        *by_name,
    )
    for scope in {each for topic in by_name.values() for each in _around(topic.scope)}:
        within = [topic for topic in by_name.values() if scope in _around(topic.scope)]
        _must(
            list(by_name.within(scope)) == within
            and by_name.plain_count(scope) == sum(not is_stream_log(t.name) for t in within),
            "topics are known by tenant and namespace",
            *scope,
        )
    of_topics = {group.id: group for topic in by_name.values() for group in topic.groups.values()}
    _must(of_topics == state.groups, "groups are those of the topics", *state.groups)
    ids = [*by_id, *of_topics]
    _must(len(ids) == len(set(ids)), "an id names one thing", *ids)
    _must(state.next_id > max(ids, default=0), "next_id is above every id", state.next_id, *ids)


def _check_topic(state: BrokerState, topic: Topic) -> None:
    ends = [partition.end_offset for partition in topic.partitions]
    stored = [partition.backlog.stored_msgs for partition in topic.partitions]
    _must(topic.next_offset == max(ends), "next_offset is past every offset", topic.name, *ends)
    _must(sum(stored) == topic.next_offset, "offsets rise by one", topic.name, *stored)
    for index, partition in enumerate(topic.partitions):
        _must(partition.index == index, "partitions are in order", topic.name, index)
        _check_partition(state, topic, partition)
    for name, group in topic.groups.items():
        _must(group.name == name and group.topic is topic, "a group knows its topic", name)
        _must(
            [progress.partition for progress in group.progress] == list(range(len(ends))),
            "a group has progress in every partition",
            topic.name,
            name,
        )
        _check_group(state, group)
    _check_effects(topic)
    _check_publishers(topic)


def _check_partition(state: BrokerState, topic: Topic, partition: Partition) -> None:
    place = (topic.name, partition.index)
    first, end, backlog = partition.first_offset, partition.end_offset, partition.backlog
    retained = backlog.retained_msgs()
    _must(0 <= first <= end, "first_offset is not past the end", *place, first, end)
    _must(0 <= retained <= end - first, "what is retained lies between the ends", *place, retained)
    _must((retained == 0) == (first == end), "first_offset is the oldest retained", *place, first)
    _must(backlog.retained_bytes() >= 0, "no more is trimmed than was stored", *place)
    groups = [group.progress[partition.index] for group in topic.groups.values()]
    msgs = backlog.stored_msgs - min((p.finished_msgs for p in groups), default=0)
    nbytes = backlog.stored_bytes - min((p.finished_bytes for p in groups), default=0)
    if not groups:
        msgs, nbytes = (0, 0) if backlog.is_stream else (retained, backlog.retained_bytes())
    buffered = (backlog.buffered_msgs(), backlog.buffered_bytes())
    _must(buffered == (msgs, nbytes), "buffered is what the slowest group owes", *place, buffered)
    _must(msgs <= retained, "what is buffered is retained", *place, msgs, retained)
    _must(
        backlog.safe_msgs <= backlog.stored_msgs
        or backlog.safe_msgs <= backlog.stored_msgs + state.limits.max_partition_msgs - msgs,
        "no more room is promised than there is",
        *place,
    )
    _must(
        backlog.safe_bytes <= backlog.stored_bytes
        or backlog.safe_bytes <= backlog.stored_bytes + state.limits.max_partition_bytes - nbytes,
        "no more bytes are promised than there are",
        *place,
    )


def _check_group(state: BrokerState, group: Group) -> None:
    for progress in group.progress:
        _check_progress(group.topic, progress)
    entries = [entry for progress in group.progress for entry in progress.unfinished.values()]
    offsets = Counter(entry.offset for entry in entries)
    twice = [offset for offset, count in offsets.items() if count > 1]
    _must(not twice, "a message is unfinished once in a group", group.name, *twice)
    effects = Counter(entry.effect_key for entry in entries if entry.effect_key)
    _must(effects == group.open_effects, "open_effects counts the keys", group.name, effects)


def _check_progress(topic: Topic, progress: Progress) -> None:
    place = (topic.name, progress.group.name, progress.partition)
    partition = topic.partitions[progress.partition]
    cursor, unfinished = progress.cursor, progress.unfinished
    _must(
        progress.first_offset <= cursor <= max(partition.end_offset, progress.first_offset),
        "the cursor is within the partition",
        *place,
        cursor,
    )
    _must(partition.first_offset <= progress.floor(), "what is unfinished is retained", *place)
    _must(
        all(progress.first_offset <= offset < cursor for offset in unfinished),
        "what is unfinished is below the cursor",
        *place,
        cursor,
        *unfinished,
    )
    _must(
        -1 <= progress.last_acked < cursor and progress.last_acked not in unfinished,
        "last_acked is done",
        *place,
        progress.last_acked,
    )
    flying = sum(entry.state == IN_FLIGHT for entry in unfinished.values())
    _must(progress.in_flight == flying, "in_flight counts", *place, progress.in_flight, flying)
    ready = {offset: entry for offset, entry in unfinished.items() if entry.state == READY}
    _must(dict(progress.ready) == ready, "ready holds what is ready", *place, *progress.ready)
    for offset, entry in unfinished.items():
        _must(entry.offset == offset, "an entry is under its offset", *place, offset)
        _must(entry.progress is progress, "an entry knows its progress", *place, offset)
        _check_entry(topic, entry, place)
    _check_counters(partition, progress, place)


def _check_entry(topic: Topic, entry: Entry, place: tuple[object, ...]) -> None:
    place = (*place, entry.offset, entry.state, entry.attempts)
    _must(
        entry.attempts <= entry.delivery <= entry.deliveries,
        "a delivery's number is at least its attempt's",
        *place,
        entry.delivery,
        entry.deliveries,
    )
    if entry.state == IN_FLIGHT:
        _must(entry.attempts >= 1 and entry.owner != "", "a lease has an owner", *place)
    elif entry.state == WAITING:
        _must(entry.retry_at > 0, "a waiting entry has the time of its retry", *place)
    elif entry.state == DYING:
        _must(
            entry.attempts >= 1 and not topic.is_dead_letter,
            "only what was tried, and is no dead letter, is dying",
            *place,
        )
        _must(entry.retry_at == DEAD, "what is dying has no retry", *place)
    else:
        _must(entry.state == READY, "an entry is in one of four states", *place)
        _must(entry.attempts >= 0, "attempts are counted from 0", *place)
        _must(bool(entry.attempts) == bool(entry.owner), "who had it last is its owner", *place)


def _check_counters(partition: Partition, progress: Progress, place: tuple[object, ...]) -> None:
    """Checks the counters of a group in a partition. Free history counts as unfinished until it
    is finished, without being charged."""
    backlog, unfinished = partition.backlog, progress.unfinished
    _must(progress.free_msgs >= 0 and progress.free_bytes >= 0, "what is free is left", *place)
    _must(
        progress.finished_msgs <= backlog.stored_msgs
        and progress.finished_bytes <= backlog.stored_bytes,
        "no more is finished than was stored",
        *place,
    )
    lag = backlog.stored_msgs - progress.finished_msgs + progress.free_msgs
    size = sum(entry.size for entry in unfinished.values())
    lag_bytes = backlog.stored_bytes - progress.finished_bytes + progress.free_bytes
    _must(lag >= len(unfinished) and lag_bytes >= size, "the lag has the unfinished in it", *place)
    ahead = max(partition.end_offset - progress.cursor, 0)
    new = lag - len(unfinished)
    _must(new <= ahead and bool(new) == bool(ahead), "the rest of the lag is ahead", *place, new)
    if progress.cursor >= partition.end_offset:
        _must(lag == len(unfinished), "at the end only the unfinished lag", *place, lag)
        _must(lag_bytes == size, "at the end only unfinished bytes lag", *place, lag_bytes, size)


def _check_produced(produced: ProducedKeys) -> None:
    items = produced.items()
    _must(
        len(items) == len(produced) and {key for key, _ in items} == set(produced._expires),
        "every produced key is in the order once",
        len(items),
        len(produced),
    )
    counts = Counter(identity.partition("/")[0] for identity, _ in items)
    _must(counts == produced._counts, "keys are counted by topic", *counts.items())


def _check_effect_totals(state: BrokerState) -> None:
    registries = [topic.effects for topic in state.topics.values()]
    totals = state.effect_totals
    _must(totals.entries == sum(map(len, registries)), "effect_totals counts", totals.entries)
    texts = sum(effects.text_bytes for effects in registries)
    _must(totals.text_bytes == texts, "effect_totals counts the texts", totals.text_bytes, texts)


def _check_effects(topic: Topic) -> None:
    effects = topic.effects
    texts = sum(len(effect.text) for _, _, effect in effects.items())
    _must(effects.text_bytes == texts, "text_bytes counts the texts", topic.name, texts)
    queued = set(effects._order)
    for name, key, effect in effects.items():
        group = topic.groups.get(name)
        is_open = group is not None and key in group.open_effects
        _must(
            is_open or (effect.expires, name, key) in queued,
            "an effect ends some time",
            topic.name,
            name,
            key,
        )


def _check_publishers(topic: Topic) -> None:
    for publisher in topic.publishers:
        answers = publisher.answers
        expected = range(publisher.next - len(answers), publisher.next)
        _must(
            list(answers) == list(expected) and len(answers) <= MAX_PUBLISH_ANSWERS,
            "the last numbers of a producer are remembered",
            topic.name,
            publisher.producer_id,
            *answers,
        )
        _must(
            all(offset + count <= topic.next_offset for offset, count, _ in answers.values()),
            "what was answered is stored",
            topic.name,
            publisher.producer_id,
        )


def _check_stream_logs(state: BrokerState) -> None:
    logs = {name for name in state.topics if is_stream_log(name)}
    durable = {
        stream_log_name(path): entry.stream
        for path, entry in state.registry.streams.items()
        if entry.stream is not None and entry.stream.durable
    }
    _must(logs == durable.keys(), "every durable stream has its log", *logs, *durable)
    for name, config in durable.items():
        topic = state.topics[name]
        _must(
            (topic.retention_ms, topic.retention_bytes)
            == (config.retention_ms, config.retention_bytes),
            "a stream's log keeps as long as the stream says",
            name,
        )


def _check_caches(state: BrokerState) -> None:
    registered = {entry.id: entry for entry in state.registry.caches.values()}
    _must(registered.keys() == state.caches.keys(), "caches are the registry's", *state.caches)
    for cache_id, cache in state.caches.items():
        entry = registered[cache_id]
        _must(cache.id == cache_id and cache.path == entry.path, "a cache knows its name", cache_id)
        _must(
            entry.cache is not None and cache.is_durable == entry.cache.durable,
            "a cache is what the registry says",
            cache_id,
        )
        _check_cache(cache)
    for scope in {each for cache in state.caches.values() for each in _around(cache.path[:2])}:
        of_scope = [c.id for c in state.caches.values() if scope in _around(c.path[:2])]
        known = [cache.id for cache in state.caches.within(scope)]
        _must(known == of_scope, "caches are known by tenant and namespace", *scope)
    total = sum(cache.bytes for cache in state.caches.values())
    _must(state.cache_memory.bytes == total, "cache_memory counts", state.cache_memory.bytes, total)


def _check_cache(cache: Cache) -> None:
    nbytes = sum(entry_bytes(key, entry.value) for key, entry in cache.entries.items())
    _must(cache.bytes == nbytes, "bytes counts the entries", *cache.path, cache.bytes, nbytes)
    versions = [entry.version for entry in cache.entries.values()]
    _must(len(set(versions)) == len(versions), "a version is of one change", *cache.path)
    _must(
        cache.first_version <= cache.version
        and all(cache.first_version < version <= cache.version for version in versions),
        "a cache's version is not below its entries'",
        *cache.path,
        cache.version,
    )


def _check_writers(state: BrokerState) -> None:
    producers = [writer.producer for writer in state.writers]
    _must(len(producers) == len(set(producers)), "a producer is known once", *producers)
    for writer in state.writers:
        for batch, storing in writer.storing.items():
            place = (writer.producer, batch, storing.done, storing.rows)
            is_known = storing.batch == batch <= writer.last_batch
            _must(is_known, "what is being stored is committed", *place)
            _must(0 <= storing.done < storing.rows, "a batch is stored until it is done", *place)
            rows = sum(piece.rows for piece in storing.pieces)
            _must(rows == storing.rows, "a batch's rows are those of its pieces", *place, rows)


def _check_transactions(state: BrokerState) -> None:
    transactions = state.transactions
    items = transactions.items()
    ids = {each.transaction_id for each in items}
    _must(
        len(items) == len(transactions) == len(ids),
        "every transaction is in the order once",
        len(items),
        len(transactions),
    )
    nbytes = sum(len(each.answer) for each in items)
    _must(transactions.answer_bytes == nbytes, "answer_bytes counts the answers", nbytes)


def _check_tokens(state: BrokerState) -> None:
    _must(len(state.tokens) <= MAX_TOKENS, "there is room for every token", len(state.tokens))
    namespaces = state.registry.namespaces
    for token in state.tokens:
        place = (token.id, token.tenant_id, token.namespace)
        digests = [token.digest, *([token.old_digest] if token.old_digest else [])]
        _must(all(len(digest) == 32 for digest in digests), "a token has hashes only", *place)
        _must(bool(token.old_digest) == bool(token.old_until_ms), "an old secret ends", *place)
        if token.tenant_id is None:
            _must(token.namespace is None, "a namespace is one of a tenant", *place)
        elif token.namespace is None:
            is_there = (token.tenant_id, "", "") in state.registry.tenants
            _must(is_there, "a token's tenant exists", *place)
        else:
            is_there = (token.tenant_id, token.namespace, "") in namespaces
            _must(is_there, "a token's namespace exists", *place)


def _check_access(state: BrokerState) -> None:
    access, registry = state.access, state.registry
    indexed = [rule for rules in access.by_subject.values() for rule in rules.values()]
    _must(
        sorted(rule.id for rule in indexed) == sorted(access.rules)
        and all(access.rules[rule.id] is rule for rule in indexed),
        "every rule is found by its subject",
        *access.rules,
    )
    for rule in access.rules.values():
        place = (rule.id, rule.tenant_id, rule.namespace, rule.resource)
        _must(0 < rule.id <= access.revision, "a rule's id is a revision", *place)
        _must(bool(rule.principal) != bool(rule.role), "a rule has one subject", *place)
        if rule.tenant_id:
            _must((rule.tenant_id, "", "") in registry.tenants, "a rule's tenant exists", *place)
            _must(
                rule.namespace.endswith(ANY)
                or (rule.tenant_id, rule.namespace, "") in registry.namespaces,
                "a rule's namespace exists, or is a pattern",
                *place,
            )
        else:
            _must(rule.resource == BROKER, "without a tenant there is only the broker", *place)
    for (tenant, name), role in access.roles.items():
        _must((role.tenant_id, role.name) == (tenant, name), "a role knows its name", tenant, name)
        _must(ALL_PERMISSIONS.issuperset(role.permissions), "a role has permissions", name)


def _around(scope: Scope) -> tuple[Scope, Scope]:
    """Returns the scope and that of its tenant."""
    return scope, (scope[0], "")
