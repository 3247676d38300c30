"""Nothing is on one disk only: real brokers on real NATS servers, with one cluster for all tests.

The tests go on from each other, in their order: a batch survives its owner, the stream is purged, a
third broker copies, all three repair a stream that lost its end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.cluster.nats_servers import NatsServers, nats_servers

TOKEN = "the-token-of-the-cluster"
PATIENT_S = 120.0
STREAM = "penstock-copies_shard-0"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


class Cluster:
    def __init__(self, servers: NatsServers, directory: Path) -> None:
        self.servers = servers
        self.directory = directory
        (directory / "token").write_text(TOKEN)
        self.brokers: dict[str, BrokerProcess] = {}
        self.values: list[str] = []

    def start(self, name: str) -> BrokerProcess:
        broker = self.brokers.get(name) or self._new(name)
        broker.start()
        broker.client.headers.update(AUTHORIZED)
        self.brokers[name] = broker
        return broker

    def _new(self, name: str) -> BrokerProcess:
        monitors = ",".join(node.monitor_url for node in self.servers.nodes)
        broker = BrokerProcess(
            self.directory / name,
            "--access-control",
            "--token-file",
            str(self.directory / "token"),
            env={
                "PENSTOCK_CLUSTER": self.servers.url,
                "PENSTOCK_CLUSTER_NAME": "copies",
                "PENSTOCK_CLUSTER_MONITORS": monitors,
                "PENSTOCK_CLUSTER_STREAM_BYTES": "64MiB",
                "PENSTOCK_CLUSTER_LEASE_MS": "2000",
                "PENSTOCK_SEGMENT_BYTES": "64KiB",
                "PENSTOCK_NAME": name,
            },
        )
        broker.is_copy = False
        return broker

    def states(self, broker: BrokerProcess) -> dict[str, str]:
        try:
            reply = broker.client.get("/v1/cluster", timeout=10)
        except httpx.HTTPError:
            return {}
        return {each["name"]: each["state"] for each in reply.json().get("brokers", ())}

    def any(self) -> BrokerProcess:
        return next(each for each in self.brokers.values() if each.is_running())

    def owner(self) -> str:
        def found() -> str:
            reply = self.any().client.get("/v1/cluster", timeout=10)
            shards = reply.json()["shards"]
            name = shards[0]["owner"] if shards else ""
            broker = self.brokers.get(name)
            return name if broker is not None and broker.is_running() else ""

        return str(eventually(found, timeout_s=PATIENT_S))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Asks a broker that runs, again while it has no owner to ask."""

        replies: list[httpx.Response] = []

        def is_answered() -> bool:
            try:
                replies.append(self.any().client.request(method, path, **options))
            except httpx.HTTPError:
                return False
            return replies[-1].status_code not in (503, 504)

        eventually(is_answered, timeout_s=PATIENT_S)
        assert replies[-1].status_code < 300, replies[-1].text
        return replies[-1]

    def produce(self, count: int) -> None:
        """Stores messages of a kilobyte, each once."""
        for _ in range(count):
            value = f"v{len(self.values)} ".ljust(1000, "x")
            envelope = {"idempotency_key": f"k{len(self.values)}"}
            body = {"topic": "t", "value": value, "envelope": envelope}
            self.ask("POST", "/v1/produce", json=body)
            self.values.append(value)

    def contents(self) -> list[str]:
        reply = self.ask("GET", "/v1/topics/t/partitions/0/records?columns=value")
        found: list[str] = pa.ipc.open_stream(reply.content).read_all().column("value").to_pylist()
        return found

    def bounds(self) -> tuple[int, int]:
        """The first and last message of the stream, as the servers say."""
        for node in self.servers.nodes:
            report = node.monitored("/jsz?streams=1") or {}
            for account in report.get("account_details", ()):
                for each in account.get("stream_detail", ()):
                    if each["name"] == STREAM:
                        return each["state"]["first_seq"], each["state"]["last_seq"]
        return 0, 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("copies")
    with nats_servers(directory / "nats") as servers:
        cluster = Cluster(servers, directory)
        try:
            cluster.start("b1")
            cluster.start("b2")
            cluster.ask("POST", "/v1/topics", json={"name": "t", "partitions": 1})
            yield cluster
        finally:
            for name, broker in cluster.brokers.items():
                (directory / f"{name}.log").write_text(broker.stderr())
                broker.close()


def wait_for_standby(cluster: Cluster, broker: BrokerProcess, name: str) -> None:
    """Waits until `broker` knows that the one of this name has caught up."""
    eventually(lambda: cluster.states(broker).get(name) == "standby", timeout_s=PATIENT_S)


