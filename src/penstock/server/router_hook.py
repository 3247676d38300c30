"""Routers that users bring: a Python callable, or an HTTP service.

A message never waits longer than the time limit. If a router fails, the message is stored unrouted.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import ssl
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import httpx
import msgspec

from penstock.api.messages import Decided, Produce, Router
from penstock.model.envelope import RoutingDecision
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MIB
from penstock.model.scopes import plain_name

MAX_ROUTING = 1024
"""The most messages at the router at once; further ones are stored unrouted."""
THREADS = 8
MAX_ANSWER_BYTES = MIB

_log = logging.getLogger("penstock.router")


def make_router(spec: str, timeout_ms: int, loop: asyncio.AbstractEventLoop) -> Router | None:
    """`spec` is `package.module:callable` or `http://...`; None for an empty one."""
    if not spec:
        return None
    if spec.startswith(("http://", "https://")):
        return AsyncRouter(HttpCall(spec), timeout_ms, loop)
    return AsyncRouter(_load(spec), timeout_ms, loop)


Call = Callable[[str, dict[str, Any]], Any]


class AsyncRouter:
    """Calls the router for each message, within the time limit; on a thread if it is not async."""

    def __init__(self, call: Call, timeout_ms: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timeout_s = timeout_ms / 1000
        self._tasks: set[asyncio.Task[None]] = set()
        if inspect.iscoroutinefunction(call) or isinstance(call, HttpCall):
            self._call = call
        else:
            self._call = DaemonPool(call, loop)

    def route(self, command: Produce, decided: Decided) -> None:
        if len(self._tasks) >= MAX_ROUTING:
            decided(None)
            return
        task = self._loop.create_task(self._route(command, decided))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _route(self, command: Produce, decided: Decided) -> None:
        decision = None
        message = {
            "key": command.key,
            "value": command.value,
            "envelope": msgspec.to_builtins(command.envelope) if command.envelope else {},
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._call(plain_name(command.topic), message)
            decision = msgspec.convert({} if answer is None else answer, RoutingDecision)
            # Raises for an answer that cannot be written to the log, such as a lone surrogate.
            msgspec.msgpack.encode(decision)
        except TimeoutError:
            _log.warning("the router took longer than %d ms", self._timeout_s * 1000)
        except Exception as error:  # noqa: BLE001 - the router is somebody else's code
            _log.warning("the router failed: %s: %s", type(error).__name__, error)
            decision = None
        finally:
            decided(decision)


class DaemonPool:
    """Runs a call that is not async on a few threads. A call that hangs keeps its thread, but does
    not keep the broker from stopping, as it would in the standard library's pool."""

    def __init__(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._waiting: SimpleQueue[tuple[str, dict[str, Any], asyncio.Future[Any]]] = SimpleQueue()
        for number in range(THREADS):
            name = f"penstock-router-{number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    async def __call__(self, topic: str, message: dict[str, Any]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.put((topic, message, future))
        return await future

    def _work(self) -> None:
        while True:
            topic, message, future = self._waiting.get()
            # It was in the queue for too long, and nobody waits for it.
            if future.done():
                continue
            try:
                outcome, error = self._call(topic, message), None
            except Exception as raised:  # noqa: BLE001 - the router is somebody else's code
                outcome, error = None, raised
            self._loop.call_soon_threadsafe(_settle, future, outcome, error)


def _settle(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class HttpCall:
    """POSTs `{"topic", "message"}`; the JSON of a 200 is the decision."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, topic: str, message: dict[str, Any]) -> Any:
        if self._client is None:
            # Ignores the proxies of the environment, but uses its certificate authorities.
            self._client = httpx.AsyncClient(trust_env=False, verify=ssl.create_default_context())
        body = {"topic": topic, "message": message}
        answer = bytearray()
        async with self._client.stream("POST", self._url, json=body, timeout=None) as response:
            if response.status_code != 200:
                raise InvalidArgument(f"the router answered {response.status_code}")
            async for part in response.aiter_bytes():
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise InvalidArgument(f"the answer is over {MAX_ANSWER_BYTES} bytes")
        return msgspec.json.decode(answer)


def _load(spec: str) -> Call:
    module_name, _, name = spec.partition(":")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"--router {spec}: {error}; it takes package.module:callable or http://..."
        ) from error
    if not callable(found):
        raise InvalidArgument(f"--router {spec}: this is not callable")
    return found
