"""The answers of the broker, as types. Members that a newer broker adds are ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from penstock.model.streams import Lag


class CreatedTopic(msgspec.Struct, frozen=True):
    """`exists`: the topic was there before, with as many partitions."""

    status: Literal["created", "exists"]
    name: str
    partitions: int


class Produced(msgspec.Struct, frozen=True):
    """`topic` is the topic of the request. `partition` and `offset` say where the message is
    stored; if it was routed, that is in another topic. They are None for a duplicate of an
    idempotency key, which is not stored, and with an older broker, which does not send them."""

    topic: str
    partition: int | None = None
    offset: int | None = None
    duplicate: bool = False


class Begun(msgspec.Struct, frozen=True):
    """`RUN`: run the effect; if it failed before, `last_error` says why. `COMMITTED`: it was run
    already, with this result."""

    status: Literal["RUN", "COMMITTED"]
    result: str = ""
    last_error: str = ""


class EffectStatus(msgspec.Struct, frozen=True):
    """`lease_ms` is the rest of the owner's lease; `last_error` is why the effect failed last."""

    status: Literal["PENDING", "COMMITTED", "FAILED"]
    owner: str
    lease_ms: int
    result: str
    last_error: str


class Partition(msgspec.Struct, frozen=True):
    """`buffered` counts what the slowest group has not finished; the limits apply to it."""

    partition: int
    first_offset: int
    next_offset: int
    retained_msgs: int
    retained_bytes: int
    buffered_msgs: int
    buffered_bytes: int


class GroupProgress(msgspec.Struct, frozen=True):
    """One group in one partition. `lag` counts unfinished messages, those in flight too."""

    partition: int
    last_acked: int
    next_offset: int
    in_flight: int
    unfinished: int
    lag: int


class Group(msgspec.Struct, frozen=True):
    name: str
    consumers: int
    partitions: list[GroupProgress]


class Topic(msgspec.Struct, frozen=True):
    """A retention or `max_attempts` of 0 means no limit; a backoff of 0 means the broker's setting.
    `after_archive`: retention keeps every message until the group `archive` has finished it."""

    name: str
    next_offset: int
    retention_ms: int
    retention_bytes: int
    partitions: list[Partition]
    groups: list[Group]
    after_archive: bool = False
    max_attempts: int = 0
    retry_backoff_ms: int = 0
    retry_max_backoff_ms: int = 0


class Version(msgspec.Struct, frozen=True):
    """`durability` says in words what a success of this broker means. `max_message_bytes` is None
    with an older broker, which does not send it."""

    version: str
    commit: str
    wal_enabled: bool
    fsync: str = ""
    durability: str = ""
    max_message_bytes: int | None = None


class Health(msgspec.Struct, frozen=True):
    """`warning` says what an operator should look at; only `ready` has one."""

    status: str
    warning: str = ""


class Tenant(msgspec.Struct, frozen=True):
    tenant_id: str
    created_ms: int
    revision: int


