"""Runs a `SocketCore` in the caller's event loop: the part that `sync_socket_runner` has to do
differently.

Both modules are written by hand and offer the same names.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.client.socket_core import SocketCore
from penstock.client.socket_exchange import Outgoing

T = TypeVar("T")


class AsyncSocketRunner:
    is_running = True

    def __init__(self, core: SocketCore) -> None:
        self._core = core

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine

    async def post(self, item: Outgoing) -> None:
        await self._core.post(item)
