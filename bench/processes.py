"""The measured servers: a broker, the bare responder and Redis, each in its own process.

Owns starting them on the server's core, waiting until they answer, and ending them. Must not know
the loads.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from bench.cores import Cores, on_server_core
from bench.rows import BenchFailed
from penstock.server.settings import Settings
from penstock.storage.manifest import load_manifest
from penstock.storage.vfs import Vfs

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
TOPIC = "bench"
CACHE_PATH = "/v1/tenants/default/namespaces/default/caches/default/entries"
ROOMY: dict[str, int | str] = {
    "max_partition_msgs": 1_000_000_000,
    "max_partition_bytes": 1 << 40,
    "max_idempotency_keys": 1_000_000_000,
}
"""Limits so large that no produce is refused because of the backlog."""

_ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)")
_SAID_CHARS = 2000
_Self = TypeVar("_Self", bound="Server")


class Server:
    """A server process with a directory and a port; use it in a `with`."""

    def __init__(self, cores: Cores, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"The last that {self.directory.name} said:", file=sys.stderr)
            print(self._said()[-_SAID_CHARS:], file=sys.stderr)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BenchFailed("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers; leaves no process behind when it does not."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with on_server_core(self._cores), open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def _output(self) -> Path:
        return self.directory / "output.txt"

    def _wait_for_address(self) -> int:
        """Returns the port from the line in which the server prints its address."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            found = _ADDRESS.search(self._output.read_bytes())
            if found is not None:
                return int(found[1])
            self._check_alive()
            time.sleep(0.002)
        raise BenchFailed(f"no address in {self._output} after {START_TIMEOUT_S:.0f} s")

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise BenchFailed(f"it ended with {self._process.returncode}:\n{self._said()}")

    def _said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")


class BareResponder(Server):
    def _start(self) -> None:
        self._spawn([sys.executable, "-m", "bench.bare_responder"], _python_environment())
        self.port = self._wait_for_address()


class Broker(Server):
    """A broker with ROOMY and `settings`; all other settings have their defaults. If `token` is one
    of them, `ask` sends it."""

    def __init__(self, cores: Cores, directory: Path, **settings: int | str) -> None:
        super().__init__(cores, directory)
        self.data = directory / "data"
        self._settings = ROOMY | settings
        self._segment_bytes = int(settings.get("segment_bytes", Settings().segment_bytes))

    def _start(self) -> None:
        """Waits until the broker reports that it is ready. It uses the data of earlier starts."""
        environment = _python_environment()
        for name, value in self._settings.items():
            environment[f"PENSTOCK_{name.upper()}"] = str(value)
        command = [sys.executable, "-m", "penstock", "serve"]
        self._spawn([*command, "--port", "0", "--data-dir", str(self.data)], environment)
        self.port = self._wait_for_address()
        self._wait_until_ready()

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Sends one request that must succeed and is not measured."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        token = self._settings.get("token")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        content = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            answer = reply.read()
        finally:
            connection.close()
        if not 200 <= reply.status < 300:
            raise BenchFailed(f"{method} {path}: {reply.status} {answer.decode()}")
        return answer

    def create_topic(self, name: str = TOPIC) -> None:
        self.ask("POST", "/v1/topics", {"name": name})

    def stored(self, name: str = TOPIC) -> int:
        """Returns the number of messages that the topic retains."""
        report = msgspec.json.decode(self.ask("GET", f"/v1/topics/{name}"))
        return sum(partition["retained_msgs"] for partition in report["partitions"])

    def cache_version(self) -> int:
        """Returns the cache's version after one more put; every put takes a version."""
        answer = self.ask("PUT", f"{CACHE_PATH}/probe", {"value": ""})
        return int(msgspec.json.decode(answer)["version"])

    def fsync_mode(self) -> str:
        return str(msgspec.json.decode(self.ask("GET", "/v1/version"))["fsync"])

    def metric(self, name: str) -> float:
        """Returns the value of a metric without labels."""
        text = self.ask("GET", "/metrics").decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise BenchFailed(f"/metrics has no {name}")
        return float(found[1])

    def wait_until_sealed(self) -> None:
        """Waits until only the active segment is left of the log and no sealing runs."""
        while self.metric("penstock_log_bytes") > self._segment_bytes:
            time.sleep(0.2)

    def seal_everything(self) -> None:
        """Moves all stored messages to history; the log is nearly empty afterwards."""
        self.wait_until_sealed()
        before = self._sealed_up_to()
        # Deleting a topic starts a sealing run, which seals everything else too.
        self.create_topic("to-be-deleted")
        self.ask("DELETE", "/v1/topics/to-be-deleted")
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._sealed_up_to() == before:
            if time.monotonic() > deadline:
                raise BenchFailed("the log was not sealed")
            time.sleep(0.1)
        self.wait_until_sealed()

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        if found is None:
            raise BenchFailed("/proc does not tell the memory of a process here")
        return int(found[1]) * 1024

    def _sealed_up_to(self) -> int:
        manifest = load_manifest(Vfs(), str(self.data))
        return manifest.first_segment if manifest is not None else 0

    def _wait_until_ready(self) -> None:
        """Retries, because the address may be printed just before the server listens."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.ask("GET", "/v1/readyz")
                return
            except (ConnectionRefusedError, BenchFailed):
                self._check_alive()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)


class RedisServer(Server):
    """Redis, durable with a sync of its log before every answer, as the broker is for queues; or
    with no log at all, as the broker is for streams and caches.

    Its log is never rewritten and no snapshot is taken: both would only slow it down.
    """

    def __init__(self, cores: Cores, directory: Path, *, durable: bool) -> None:
        super().__init__(cores, directory)
        self._durable = durable

    def _start(self) -> None:
        self.port = _free_port()
        settings = {
            "port": self.port, "bind": "127.0.0.1", "dir": self.directory, "save": "",
            "appendonly": "yes" if self._durable else "no", "appendfsync": "always",
            "auto-aof-rewrite-percentage": 0,
        }  # fmt: skip
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._spawn(["redis-server", *flags], dict(os.environ))
        self._wait_until_it_listens()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except ConnectionRefusedError:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _python_environment() -> dict[str, str]:
    """Returns an environment with this checkout's broker and without the caller's settings."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("PENSTOCK_")}
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
