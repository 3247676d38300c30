"""A broker under access control, on a real socket and a real disk, in a thread of the test.

Authentication is not the subject here: the bearer token is the name of a principal that the test
has made known, and stands for it. Without a token there is no access control.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.opening import open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.principals import Principal
from penstock.server.http.admission import Admission
from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.request_headers import (
    NO_SCOPE,
    SCOPE_HEADERS,
    Headers,
    RequestVerdict,
    read_scope,
)
from penstock.server.identity.credentials import Credential
from penstock.server.pages import WebPages
from penstock.server.routes.table import ROUTES, path_route
from penstock.storage.log import WalOptions
from tests.access.scope_reading import remembering
from tests.websocket import WebSocket

T = TypeVar("T")

ROOT = Principal("root", is_admin=True)
TIMEOUT_S = 60


class NamedAdmission(Admission):
    """Believes every bearer token that is the name of a known principal."""

    def __init__(self) -> None:
        super().__init__(loopback_only=True)
        self.principals = {ROOT.name: ROOT}
        self.remembers_reads = False

    def judge(
        self, headers: Headers, http_version: str, certificate: Credential | None = None
    ) -> RequestVerdict:
        verdict = super().judge(headers, http_version, certificate)
        token = dict(headers).get(b"authorization", b"").partition(b" ")[2].decode()
        principal = self.principals[token] if token else None
        scope = read_scope([each for each in headers if each[0] in SCOPE_HEADERS], principal)
        if isinstance(scope, PenstockError):
            verdict.refusal, scope = scope, NO_SCOPE
        notes = msgspec.structs.replace(
            verdict.notes,
            principal=principal,
            scope=scope.scope,
            tenant=scope.tenant,
            namespace=scope.namespace,
        )
        verdict.notes = remembering(notes) if self.remembers_reads else notes
        return verdict


class AccessServer:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._is_started.wait(TIMEOUT_S)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT_S)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        options = WalOptions(segment_bytes=256 * KIB, reserve_bytes=0)
        limits = Limits(lease_ms=60_000)
        self.engine: EmbeddedEngine = open_on_disk(
            str(self._directory), options, limits, LoopScheduler(self.loop)
        )
        self.admission = NamedAdmission()
        self.dispatch = RequestDispatch(
            self.engine,
            self.admission,
            ROUTES | WebPages().routes(),
            path_route,
            request_timeout_ms=60_000,
            idle_timeout_ms=60_000,
        )
        connections: set[Any] = set()
        server = await self.loop.create_server(
            lambda: HttpConnection(self.dispatch, connections), "127.0.0.1", 0
        )
        self.port = server.sockets[0].getsockname()[1]
        self._is_started.set()
        await self._is_stopping.wait()
        server.close()
        for connection in list(connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        self.engine.close()

    def close(self) -> None:
        self.http.close()
        self.loop.call_soon_threadsafe(self._is_stopping.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def on_loop(self, act: Callable[[], T]) -> T:
        """Runs something on the broker's loop, and returns its result."""

        async def run() -> T:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT_S)

    def know(self, principal: Principal) -> str:
        self.admission.principals[principal.name] = principal
        return principal.name

    def ask(
        self, who: str, method: str, path: str, body: Any = None, **options: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {who}"} if who else {}
        content = None if body is None else body if isinstance(body, bytes) else encode(body)
        return self.http.request(method, path, content=content, headers=headers, **options)

    def must(self, who: str, method: str, path: str, body: Any = None) -> Any:
        reply = self.ask(who, method, path, body)
        assert reply.status_code < 300, reply.text
        return reply.json() if reply.content else None

    def grant(self, principal: str, *permissions: str, by: str = "root", **members: Any) -> int:
        """Returns the id of the rule."""
        broker = members.get("resource") == "broker"
        rule = {"principal": principal, "permissions": list(permissions), **members}
        rule |= {} if broker or "tenant_id" in rule else {"tenant_id": "default"}
        return int(self.must(by, "POST", "/v1/access/rules", rule)["id"])

    def revoke(self, rule: int, by: str = "root") -> None:
        self.must(by, "DELETE", f"/v1/access/rules/{rule}")

    def socket(self, who: str, **options: Any) -> WebSocket:
        return WebSocket(self.port, headers=[f"Authorization: Bearer {who}"], **options)

    def audit(self, who: str = "root") -> list[dict[str, Any]]:
        path = "/v1/topics/penstock.audit/partitions/0/records?format=ndjson"
        reply = self.ask(who, "GET", path)
        assert reply.status_code == 200, reply.text
        return [json.loads(json.loads(line)["value"]) for line in reply.text.splitlines()]


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()
