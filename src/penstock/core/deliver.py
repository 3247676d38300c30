"""Deliveries: makes the records of deliveries, returns and skips.

Owns what a group must remember of a message, and when a message needs no delivery. Must not know
consumers or leases.
"""

from __future__ import annotations

from penstock.core.effects import effect_key
from penstock.core.groups import Group, Progress, Unfinished
from penstock.model.records import (
    COMMITTED,
    SKIPPED,
    Delivered,
    DeliveredItem,
    Finished,
    Returned,
    Skipped,
    Stored,
    stored_bytes,
)


def first_delivery(message: Stored) -> DeliveredItem:
    """Returns what the group keeps of a message that it has not seen before."""
    size = stored_bytes(message)
    envelope = message.envelope
    if envelope is None:
        return DeliveredItem(message.offset, size)
    key = effect_key(envelope.tenant_id, envelope.idempotency_key)
    return DeliveredItem(message.offset, size, envelope.retry_policy, key)


def redelivery(entry: Unfinished) -> DeliveredItem:
    return DeliveredItem(entry.offset, entry.size, entry.policy, entry.effect_key)


def delivered(
    progress: Progress, owner: str, items: list[DeliveredItem], lease_ms: int, now_ms: int
) -> Delivered:
    group = progress.group
    return Delivered(group.topic.id, group.id, progress.partition, now_ms, owner, items, lease_ms)


def returned(progress: Progress, offsets: list[int], now_ms: int) -> Returned:
    group = progress.group
    return Returned(group.topic.id, group.id, progress.partition, now_ms, offsets)


def is_effect_committed(group: Group, key: str, now_ms: int) -> bool:
    """Returns True if the effect is committed for the group: its message needs no delivery."""
    if not key:
        return False
    effect = group.topic.effects.get(group.name, key)
    if effect is None or effect.status != COMMITTED:
        return False
    return effect.expires > now_ms or key in group.open_effects


def skip(progress: Progress, item: DeliveredItem, now_ms: int) -> Skipped | Finished:
    """Finishes a message without delivery, at the cursor or after an earlier delivery."""
    group = progress.group
    if item.offset in progress.unfinished:
        return Finished(group.topic.id, group.id, progress.partition, now_ms, item.offset, SKIPPED)
    return Skipped(group.topic.id, group.id, progress.partition, now_ms, item.offset, item.size)
