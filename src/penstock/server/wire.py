"""The shapes of request bodies, decoded strictly: unknown members are refused at every level.

`null` means absent, as it does for clients of the contract. Meaning is checked in forms.py.
"""

from __future__ import annotations

import msgspec


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Base of every request body."""


class CacheRowBody(_Strict):
    """A line of a piece for a cache; `value` is base64, and without one the key is deleted."""

    key: str | None = None
    value: bytes | None = None
    ttl_ms: int | None = None


class PartBody(_Strict):
    part: int | None = None
    attempt: str | None = None
    pieces: int | None = None
    rows: int | None = None


class CommitBody(_Strict):
    parts: list[PartBody]
    once: bool = False


class TopicBody(_Strict):
    name: str | None = None
    partitions: int | None = None
    after_archive: bool | None = None
    max_attempts: int | None = None
    retry_backoff_ms: int | None = None
    retry_max_backoff_ms: int | None = None


class TopicSettingsBody(_Strict):
    retention_ms: int | None = None
    retention_bytes: int | None = None
    after_archive: bool | None = None
    max_attempts: int | None = None
    retry_backoff_ms: int | None = None
    retry_max_backoff_ms: int | None = None


class ReachedBody(_Strict):
    partition: int | None = None
    next: int | None = None


class ProgressBody(_Strict):
    topic_id: int | None = None
    partitions: list[ReachedBody] | None = None


class ArchivedBody(_Strict):
    next: int | None = None


class EffectBody(_Strict):
    tenant_id: str | None = None
    topic: str | None = None
    group: str | None = None
    key: str | None = None
    owner: str | None = None


class LookedUpEffectBody(_Strict):
    """The query of a look-up, for its description."""

    tenant_id: str | None = None
    topic: str | None = None
    group: str | None = None
    key: str | None = None


class LeasedEffectBody(EffectBody):
    lease_ms: int | None = None


class CommitEffectBody(EffectBody):
    result: str | None = None


class FailEffectBody(EffectBody):
    reason: str | None = None
