"""Produces at a steady pace, whatever the broker does, and measures how long each takes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from statistics import quantiles

from bench.batches import VALUE
from bench.lean_client import Connection, connect, post
from bench.pace import keep_pace
from bench.processes import TOPIC

CONNECTIONS = 16
_REQUEST = post("/v1/produce", f'{{"topic":"{TOPIC}","key":"k","value":"{VALUE}"}}'.encode())


class PacedProduce:
    """Sends without waiting for answers, so that a stall of the broker shows in the times."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._sent: list[deque[float]] = [deque() for _ in range(CONNECTIONS)]
        self._took: list[float] = []
        self._unanswered = 0
        self._error: Exception | None = None
        self._settled = asyncio.Event()

    async def run(self, port: int, seconds: float) -> float:
        """Returns the 99th percentile of the times to an answer, in ms."""
        connections = [
            await connect(port, partial(self._replied, sent), self._failed) for sent in self._sent
        ]
        await keep_pace(self._per_second, seconds, partial(self._send, connections))
        while self._unanswered and self._error is None:
            self._settled.clear()
            await self._settled.wait()
        for connection in connections:
            connection.close()
        if self._error is not None:
            raise self._error
        return quantiles(self._took, n=100)[98] * 1000

    def _send(self, connections: list[Connection], number: int) -> None:
        if self._error is not None:
            raise self._error
        lane = number % CONNECTIONS
        self._sent[lane].append(time.perf_counter())
        connections[lane].write(_REQUEST)
        self._unanswered += 1

    def _replied(self, sent: deque[float], _: int, body: bytes) -> None:
        self._took.append(time.perf_counter() - sent.popleft())
        self._unanswered -= 1
        self._settled.set()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._settled.set()