class Namespace(msgspec.Struct, frozen=True):
    tenant_id: str
    namespace: str
    created_ms: int
    revision: int


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream and its settings in force. `origins` says for each setting whether it is the
    stream's or the broker's. `subscribers` is None in a list."""

    name: str
    tenant_id: str
    namespace: str
    delivery: str
    durable: bool
    ordering: str
    retention: str | None
    retention_ms: int
    retention_bytes: int = 0
    event_queue_depth: int
    event_queue_bytes: int
    pub_queue_depth: int
    publish_queue_wait_timeout_ms: int
    pub_workers_per_conn: int
    lag_alert_events: int
    disconnect_slow_ms: int
    origins: dict[str, str]
    created_ms: int
    revision: int
    subscribers: int | None = None


class NamedSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """A named subscription. `next_offset` is the offset of the next event that it has not been
    given; `unacked` events were given to a subscriber and are not acked."""

    name: str
    subscribers: int
    next_offset: int
    unacked: int
    messages_behind: int


class StreamSubscriptions(msgspec.Struct, frozen=True, kw_only=True):
    """The subscriptions of a stream. Iterating gives the lag of those that are open without a name.

    A durable stream has `named` subscriptions, and the offsets of the first event that it keeps and
    of the next one that is published."""

    subscriptions: list[Lag]
    named: list[NamedSubscription] = []
    first_offset: int | None = None
    next_offset: int | None = None

    def __iter__(self) -> Iterator[Lag]:
        return iter(self.subscriptions)

    def __len__(self) -> int:
        return len(self.subscriptions)

    def __bool__(self) -> bool:
        return bool(self.subscriptions or self.named)


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A cache and its settings in force. A limit of None means that the cache has no limit of its
    own. `entries` and `bytes` are None in a list."""

    name: str
    tenant_id: str
    namespace: str
    durable: bool
    consistency: str
    ttl_precision: str
    max_entries: int | None
    max_bytes: int | None
    eviction_policy: str
    cache_memory_bytes: int
    origins: dict[str, str]
    created_ms: int
    revision: int
    entries: int | None = None
    bytes: int | None = None


class BearerToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret. `expires_ms` is 0 if it never expires; the secret before the last
    rotation is valid until `old_until_ms`."""

    id: str
    principal: str
    roles: list[str]
    admin: bool
    created_ms: int
    tenant_id: str | None = None
    namespace: str | None = None
    expires_ms: int = 0
    old_until_ms: int = 0


class NewBearerToken(BearerToken, frozen=True, kw_only=True):
    """`token` is the text to send."""

    token: str


class RegistryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`follower`: the registry is a copy of the one at `control_plane`, as of `last_sync_ms`."""

    role: Literal["own", "follower"]
    instance: str
    epoch: int
    revision: int
    control_plane: str = ""
    connected: bool = True
    last_sync_ms: int | None = None
    last_error: str | None = None


class AppliedChange(msgspec.Struct, frozen=True, rename={"before": "from", "after": "to"}):
    setting: str
    before: Any
    after: Any


class AppliedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of a plan. `conflict`: it cannot be created or changed, for this `reason`."""

    action: Literal["create", "change", "keep", "conflict"]
    kind: str
    name: str
    changes: list[AppliedChange] = []
    reason: str = ""


class AppliedPlan(msgspec.Struct, frozen=True):
    """`applied` is False for a dry run."""

    applied: bool
    steps: list[AppliedStep]


class TenantQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's quota, or a namespace's. A limit of None is none. `refused` counts refusals since
    the broker started."""

    tenant_id: str
    namespace: str | None
    limits: dict[str, int | str | None]
    used: dict[str, int]
    refused: dict[str, int]


class GrantedRule(msgspec.Struct, frozen=True, kw_only=True):
    """An access rule. One without `tenant_id` is about the broker itself."""

    id: int
    tenant_id: str = ""
    namespace: str = ""
    resource: str
    principal: str = ""
    role: str = ""
    permissions: list[str]
    created_ms: int


class RoleDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A role and its permissions."""

    name: str
    permissions: list[str]


class AccessDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether something is allowed, and why. `rule` is the one that allows it, if one does."""

    allowed: bool
    reason: str
    rule: GrantedRule | None = None


class SenderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """You, as the broker sees you. `tenant_id` and `namespace` are where names without one are
    looked up. `is_bound`: your credential reaches no other tenant. Without `access_control` there
    is no `principal`. `expires_ms` is 0 if the credential does not expire."""

    access_control: bool
    tenant_id: str
    namespace: str
    is_bound: bool
    admin: bool
    roles: list[str]
    principal: str = ""
    expires_ms: int = 0


class PublishedAt(msgspec.Struct, frozen=True):
    """The place of events in a durable stream. `offset` is that of the first. A `duplicate` was
    stored by an earlier publish, which had this offset; -1 if the broker no longer knows it."""

    offset: int = -1
    duplicate: bool = False
