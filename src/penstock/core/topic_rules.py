"""Rules of topics and groups: creation, configuration and deletion.

Deciding changes nothing: it returns records or raises. Must not know messages.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.api.topics import NO_RETRIES, RetryDefaults
from penstock.core.produce import find_topic, reserved
from penstock.core.state import BrokerState
from penstock.core.stream_logs import no_subscription
from penstock.core.tenancy import find
from penstock.core.topics import Topic
from penstock.model.audit import AUDIT_TOPIC
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from penstock.model.limits import MAX_BACKOFF_MS, MAX_GROUPS, MAX_OFFSET, MAX_PARTITIONS
from penstock.model.options import check_number
from penstock.model.records import (
    GroupCreated,
    GroupDeleted,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
)
from penstock.model.scopes import DEFAULT_SCOPE, is_stream_log, plain_name, quoted, split_name
from penstock.model.tenancy import Kind, Path

_CHANGE = "PATCH or `penstock topic configure` changes it"


def decide_create_topic(
    state: BrokerState,
    name: str,
    partitions: int,
    now_ms: int,
    after_archive: bool | None = None,
    retries: RetryDefaults = NO_RETRIES,
) -> TopicCreated | None:
    """Returns None if a topic with that full name and number of partitions exists. Raises if a
    requested setting differs from that of the existing topic."""
    if partitions < 1:
        raise InvalidArgument("partitions must be 1 or more")
    if partitions > MAX_PARTITIONS:
        raise InvalidArgument(f"partitions must be at most {MAX_PARTITIONS}")
    _check_retries(retries)
    if plain_name(name) == AUDIT_TOPIC:
        raise reserved(AUDIT_TOPIC)
    topic = state.topics.get(name)
    if topic is None:
        _check_namespace(state, name)
        return TopicCreated(
            state.next_id,
            now_ms,
            name,
            partitions,
            bool(after_archive),
            retries.max_attempts or 0,
            retries.retry_backoff_ms or 0,
            retries.retry_max_backoff_ms or 0,
        )
    if len(topic.partitions) != partitions:
        raise FailedPrecondition(
            f"topic {plain_name(name)!r} exists with {len(topic.partitions)} partitions; they "
            "cannot change"
        )
    if after_archive is not None and topic.after_archive != after_archive:
        known = "with" if topic.after_archive else "without"
        raise FailedPrecondition(
            f"topic {plain_name(name)!r} exists {known} after_archive; {_CHANGE}"
        )
    for setting, wanted in msgspec.structs.asdict(retries).items():
        if wanted is not None and wanted != getattr(topic, setting):
            raise FailedPrecondition(
                f"topic {plain_name(name)!r} exists with {setting} {getattr(topic, setting)}; "
                f"{_CHANGE}"
            )
    return None


def _check_namespace(state: BrokerState, name: str) -> None:
    """Raises if the registry does not have the topic's namespace. The default namespace needs no
    entry: its topics are older than the registry."""
    scope, _ = split_name(name)
    if scope != DEFAULT_SCOPE:
        find(state.registry, "namespace", (*scope, ""))


def decide_delete_topic(state: BrokerState, name: str, now_ms: int) -> TopicDeleted:
    return TopicDeleted(_find_own(state, name).id, now_ms)


def _find_own(state: BrokerState, name: str) -> Topic:
    """Returns a topic that users may change."""
    topic = find_topic(state, name)
    if topic.is_reserved:
        raise reserved(name)
    return topic


def decide_delete_within(
    state: BrokerState, kind: Kind, path: Path, now_ms: int, *, cascade: bool
) -> list[TopicDeleted]:
    """Deletes the topics of a tenant or namespace that is deleted. Raises if there are topics and
    `cascade` is not set. Topics of the default namespace are never deleted this way: they do not
    need its entry, and the registry of an older broker could be changed without harm to them."""
    if kind not in ("tenant", "namespace"):
        return []
    found = list(topics_within(state, kind, path))
    what = f"{kind} {'/'.join(filter(None, path))!r}"
    if found and not cascade:
        raise FailedPrecondition(
            f"{what} has {len(found)} topics; use cascade to delete its content too"
        )
    if any(split_name(topic.name)[0] == DEFAULT_SCOPE for topic in found):
        raise FailedPrecondition(
            f"{what} has topics of the default namespace; delete them first, one by one"
        )
    return [TopicDeleted(topic.id, now_ms) for topic in found]


def topics_within(state: BrokerState, kind: Kind, path: Path) -> Iterator[Topic]:
    """Returns the topics of a tenant or namespace, without the logs of streams."""
    wanted = path[:1] if kind == "tenant" else path[:2]
    for name, topic in state.topics.items():
        if not is_stream_log(name) and split_name(name)[0][: len(wanted)] == wanted:
            yield topic


def decide_configure_topic(
    state: BrokerState,
    name: str,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
    after_archive: bool | None = None,
    retries: RetryDefaults = NO_RETRIES,
) -> TopicConfigured:
    """Changes settings. None leaves a value as it is; 0 removes a limit, or selects the broker's
    backoff."""
    topic = _find_own(state, name)
    age = topic.retention_ms if retention_ms is None else retention_ms
    size = topic.retention_bytes if retention_bytes is None else retention_bytes
    check_number("retention_ms", age)
    check_number("retention_bytes", size)
    _check_retries(retries)
    waits = topic.after_archive if after_archive is None else after_archive
    attempts, backoff, longest = (
        getattr(topic, setting) if value is None else value
        for setting, value in msgspec.structs.asdict(retries).items()
    )
    return TopicConfigured(topic.id, now_ms, age, size, waits, attempts, backoff, longest)


def _check_retries(retries: RetryDefaults) -> None:
    for setting, value in msgspec.structs.asdict(retries).items():
        most = MAX_OFFSET if setting == "max_attempts" else MAX_BACKOFF_MS
        if value is not None:
            check_number(setting, value, 0, most)


def decide_create_group(
    state: BrokerState, topic: Topic, name: str, now_ms: int
) -> GroupCreated | None:
    if topic.is_reserved:
        raise reserved(topic.name)
    if name in topic.groups:
        return None
    if len(topic.groups) >= MAX_GROUPS:
        raise ResourceExhausted(
            f"there are {MAX_GROUPS} groups already; delete those that nobody uses", limit="groups"
        )
    return GroupCreated(state.next_id, topic.id, now_ms, name)


def decide_delete_group(
    state: BrokerState, topic_name: str, name: str, now_ms: int
) -> GroupDeleted:
    topic = find_topic(state, topic_name)
    group = topic.groups.get(name)
    if group is None:
        if is_stream_log(topic_name):
            raise NotFound(no_subscription(topic_name, name))
        raise NotFound(f"unknown group {name!r} of topic {quoted(topic_name)}")
    return GroupDeleted(group.id, topic.id, now_ms)
