"""The SDK: a blocking and an async client of a broker, and a worker for each.

    from penstock.client import Client

    with Client("http://127.0.0.1:8080") as client:
        client.create_topic("orders")
        client.produce("orders", "hello", key="user-1")
        for delivery in client.consume("orders", "billing", wait_s=1):
            client.ack(delivery)

        client.cache("default").put("greeting", "hello", ttl_ms=60_000)
        with client.stream("default").subscribe() as events:
            client.stream("default").publish("hello")
            print(next(events))

        with client.connect() as socket:  # the same over one WebSocket; extra `websocket`
            socket.stream("default").publish("hello", ack="none")

A name is imported when it is first used, so that a program which needs only errors and envelopes
does not load an HTTP client. `requests`, `registry`, `ranges`, `journal`, `streams`, `caches`,
`transactions`, `deliveries` and `feeds` decide what goes over the wire and do no IO; `aio` sends
it, and so does `sync`, which `scripts/generate_sync_client.py` generates from `aio`. Over the
WebSocket, `socket_frames`, `socket_channels` and `socket_exchange` decide, `socket_core` keeps the
connection, and `aio_socket` and `sync_socket` offer it. Errors are those of
`penstock.model.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient
    from penstock.client.aio_socket import AsyncSocket
    from penstock.client.async_worker import AsyncWorker
    from penstock.client.caches import (
        CacheCheck,
        CacheDelete,
        CachedEntry,
        CacheIncr,
        CachePut,
    )
    from penstock.client.deliveries import Delivery, DeliveryRef
    from penstock.client.positions import PositionFile
    from penstock.client.ranges import KeptEvent
    from penstock.client.requests import EffectRef, NewMessage
    from penstock.client.sync import Client
    from penstock.client.sync_events import Events, Producer, StreamEvent
    from penstock.client.sync_feeds import Subscription, Watch
    from penstock.client.sync_handles import CacheHandle, StreamHandle
    from penstock.client.sync_socket import Socket
    from penstock.client.sync_transactions import Transaction
    from penstock.client.work import Reject, RetryLater
    from penstock.client.worker import Worker
    from penstock.model.caching import CacheValue, WatchEvent
    from penstock.model.envelope import Envelope, RetryPolicy

_HOMES = {
    "AsyncClient": "penstock.client.aio",
    "AsyncSocket": "penstock.client.aio_socket",
    "AsyncWorker": "penstock.client.async_worker",
    "CacheCheck": "penstock.client.caches",
    "CacheDelete": "penstock.client.caches",
    "CachedEntry": "penstock.client.caches",
    "CacheHandle": "penstock.client.sync_handles",
    "CacheIncr": "penstock.client.caches",
    "CachePut": "penstock.client.caches",
    "CacheValue": "penstock.model.caching",
    "Client": "penstock.client.sync",
    "Delivery": "penstock.client.deliveries",
    "DeliveryRef": "penstock.client.deliveries",
    "EffectRef": "penstock.client.requests",
    "Envelope": "penstock.model.envelope",
    "Events": "penstock.client.sync_events",
    "KeptEvent": "penstock.client.ranges",
    "NewMessage": "penstock.client.requests",
    "PositionFile": "penstock.client.positions",
    "Producer": "penstock.client.sync_events",
    "Reject": "penstock.client.work",
    "RetryLater": "penstock.client.work",
    "RetryPolicy": "penstock.model.envelope",
    "Socket": "penstock.client.sync_socket",
    "StreamEvent": "penstock.client.sync_events",
    "StreamHandle": "penstock.client.sync_handles",
    "Subscription": "penstock.client.sync_feeds",
    "Transaction": "penstock.client.sync_transactions",
    "Watch": "penstock.client.sync_feeds",
    "WatchEvent": "penstock.model.caching",
    "Worker": "penstock.client.worker",
}

__all__ = [
    "AsyncClient",
    "AsyncSocket",
    "AsyncWorker",
    "CacheCheck",
    "CacheDelete",
    "CacheHandle",
    "CacheIncr",
    "CachePut",
    "CacheValue",
    "CachedEntry",
    "Client",
    "Delivery",
    "DeliveryRef",
    "EffectRef",
    "Envelope",
    "Events",
    "KeptEvent",
    "NewMessage",
    "PositionFile",
    "Producer",
    "Reject",
    "RetryLater",
    "RetryPolicy",
    "Socket",
    "StreamEvent",
    "StreamHandle",
    "Subscription",
    "Transaction",
    "Watch",
    "WatchEvent",
    "Worker",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
