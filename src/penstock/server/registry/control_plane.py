"""Follows the registry of another broker, the control plane.

A sync asks the control plane for its changes and reconciles the own registry with them. It takes a
snapshot at first, after a restart of the control plane, and when the changes are no longer kept.
The own registry is in the log, so the broker goes on while the control plane cannot be reached.
Changes that clients ask for are forwarded, and answered once they are here.

Invariants: one sync at a time; the registry holds what the control plane held at one moment; no
broker follows itself, directly or through others. Must not know replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from penstock import __version__
from penstock.api.registry import RegistryPart
from penstock.model.errors import (
    InvalidArgument,
    OutOfRange,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.model.limits import MIB
from penstock.model.tenancy import Entry
from penstock.server.http.requests import Request
from penstock.server.registry.mirror import Mirror, RemoteChanges, RemoteSnapshot

TIMEOUT_S = 5.0
"""The time limit for connecting, and for each part of an answer."""
FORWARD_S = 5.0
SYNC_S = 30.0
"""The time limit for a whole sync, however slowly an answer comes."""
FIRST_SYNC_S = 2.0
"""How long a start waits for the control plane; then the broker serves the registry it has."""
MAX_ANSWER_BYTES = 128 * MIB
"""Enough for a full registry of long names."""
MAX_FORWARDED = 64
"""The most changes on their way to the control plane at once."""
MAX_CHAIN = 16
"""The most brokers that follow each other in a row."""

T = TypeVar("T")

_log = logging.getLogger("penstock.registry")


_snapshot = msgspec.json.Decoder(RemoteSnapshot)
_changes = msgspec.json.Decoder(RemoteChanges)
_error = msgspec.json.Decoder(dict[str, Any])


class FollowsItself(Unavailable):
    """The control plane is this broker, or follows it. Set another control plane."""


class RemoteAnswer(msgspec.Struct, frozen=True):
    """The answer of the control plane, for the client."""

    status: int
    body: bytes
    retry_after: str = ""


Forwarded = Callable[[RemoteAnswer | PenstockError], None]


class Follower:
    """`connected`: the last sync succeeded. `follows`: the brokers it follows, nearest first."""

    def __init__(
        self,
        registry: RegistryPart,
        instance: str,
        url: str,
        *,
        token: str = "",
        sync_ms: int = 1000,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = checked_url(url)
        self.connected = False
        self.last_sync_ms: int | None = None
        self.last_error: str | None = None
        self.follows: list[str] = []
        self._registry = registry
        self._instance = instance
        self._sync_s = sync_ms / 1000
        self._mirror = Mirror()
        self._syncing = asyncio.Lock()
        self._next_sync: asyncio.Task[PenstockError | None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forwarded = 0
        headers = {"User-Agent": f"penstock/{__version__}", "Accept-Encoding": "identity"}
        # The pool needs no limit: MAX_FORWARDED bounds the requests.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False,
            verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=None), transport=transport,
        )  # fmt: skip
        self.use_token(token)

    def use_token(self, token: str) -> None:
        """Sends this token to the control plane from now on; empty means none."""
        if token:
            self._http.headers["Authorization"] = f"Bearer {token}"
        else:
            self._http.headers.pop("Authorization", None)

    async def start(self) -> None:
        """Waits for a first sync if the control plane answers soon, and syncs again and again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.sync(), FIRST_SYNC_S)
        self._spawn(self._follow())

    async def close(self) -> None:
        """Answers changes that still wait: the broker is stopping."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def sync(self) -> PenstockError | None:
        """Runs a sync that begins after this call. Callers share a sync that has not begun."""
        if self._next_sync is None:
            self._next_sync = self._spawn(self._sync_serially())
        return await asyncio.shield(self._next_sync)

    def forward(self, request: Request, done: Forwarded) -> None:
        """Asks the control plane for the change. When `done` is called, the change is here too."""
        if self._forwarded >= MAX_FORWARDED:
            raise ResourceExhausted(
                "too many changes are on their way to the control plane", limit="forwarded"
            )
        self._forwarded += 1
        self._spawn(self._forward(request, done))

    # -- sync ----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            # Random, so that followers that were started together do not sync together.
            await asyncio.sleep(self._sync_s * random.uniform(0.5, 1.0))
            await self.sync()

    async def _sync_serially(self) -> PenstockError | None:
        async with self._syncing:
            self._next_sync = None
            try:
                async with asyncio.timeout(SYNC_S):
                    await self._catch_up()
            except (httpx.HTTPError, TimeoutError, PenstockError) as error:
                return self._failed(error)
            except Exception as error:  # noqa: BLE001 - following goes on after a defect of ours
                _log.exception("a sync failed")
                return self._failed(error)
            self._succeeded()
            return None

    async def _catch_up(self) -> None:
        mirror = self._mirror
        news = await self._ask_changes() if mirror.instance else None
        if news is not None:
            mirror.take_changes(news)
        else:
            snapshot = await self._ask("/v1/registry/snapshot", _snapshot)
            self._check_chain(snapshot.instance, snapshot.follows)
            mirror.take_snapshot(snapshot)
        if mirror.is_new:
            await self._reconcile(mirror.entries())
            mirror.is_new = False

    async def _ask_changes(self) -> RemoteChanges | None:
        """Asks for the changes since the last sync. Returns None if a snapshot is needed, since a
        restarted control plane may have lost changes."""
        mirror = self._mirror
        query = f"since={mirror.revision}&epoch={mirror.epoch}"
        try:
            news = await self._ask(f"/v1/registry/changes?{query}", _changes)
        except OutOfRange:
            return None
        self._check_chain(news.instance, news.follows)
        return news if news.instance == mirror.instance else None

    async def _ask(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        status, body, _ = await self._send("GET", path)
        if status in (410, 416):
            raise OutOfRange("it no longer knows these changes")
        if status != 200:
            raise Unavailable(f"it answered {status}{_message(body)}")
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Unavailable(
                f"its answer is no registry ({error}); is it a Penstock broker?"
            ) from error

    async def _send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, str]:
        answer = bytearray()
        async with self._http.stream(method, path, content=body) as response:
            async for part in response.aiter_bytes():
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise Unavailable(f"its answer is over {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(answer), response.headers.get("retry-after", "")

    async def _reconcile(self, entries: list[Entry]) -> None:
        decided: asyncio.Future[int | PenstockError]
        decided = asyncio.get_running_loop().create_future()

        def done(outcome: int | PenstockError) -> None:
            if not decided.done():
                decided.set_result(outcome)

        self._registry.reconcile(entries, done)
        outcome = await decided
        if isinstance(outcome, PenstockError):
            raise outcome
        if outcome and not self.connected:
            _log.info(
                "the registry was changed in %d steps to what the control plane has; streams and "
                "caches of this broker alone are gone",
                outcome,
            )

    def _check_chain(self, instance: str, follows: list[str]) -> None:
        chain = [instance, *follows]
        self.follows = chain[:MAX_CHAIN]
        if self._instance in chain:
            # Cut here: otherwise the chains of two brokers that follow each other grow with each
            # sync.
            self.follows = chain[: chain.index(self._instance) + 1]
            raise FollowsItself("it is this broker itself, or follows it; set another one")
        if len(chain) > MAX_CHAIN:
            raise FollowsItself(f"more than {MAX_CHAIN} brokers follow each other")

    def _succeeded(self) -> None:
        if not self.connected:
            _log.info("the registry follows %s, at revision %d", self.url, self._mirror.revision)
        self.connected = True
        self.last_error = None
        self.last_sync_ms = time.time_ns() // 1_000_000

    def _failed(self, error: Exception) -> PenstockError:
        """Logs an outage once, and again if the brokers turn out to follow each other."""
        text = _explain(error)
        is_loop = isinstance(error, FollowsItself)
        if self.last_error is None or (is_loop and self.last_error != text):
            _log.log(
                logging.ERROR if is_loop else logging.WARNING,
                "the control plane %s cannot be followed: %s; until it can, the registry stays as "
                "it is",
                self.url,
                text,
            )
        self.connected = False
        self.last_error = text
        return Unavailable(f"the control plane cannot be followed: {text}")

    # -- changes that clients ask for ------------------------------------------------------------

    async def _forward(self, request: Request, done: Forwarded) -> None:
        outcome: RemoteAnswer | PenstockError = Unavailable(
            "the broker is stopping; the control plane may have made the change"
        )
        try:
            outcome = await self._forward_and_sync(request)
        except PenstockError as error:
            outcome = error
        finally:
            self._forwarded -= 1
            done(outcome)

    async def _forward_and_sync(self, request: Request) -> RemoteAnswer:
        if self._instance in _via(request):
            raise Unavailable("the control planes follow each other; nothing was changed")
        if not self.connected and (failure := await self.sync()) is not None:
            raise Unavailable(f"{failure.message}; nothing was changed")
        answer = await self._ask_to_change(request)
        if 200 <= answer.status < 300:
            await self._sync_after_change()
        return answer

    async def _sync_after_change(self) -> None:
        try:
            failure = await asyncio.wait_for(self.sync(), FORWARD_S)
        except TimeoutError:
            failure = Unavailable("no answer in time")
        if failure is not None:
            raise Unavailable(
                f"the control plane has made the change, but it is not here yet: {failure.message}"
            )

    async def _ask_to_change(self, request: Request) -> RemoteAnswer:
        via = "via=" + ",".join([*_via(request), self._instance])
        # First, since of a repeated parameter the first counts.
        query = "&".join(filter(None, [via, request.query.decode("latin-1")]))
        target = f"{request.path.decode('latin-1')}?{query}"
        try:
            async with asyncio.timeout(FORWARD_S):
                status, body, retry_after = await self._send(
                    request.method.decode(), target, request.body
                )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(
                f"the control plane cannot be reached: {_explain(error)}; nothing was changed"
            ) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise Unavailable(
                f"the control plane did not answer: {_explain(error)}; it may have made the change"
            ) from error
        is_for_client = 200 <= status < 300 or 400 <= status < 500 or status == 503
        if not is_for_client or status in (401, 403):
            raise Unavailable(f"the control plane answered {status}{_message(body)}")
        return RemoteAnswer(status, body, retry_after)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def checked_url(url: str) -> str:
    """Checks a control plane's address. The error does not repeat it: it may hold a password."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_plain = not (parts.query or parts.fragment) and parts.port != 0
        has_credentials = "@" in parts.netloc
    except ValueError:
        is_url, is_plain, has_credentials = False, False, False
    if has_credentials:
        raise InvalidArgument(
            "control_plane must not hold credentials; put the token into control_plane_token_file"
        )
    if not (is_url and is_plain):
        raise InvalidArgument(
            "control_plane is no broker's address; it looks like http://127.0.0.1:8080"
        )
    return url.rstrip("/")


def _via(request: Request) -> list[str]:
    """Returns the brokers that have forwarded the request so far."""
    return [instance for instance in request.params().get("via", "").split(",") if instance]


def _message(body: bytes) -> str:
    """The message in the body of an error."""
    try:
        text = _error.decode(body).get("message")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
    return f": {text[:200]}" if isinstance(text, str) else ""


def _explain(error: Exception) -> str:
    if isinstance(error, PenstockError):
        return error.message
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__
