"""Writes many messages to a broker, and consumes them, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from bench.lean_client import Asking, Item, ack_body, consume, post
from bench.processes import TOPIC
from bench.rows import BenchFailed

BATCH = 1000
CONNECTIONS = 4
VALUE = "v" * 100
PAYLOAD_BYTES = 108
"""Key and value of one message."""
GROUP = "bench"


def batch_request(first: int = 0, key_prefix: str = "") -> bytes:
    """Makes a batch with keys of eight bytes and, with a prefix, idempotency keys."""
    items = []
    for number in range(first, first + BATCH):
        envelope = f',"envelope":{{"idempotency_key":"{key_prefix}{number}"}}' if key_prefix else ""
        items.append(f'{{"topic":"{TOPIC}","key":"{number:08}","value":"{VALUE}"{envelope}}}')
    return post("/v1/produce/batch", f"[{','.join(items)}]".encode())


def batch_requests(count: int, key_prefix: str = "") -> Iterator[bytes]:
    """Makes requests for `count` messages in total."""
    for first in range(0, count, BATCH):
        yield batch_request(first, key_prefix)


async def produce_batches(port: int, requests: Iterator[bytes]) -> int:
    """Sends the requests, one at a time per connection; returns how many messages were stored."""

    async def send() -> int:
        connection = await Asking().connect(port)
        stored = 0
        for request in requests:
            answer = await connection.ask(request)
            # A duplicate has no offset: every offset is a stored message.
            if answer.count(b'"offset":') != BATCH:
                raise BenchFailed(f"not every message was stored: {answer[:500].decode()}")
            stored += BATCH
        connection.close()
        return stored

    return sum(await asyncio.gather(*(send() for _ in range(CONNECTIONS))))


async def consume_and_ack(port: int, count: int, group: str = GROUP, enough: int = BATCH) -> None:
    """One consumer that takes `count` messages and acks what has arrived, as soon as there are
    `enough` or no more at the moment."""
    arrived: asyncio.Queue[list[Item] | Exception] = asyncio.Queue()
    stream = await consume(port, TOPIC, group, arrived.put_nowait, arrived.put_nowait)
    acks = await Asking().connect(port)
    left = count
    while left:
        items = await _all_of(arrived, enough)
        bodies = b",".join(ack_body(TOPIC, group, item) for item in items)
        answer = await acks.ask(post("/v1/ack/batch", b"[" + bodies + b"]"))
        if answer.count(b'"acked"') != len(items):
            raise BenchFailed(f"not every message was acked: {answer[:500].decode()}")
        left -= len(items)
    stream.close()
    acks.close()


async def _all_of(arrived: asyncio.Queue[list[Item] | Exception], enough: int) -> list[Item]:
    items: list[Item] = []
    while not items or (not arrived.empty() and len(items) < enough):
        got = await arrived.get()
        if isinstance(got, Exception):
            raise got
        items += got
    return items
