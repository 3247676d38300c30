"""Real nats-server processes, for tests that need a JetStream cluster.

Owns starting them on ports that the system chooses, and stopping, killing, pausing and starting
again single nodes by their number. Knows nats-server's configuration file and its monitoring port.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
ATTEMPTS = 5
"""How often the servers are started with new ports, if another process took one meanwhile."""
MAX_PAYLOAD = 16 * 1024 * 1024


def nats_server() -> str:
    """The path of the server. Skips the test without one, and fails in CI."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("nats-server is missing: scripts/venv.sh installs it", pytrace=False)
        pytest.skip("nats-server is not installed")
    return found


class NatsNode:
    """One server, started any number of times on the same ports and directory."""

    def __init__(self, name: str, directory: Path, client_port: int, monitor_port: int) -> None:
        self.name = name
        self.directory = directory
        self.client_port = client_port
        self.monitor_port = monitor_port
        self.process: subprocess.Popen[bytes] | None = None
        self._is_paused = False
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        with (self.directory / "log").open("ab") as output:
            self.process = subprocess.Popen(
                [nats_server(), "-c", str(self.directory / "nats.conf")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """Ends it without a chance to say anything, as SIGKILL does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def lame_duck(self) -> None:
        """Lets it say that it will end, hand over what it leads, close its connections and end."""
        self._running().send_signal(signal.SIGUSR2)

    def pause(self) -> None:
        self._running().send_signal(signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)
        self._is_paused = False

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def monitored(self, path: str) -> Any:
        """The answer of the monitoring port; None if it is not healthy or not there."""
        try:
            reply = httpx.get(f"{self.monitor_url}{path}", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return None
        return reply.json() if reply.status_code == 200 else None

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def _end(self, how: signal.Signals) -> None:
        process = self._running()
        process.send_signal(how)
        if self._is_paused:
            self.resume()
        process.wait(STOP_TIMEOUT_S)

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process


class NatsServers:
    """A cluster of nodes. `extra` is appended to the configuration of each."""

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        *,
        sync: str = "always",
        max_payload: int = MAX_PAYLOAD,
        max_file_store: str = "2GB",
        extra: str = "",
        has_jetstream: bool = True,
    ) -> None:
        self._settings = {"max_payload": max_payload, "extra": extra}
        self._sync = sync
        self._max_file_store = max_file_store
        self._has_jetstream = has_jetstream
        self._directory = directory
        self._count = count
        self.nodes: list[NatsNode] = []

    def start(self) -> None:
        for attempt in range(ATTEMPTS):
            self._make(self._directory / str(attempt))
            for node in self.nodes:
                node.start()
            try:
                return self.wait_until_ready()
            except PortTaken:
                self.close()
        pytest.fail(f"no free ports for {self._count} nats-servers in {ATTEMPTS} attempts")

    def restart(self, number: int) -> None:
        """Starts a node again that has ended. It waits for its ports: a connection of another
        process may have one for a moment."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            self.nodes[number].start()
            try:
                return self.wait_until_ready()
            except PortTaken:
                assert time.monotonic() < deadline, self.nodes[number].log
                time.sleep(0.2)

    def wait_until_ready(self) -> None:
        """Waits until all nodes that run have caught up with the cluster and know its leader."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        waiting = [node for node in self.nodes if node.is_running()]
        started = [node for node in self.nodes if node.process is not None]
        while waiting:
            waiting = [node for node in waiting if not self._is_ready(node)]
            for node in started:
                if not node.is_running() and "address already in use" in node.log[-2000:]:
                    raise PortTaken(node.log)
            assert time.monotonic() < deadline, "\n".join(node.log[-3000:] for node in waiting)
            time.sleep(0.02 if waiting else 0)

    @property
    def url(self) -> str:
        return "nats://" + ",".join(f"127.0.0.1:{node.client_port}" for node in self.nodes)

    def leader_of(self, stream: str) -> int | None:
        """The number of the node that leads a stream, asked of all nodes; None while there is
        none, or while two say that they are."""
        leaders = {
            number
            for number, node in enumerate(self.nodes)
            if node.is_running() and self._leads(node, stream)
        }
        return leaders.pop() if len(leaders) == 1 else None

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _is_ready(self, node: NatsNode) -> bool:
        if node.monitored("/healthz") is None:
            return False
        if self._count == 1:
            return True
        meta = (node.monitored("/jsz") or {}).get("meta_cluster", {})
        return bool(meta.get("leader")) and meta.get("cluster_size", 0) == self._count

    def _leads(self, node: NatsNode, stream: str) -> bool:
        report = node.monitored("/jsz?streams=1") or {}
        return any(
            each["name"] == stream and each["cluster"].get("leader") == node.name
            for account in report.get("account_details", ())
            for each in account.get("stream_detail", ())
        )

    def _make(self, directory: Path) -> None:
        ports = free_ports(3 * self._count)
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports[2::3])
        self.nodes = []
        for number in range(self._count):
            client, monitor, route = ports[3 * number : 3 * number + 3]
            node = NatsNode(f"n{number}", directory / f"n{number}", client, monitor)
            self.nodes.append(node)
            cluster = (
                f"cluster {{ name: tests, listen: 127.0.0.1:{route}, routes: [{routes}] }}\n"
                if self._count > 1
                else ""
            )
            (node.directory / "nats.conf").write_text(
                f"server_name: {node.name}\nlisten: 127.0.0.1:{client}\n"
                f"http: 127.0.0.1:{monitor}\nmax_payload: {self._settings['max_payload']}\n"
                f"{self._jetstream(node)}{cluster}{self._settings['extra']}\n"
            )

    def _jetstream(self, node: NatsNode) -> str:
        if not self._has_jetstream:
            return ""
        store = json.dumps(str(node.directory / "js"))
        limits = f"sync_interval: {self._sync}, max_file_store: {self._max_file_store}"
        return f"jetstream {{ store_dir: {store}, {limits} }}\n"


class PortTaken(AssertionError):
    """Another process listens on a port that was free a moment ago."""


def free_ports(count: int) -> Sequence[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def nats_servers(directory: Path, count: int = 3, **settings: Any) -> Iterator[NatsServers]:
    """A running cluster, ended with the block."""
    servers = NatsServers(directory, count, **settings)
    try:
        servers.start()
        yield servers
    finally:
        servers.close()