def rows(count: int) -> list[str]:
    return [f"row {number} ".ljust(500, "y") for number in range(count)]


def test_a_batch_that_one_owner_staged_is_stored_by_the_next(cluster: Cluster) -> None:
    body = pa.BufferOutputStream()
    table = pa.table({"value": rows(5000)})
    with pa.ipc.new_stream(body, table.schema) as writer:
        writer.write_table(table)
    content = body.getvalue().to_pybytes()
    cluster.ask(
        "PUT",
        "/v1/writes/p/0/0/0?topic=t&attempt=a",
        content=content,
        headers={"content-type": "application/vnd.apache.arrow.stream"},
    )
    first = cluster.owner()
    cluster.brokers[first].kill()
    commit = {"parts": [{"part": 0, "attempt": "a", "pieces": 1, "rows": 5000}]}
    cluster.ask("POST", "/v1/writes/p/0/commit", json=commit)
    second = cluster.owner()
    assert second != first
    # Perhaps in the midst of storing its rows.
    cluster.start(first)
    wait_for_standby(cluster, cluster.brokers[second], first)
    cluster.brokers[second].kill()
    eventually(lambda: len(cluster.contents()) == 5000, timeout_s=PATIENT_S)
    assert cluster.contents() == rows(5000)
    cluster.values = rows(5000)
    cluster.start(second)


def test_the_stream_is_purged_when_both_have_sealed(cluster: Cluster) -> None:
    cluster.produce(150)
    eventually(lambda: cluster.bounds()[0] > 1, timeout_s=PATIENT_S)


def test_a_new_broker_copies_what_the_stream_no_longer_has(cluster: Cluster) -> None:
    new = cluster.start("b3")
    wait_for_standby(cluster, new, "b3")
    assert "copying the shard from" in new.stderr()
    others = [cluster.brokers[name] for name in ("b1", "b2")]
    for each in others:
        each.kill()
    assert cluster.owner() == "b3"
    assert cluster.contents() == cluster.values
    cluster.produce(20)
    for name in ("b1", "b2"):
        shutil.rmtree(cluster.directory / name)
        cluster.start(name)
    for name in ("b1", "b2"):
        wait_for_standby(cluster, new, name)


def test_only_the_clusters_own_token_opens_the_files(cluster: Cluster) -> None:
    made = cluster.ask("POST", "/v1/tokens", json={"principal": "somebody", "admin": True})
    other = {"authorization": f"Bearer {made.json()['token']}"}
    for broker in cluster.brokers.values():
        with httpx.Client(base_url=broker.url, trust_env=False) as client:
            copy = "/v1/cluster/copy"
            # A standby cannot verify anybody else, and treats all others alike.
            assert client.get(copy).status_code in (401, 403)
            assert client.get(copy, headers=other).status_code == 403
            reply = client.get(copy, headers=AUTHORIZED)
            assert reply.content.startswith(b"PENSTOCK-MANIFEST 1 ")
            for name in ("../token", "LOCK", "wal-00000000000000000002.seg", "MANIFEST"):
                query = {"file": name, "offset": "0", "length": "100"}
                assert client.get(copy, params=query, headers=AUTHORIZED).status_code == 400
            gone = {"file": "history-00000000000000099999.arrow", "offset": "0", "length": "9"}
            assert client.get(copy, params=gone, headers=AUTHORIZED).status_code == 404


def test_brokers_repair_a_stream_that_lost_its_end(cluster: Cluster) -> None:
    """All three servers forget their last seconds, as after a power cut without syncs."""
    cluster.produce(5)
    servers = cluster.servers
    for node in servers.nodes:
        node.stop()
    for node in servers.nodes:
        shutil.copytree(node.directory / "js", node.directory / "older")
    for node in servers.nodes:
        node.start()
    servers.wait_until_ready()
    cluster.produce(10)
    _, last = cluster.bounds()
    time.sleep(1.5)  # the brokers announce how far they are once in two thirds of a second
    for node in servers.nodes:
        node.kill()
    for node in servers.nodes:
        shutil.rmtree(node.directory / "js")
        (node.directory / "older").rename(node.directory / "js")
        node.start()
    servers.wait_until_ready()
    eventually(lambda: cluster.bounds()[1] >= last, timeout_s=2 * PATIENT_S)
    cluster.produce(3)
    assert cluster.contents() == cluster.values
    logs = "".join(broker.stderr() for broker in cluster.brokers.values())
    assert "the cluster's stream was repaired" in logs
    assert json.dumps(TOKEN)[1:-1] not in logs
