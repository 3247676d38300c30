"""A cluster of real brokers on real NATS servers, for tests that look at it from outside.

Owns starting the brokers, stopping, killing and pausing single ones by their number, and telling
which of them is the owner. Many clusters share three NATS servers: each has a name of its own, and
its streams are deleted when it is closed.
"""

from __future__ import annotations

import atexit
import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.broker_process import BrokerProcess, StartFailed, eventually
from tests.cluster.nats_servers import NatsServers

STREAM_BYTES = 256 * 2**20
"""What the stream of a test's cluster may hold. The servers set as much aside."""
CLUSTER_TIMEOUT_S = 60.0
NATS_TIMEOUT_S = 30.0


class MemberProcess(BrokerProcess):
    """One broker of a cluster. `name` is its name there."""

    def __init__(self, name: str, data_dir: Path, *flags: str, **options: Any) -> None:
        super().__init__(data_dir, *flags, **options)
        self.name = name

    def pause(self) -> None:
        """SIGSTOP. Returns when the process has stopped: it may still run for a moment."""
        super().pause()
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0], lambda seen: seen == "T")

    def map(self) -> dict[str, Any]:
        """What it says about the cluster; empty if it does not answer."""
        try:
            reply = self.client.get("/v1/cluster", timeout=5.0, headers=self._credentials())
        except (httpx.HTTPError, RuntimeError):
            return {}
        body: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        return body

    def is_ready(self) -> bool:
        try:
            return self.client.get("/v1/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _credentials(self) -> dict[str, str]:
        token = self.env.get("PENSTOCK_TOKEN", "")
        if "--token-file" in self.flags:
            file = self.flags[self.flags.index("--token-file") + 1]
            token = Path(file).read_text().strip()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def names_owner(self) -> str:
        """The owner that this broker knows; empty if none."""
        shards = self.map().get("shards", ())
        return shards[0]["owner"] if shards else ""


class ClusterProcess:
    """`count` brokers named b1, b2 and so on. `env` and flags are those of all of them."""

    def __init__(
        self,
        servers: NatsServers,
        directory: Path,
        *flags: str,
        count: int = 2,
        env: Mapping[str, str] | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        self.servers = servers
        self.name = name or f"t{secrets.token_hex(6)}"
        settings = {
            "PENSTOCK_CLUSTER": servers.url,
            "PENSTOCK_CLUSTER_NAME": self.name,
            "PENSTOCK_CLUSTER_MONITORS": ",".join(node.monitor_url for node in servers.nodes),
            "PENSTOCK_CLUSTER_STREAM_BYTES": str(STREAM_BYTES),
        }
        self.brokers = [
            MemberProcess(
                f"b{number}",
                directory / f"b{number}",
                *flags,
                env=settings | dict(env or {}) | {"PENSTOCK_NAME": f"b{number}"},
                **options,
            )
            for number in range(1, count + 1)
        ]

    def start(self) -> ClusterProcess:
        """Starts the brokers, and waits until one serves and the others have caught up."""
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(MemberProcess.start, self.brokers))
        self.wait_until_whole()
        return self

    def wait_until_whole(self) -> None:
        """Waits until all brokers know the same owner, and that it serves and the others stand
        by."""

        def is_whole() -> bool:
            for broker in self.brokers:
                code = None if broker.process is None else broker.process.poll()
                if code is not None:
                    raise StartFailed(code, broker.stdout() + broker.stderr())
            return all(self._sees_all(each) for each in self.brokers)

        eventually(is_whole, timeout_s=CLUSTER_TIMEOUT_S)

    def _sees_all(self, broker: MemberProcess) -> bool:
        seen = broker.map()
        states = {each["name"]: each["state"] for each in seen.get("brokers", ())}
        urls = {each["name"]: each["url"] for each in seen.get("brokers", ())}
        return (
            sorted(states.values()) == ["owner", *["standby"] * (len(self.brokers) - 1)]
            and urls == {each.name: each.url for each in self.brokers}
            and broker.is_ready()
        )

    def owner(self) -> MemberProcess:
        """The broker that serves now."""

        def named() -> str:
            names = {each.names_owner() for each in self.brokers if each.is_running()}
            return names.pop() if len(names) == 1 else ""

        name = eventually(named, timeout_s=CLUSTER_TIMEOUT_S)
        return next(each for each in self.brokers if each.name == name)

    def standby(self) -> MemberProcess:
        """A broker that runs and does not serve."""
        owner = self.owner()
        return next(each for each in self.brokers if each is not owner and each.is_running())

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()
        delete_streams(self.servers, self.name)

    def __enter__(self) -> ClusterProcess:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()


def delete_streams(servers: NatsServers, cluster: str) -> None:
    """Deletes what a cluster has on the servers. Idle streams cost them CPU."""
    prefix = f"penstock-{cluster}"
    for stream in (f"KV_{prefix}", f"{prefix}_shard-0", f"{prefix}_pieces-0"):
        with suppress(OSError, IndexError):
            _ask_nats(servers, f"$JS.API.STREAM.DELETE.{stream}")


def _ask_nats(servers: NatsServers, subject: str) -> None:
    node = next(each for each in servers.nodes if each.is_running())
    inbox = f"_INBOX.{secrets.token_hex(8)}"
    place = ("127.0.0.1", node.client_port)
    with socket.create_connection(place, NATS_TIMEOUT_S) as connection:
        options = json.dumps({"verbose": False, "headers": True, "no_responders": True})
        connection.sendall(
            f"CONNECT {options}\r\nSUB {inbox} 1\r\nPUB {subject} {inbox} 0\r\n\r\n".encode()
        )
        answer = b""
        while b"MSG" not in answer and (part := connection.recv(65536)):
            answer += part


@cache
def shared_nats() -> NatsServers:
    """Three servers for all tests of this process, started when they are first needed."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-nats-"))
    servers = NatsServers(directory, max_file_store="200GB")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(servers.close)
    servers.start()
    return servers


@contextmanager
def cluster_process(
    servers: NatsServers, directory: Path, *flags: str, **options: Any
) -> Iterator[ClusterProcess]:
    with ClusterProcess(servers, directory, *flags, **options) as cluster:
        yield cluster
