"""What the API offers, route by route, in words and examples: the source of the documentation.

Invariant: every route of the lane's table is described here, and no other; a test compares them.
Shapes come from the structs that decode and encode the wire, so they cannot drift from it. Must
not know how a document or a page looks.
"""

from __future__ import annotations

from penstock.server.operations import (
    caches,
    registry,
    streams,
    tenants,
)
from penstock.server.operations.endpoint import Answer, Operation

__all__ = ["OPERATIONS", "TAGS", "Answer", "Operation"]

TAGS = {
    "Topics": "Topics, their partitions and their groups.",
    "Messages": "Produce, consume and settle.",
    "Ranges": "Read what is stored, as data, without taking it.",
    "Writes": "Write rows by the batch, each once: stage them, then commit.",
    "Journal": "What happened to messages, as data.",
    "Effects": "Idempotency on the consumer's side: run a message's effect once for its key.",
    "Streams": "Publish to all who subscribe at that moment, at most once; and the WebSocket.",
    "Caches": "Values by key, with a TTL, versions, counters, transactions and watches.",
    "Tenants": "Tenants, their namespaces, and the streams and caches in those.",
    "Registry": "The registry as a whole, for those who follow it.",
    "Broker": "Probes and version.",
}

OPERATIONS: tuple[Operation, ...] = (
    *streams.OPERATIONS,
    *caches.OPERATIONS,
    *tenants.OPERATIONS,
    *registry.OPERATIONS,
)
