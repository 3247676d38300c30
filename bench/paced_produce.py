"""Produces at a steady pace and times the answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from statistics import quantiles

from bench.lean_client import Connection, connect
from bench.pace import keep_pace

CONNECTIONS = 16


class PacedProduce:
    """Sends without waiting for answers, so that a stall of the broker shows in the times."""

    def __init__(self, per_second: int, request: bytes) -> None:
        self.took: list[float] = []
        """Milliseconds to each answer."""
        self.rate = 0.0
        """Answers per second."""
        self._per_second = per_second
        self._request = request
        self._sent: list[deque[float]] = [deque() for _ in range(CONNECTIONS)]
        self._unanswered = 0
        self._error: Exception | None = None
        self._settled = asyncio.Event()

    @property
    def p99(self) -> float:
        return quantiles(self.took, n=100)[98]

    async def run(self, port: int, seconds: float) -> None:
        connections = [
            await connect(port, partial(self._replied, sent), self._failed) for sent in self._sent
        ]
        began = time.perf_counter()
        await keep_pace(self._per_second, seconds, partial(self._send, connections))
        while self._unanswered and self._error is None:
            self._settled.clear()
            await self._settled.wait()
        self.rate = len(self.took) / (time.perf_counter() - began)
        for connection in connections:
            connection.close()
        if self._error is not None:
            raise self._error

    def _send(self, connections: list[Connection], number: int) -> None:
        if self._error is not None:
            raise self._error
        index = number % CONNECTIONS
        self._sent[index].append(time.perf_counter())
        connections[index].write(self._request)
        self._unanswered += 1

    def _replied(self, sent: deque[float], _: int, body: bytes) -> None:
        self.took.append((time.perf_counter() - sent.popleft()) * 1000)
        self._unanswered -= 1
        self._settled.set()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._settled.set()
