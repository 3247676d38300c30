"""What workers have in common, whether of threads or of asyncio. No IO."""

from __future__ import annotations

import logging

from penstock.client.deliveries import Delivery
from penstock.client.requests import EffectRef

BUSY_WAIT_S = 0.5
"""Between two looks at an effect that another worker runs."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between two tries while the broker is away."""

NOT_BEGUN = "the worker stopped before it began"

log = logging.getLogger("penstock.worker")


def effect_of(delivery: Delivery, owner: str) -> EffectRef:
    envelope = delivery.envelope
    return EffectRef(
        topic=delivery.topic,
        group=delivery.group,
        key=envelope.idempotency_key or f"offset-{delivery.offset}",
        owner=owner,
        tenant_id=envelope.tenant_id,
    )


def failure_of(delivery: Delivery, error: Exception) -> str:
    """What the broker is told of an error in a handler, which is logged."""
    log.warning("handling %s failed", place_of(delivery), exc_info=error)
    return f"{type(error).__name__}: {error}"


def place_of(delivery: Delivery) -> str:
    return f"{delivery.topic}, partition {delivery.partition}, offset {delivery.offset}"
