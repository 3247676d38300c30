"""Access control on a broker that is not the owner, with TLS between the brokers.

That every route answers 401 and 403 as the owner does is checked by the contract tests of identity
and routes, which a cluster runs too.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.cluster_process import ClusterProcess, MemberProcess, shared_nats
from tests.contract.test_tls import signed_by
from tests.tls_proxy import Certificate

TOKEN = "static-token-of-the-cluster"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, certificate: Certificate
) -> Iterator[ClusterProcess]:
    flags = (
        "--access-control", "--tls-cert", str(certificate.file), "--tls-key", str(certificate.key),
        "--tls-client-ca", str(certificate.file), "--tls-client-auth", "optional",
    )  # fmt: skip
    env = {
        "PENSTOCK_TOKEN": TOKEN,
        "PENSTOCK_CLUSTER_CA": str(certificate.file),
        "PENSTOCK_CLUSTER_LEASE_MS": "30000",
    }
    directory = tmp_path_factory.mktemp("cluster")
    cluster = ClusterProcess(shared_nats(), directory, *flags, env=env, ca=certificate.file)
    with cluster:
        yield cluster
        for broker in cluster.brokers:
            assert "Traceback" not in broker.stderr(), broker.stderr()[-5000:]


def ask(broker: MemberProcess, token: str, path: str, body: object = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    method = "GET" if body is None else "POST"
    return broker.client.request(method, path, headers=headers, json=body)


def test_both_brokers_refuse_and_admit_the_same(cluster: ClusterProcess) -> None:
    made = ask(cluster.standby(), TOKEN, "/v1/tokens", {"principal": "p", "tenant_id": "default"})
    assert made.status_code == 201, made.text
    token, path = made.json()["token"], "/v1/topics"
    for broker in cluster.brokers:
        assert ask(broker, TOKEN, path).status_code == 200
        for wrong in ("", "wrong", token[:-1] + "!"):
            assert ask(broker, wrong, path).status_code == 401
        assert ask(broker, token, path, {"name": "t"}).status_code == 403
        assert '"p"' in ask(broker, token, "/v1/access/self").text
        assert ask(broker, "", "/metrics").status_code == 401
        assert ask(broker, TOKEN, "/metrics").status_code == 200
        assert ask(broker, "", "/v1/readyz").status_code == 200


def test_a_revoked_token_is_refused_at_once_and_its_streams_end(cluster: ClusterProcess) -> None:
    standby, owner = cluster.standby(), cluster.owner()
    body = {"principal": "admin", "admin": True}
    made = ask(standby, TOKEN, "/v1/tokens", body).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert ask(standby, made["token"], "/v1/topics", {"name": "streamed"}).status_code == 201
    query = "/v1/consume?topic=streamed&group=g&owner=o&heartbeat_ms=200"
    with standby.new_client(headers=headers) as client, client.stream("GET", query) as stream:
        assert stream.status_code == 200
        path = f"/v1/tokens/{made['id']}"
        reply = owner.client.delete(path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert reply.status_code == 204
        assert ask(standby, made["token"], "/v1/topics").status_code == 401
        for _ in stream.iter_bytes():
            pass


def test_a_client_certificate_does_not_go_along_and_the_refusal_names_the_owner(
    cluster: ClusterProcess, certificate: Certificate, tmp_path: Path
) -> None:
    alice = signed_by(certificate, tmp_path / "alice", "/CN=alice")
    standby, owner = cluster.standby(), cluster.owner()
    shown = ssl.create_default_context(cafile=str(certificate.file))
    shown.load_cert_chain(alice.file, alice.key)
    with standby.new_client(verify=shown) as client:
        refused = client.get("/v1/topics")
        assert refused.status_code == 401
        assert owner.url in refused.json()["message"]
        admitted = client.get("/v1/topics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert admitted.status_code == 200


def test_nobody_gets_in_through_the_certificate_of_another_broker(
    cluster: ClusterProcess, certificate: Certificate, tmp_path: Path
) -> None:
    """The owner accepts the standby's certificate and lets it vouch for nobody."""
    owner = cluster.owner()
    context = ssl.create_default_context(cafile=str(certificate.file))
    alice = signed_by(certificate, tmp_path / "alice", "/CN=alice")
    context.load_cert_chain(alice.file, alice.key)
    with owner.new_client(verify=context) as client:
        assert '"alice"' in client.get("/v1/access/self").text
        forged = client.get("/v1/topics", headers={"X-Penstock-Via": "b9"})
        assert forged.status_code == 401
