"""Every route with real tokens and real JWTs that are valid, but not for what is asked: those of
another tenant, and those whose role has every permission but the one that is needed.

tests/access has the same with principals that a test makes up; here the broker reads them from
credentials. Credentials that are no longer or never valid: test_identity.py."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.model.permissions import ALL_PERMISSIONS
from penstock.server.access import HandlerNeeds, Needs
from penstock.server.message_actions import MESSAGES
from penstock.server.routes.endpoint import Endpoint
from penstock.server.routes.table import ENDPOINTS
from tests.access.test_every_route import is_denied, need, send
from tests.broker_process import BrokerProcess
from tests.contract.conftest import SMALL_SEGMENTS
from tests.contract.test_identity import Guarded, IssuerServer
from tests.jwt_tokens import AUDIENCE, ISSUER, claims, signed
from tests.websocket import WebSocket

CHECKED = [each for each in ENDPOINTS if isinstance(each.access, Needs | HandlerNeeds)]
CHECKED_MESSAGES = [each for each in MESSAGES if isinstance(each.access, HandlerNeeds)]
HERE = {"tenant_id": "default"}
KINDS = ["token", "JWT"]


class Owner(Guarded):
    """The broker's admin, with the requests that `send` makes around an example."""

    @property
    def http(self) -> httpx.Client:
        return self._plain

    def __init__(self, process: BrokerProcess) -> None:
        super().__init__(process)
        self._plain = process.new_client()
        self._made: dict[tuple[str, str], str] = {}

    def must(self, _: str, method: str, path: str, body: Any = None) -> Any:
        reply = self.client.request(method, path, json=body)
        assert reply.status_code < 300, reply.text
        return reply.json() if reply.content else None

    def grant(self, principal: str, permission: str) -> int:
        rule = HERE | {"principal": principal, "permissions": [permission]}
        return int(self.must("", "POST", "/v1/access/rules", rule)["id"])

    def of_another_tenant(self, kind: str) -> str:
        """The credential of an admin there."""
        return self._credential(kind, "other", "admin", admin=True)

    def without(self, kind: str, permission: str) -> str:
        """The credential for a role that has all other permissions in the tenant."""
        return self._credential(kind, "default", f"all-but-{permission}")

    def _credential(self, kind: str, tenant_id: str, role: str, **more: Any) -> str:
        if kind == "JWT":
            body = claims(time.time(), sub=role, tenant_id=tenant_id, roles=[role])
            return signed(body).decode()
        if (tenant_id, role) not in self._made:
            wanted = {"principal": role, "tenant_id": tenant_id, "roles": [role], **more}
            self._made[tenant_id, role] = self.create(**wanted)["token"]
        return self._made[tenant_id, role]

    def close(self) -> None:
        self._plain.close()
        self.client.close()


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    issuer = IssuerServer()
    data_dir = tmp_path_factory.mktemp("credentials")
    env = SMALL_SEGMENTS | {"PENSTOCK_JWT_ISSUER": ISSUER, "PENSTOCK_JWT_AUDIENCE": AUDIENCE}
    process = BrokerProcess(data_dir, "--access-control", "--jwt-keys", issuer.url, env=env)
    try:
        owner = Owner(process.start())
        owner.must("", "POST", "/v1/tenants", {"tenant_id": "other"})
        owner.must("", "POST", "/v1/tenants/other/namespaces", {"namespace": "default"})
        owner.must("", "POST", "/v1/topics", {"name": "orders"})
        for permission in ALL_PERMISSIONS:
            body = HERE | {"permissions": sorted(ALL_PERMISSIONS - {permission})}
            owner.must("", "PUT", f"/v1/access/roles/all-but-{permission}", body)
        yield owner
        owner.close()
        assert "Traceback" not in process.stderr()
    finally:
        process.close()
        issuer.close()
        shutil.rmtree(data_dir)


def ask(owner: Owner, credential: str, endpoint: Endpoint) -> httpx.Response:
    return send(owner, credential, endpoint)  # type: ignore[arg-type]  # it has what is used


@pytest.mark.parametrize("kind", KINDS)
def test_a_credential_of_another_tenant_is_403_on_every_route(owner: Owner, kind: str) -> None:
    """felix-96"""
    for endpoint in CHECKED:
        reply = ask(owner, owner.of_another_tenant(kind), endpoint)
        assert is_denied(reply, endpoint), (endpoint.route, reply.status_code)


@pytest.mark.parametrize("kind", KINDS)
def test_a_credential_with_too_weak_a_role_is_403_on_every_route(owner: Owner, kind: str) -> None:
    """felix-93, felix-94"""
    for endpoint in CHECKED:
        reply = ask(owner, owner.without(kind, need(endpoint).permission), endpoint)
        assert is_denied(reply, endpoint), (endpoint.route, reply.status_code)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_credentials_are_good_for_what_they_are_for(owner: Owner, kind: str) -> None:
    """Otherwise the refusals above would say nothing."""
    strong = owner.without(kind, "metrics")
    with owner.process.new_client(headers={"Authorization": f"Bearer {strong}"}) as client:
        body = {"topic": "orders", "value": "v"}
        assert client.post("/v1/produce", json=body).status_code == 200
        assert client.get("/v1/topics").json() == {"topics": ["orders", "penstock.audit"]}
    there = owner.of_another_tenant(kind)
    with owner.process.new_client(headers={"Authorization": f"Bearer {there}"}) as client:
        path = "/v1/tenants/other/namespaces/default/caches"
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_of_such_a_credential_is_refused(owner: Owner, kind: str) -> None:
    """felix-95, felix-96: on the socket as over HTTP."""
    for each in CHECKED_MESSAGES:
        assert isinstance(each.access, HandlerNeeds)
        weak = owner.without(kind, each.access.permission)
        for credential in (owner.of_another_tenant(kind), weak):
            headers = [f"Authorization: Bearer {credential}"]
            with WebSocket(owner.process.port, headers=headers) as socket:
                answer = socket.ask({"type": each.type, **each.example})
                assert answer["error"] == "PERMISSION_DENIED", (each.type, answer)
