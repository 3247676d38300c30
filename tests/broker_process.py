"""A real broker in a process of its own, for tests that look at it from outside.

Owns starting, stopping, killing and starting again; knows the command line and the one line on
stdout that says where the broker listens. What a test asks over HTTP goes through `client`.
It must not import the broker's code: a test that needs it does not belong at this seam.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

from tests.ndjson import ConsumeStream
from tests.penstock_template import MEASURING, CopiedProcess, is_plain, python_settings, template
from tests.penstock_template import SOURCE as SOURCE

START_TIMEOUT_S = 120.0
SEAL_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
PROMPT_S = 10.0
"""What nothing holds up takes less than this, on a busy machine too."""

PATIENCE = {"PENSTOCK_ROUTER_TIMEOUT_MS": "20000"}
"""Gives a router that is started beside other work the time it needs. Flags override it."""

IS_CLUSTER = os.environ.get("PENSTOCK_TEST_CLUSTER") == "1"
"""Makes every broker of the tests a cluster of two, as cluster/alternating.py describes."""

_ADDRESS = re.compile(r"(https?)://127\.0\.0\.1:(\d+)")

T = TypeVar("T")

RunningBroker = subprocess.Popen[bytes] | CopiedProcess


class StartFailed(AssertionError):
    """The broker ended, or did not say where it listens, in time."""

    def __init__(self, code: int | None, output: str) -> None:
        super().__init__(f"broker did not start (exit code {code}):\n{output}")
        self.code = code
        self.output = output


class BrokerProcess:
    """One broker, started any number of times on the same directory and settings.

    It is a copy of a process that has loaded the broker, if only settings tell it from others. A
    test about the start itself sets `is_copy` to False.

    `data_dir` None means `--memory`. `env` adds to the environment, from which every PENSTOCK_
    variable of the caller is taken out first. `port` 0 means any, another one with every start.
    `cwd` is its working directory, if not the caller's. With `safe_path` Python does not look for
    modules there.
    """

    is_copy = True

    def __new__(cls, *arguments: Any, **options: Any) -> BrokerProcess:
        if cls is BrokerProcess and IS_CLUSTER:
            from tests.cluster.alternating import AlternatingBroker

            return object.__new__(AlternatingBroker)
        return object.__new__(cls)

    def __init__(
        self,
        data_dir: Path | None,
        *flags: str,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        cwd: Path | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.cwd = cwd
        self.flags = flags
        self.host = host
        self.env = dict(env or {})
        self.scheme = "http"
        self.safe_path = False
        self._port = port
        self._listens_at = 0
        self.process: RunningBroker | None = None
        # Files, not pipes: nobody has to read them for the broker to go on.
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115 - close() ends it
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._client: httpx.Client | None = None

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> BrokerProcess:
        for output in (self._stdout, self._stderr):
            output.seek(0)
            output.truncate()
        self.process = self._start_copy() if self._may_be_a_copy() else self._start_fresh()
        self._listens_at = self._wait_for_address(self.process)
        self._client = self.new_client()
        return self

    def kill(self) -> None:
        """SIGKILL: what the broker had not made durable is gone."""
        self._close_client()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and the exit code."""
        self._close_client()
        if self.process is None:
            raise RuntimeError("the broker was never started")
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.kill()
        else:
            code = self.terminate()
            assert code == 0, f"SIGTERM ended the broker with {code}:\n{self.stderr()}"
        self.start()

    def __enter__(self) -> BrokerProcess:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def keep_port(self) -> None:
        """Lets later starts listen where this one does."""
        self._port = self._listens_at

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        if self.process is None:
            raise RuntimeError("the broker is not running")
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is None:
            raise RuntimeError("the broker is not running")
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Whatever happened in the test, leave no process behind."""
        if MEASURING and self.process is not None:
            # A killed process writes no coverage. One paused by SIGSTOP is killed below.
            with suppress(subprocess.TimeoutExpired):
                self.terminate()
        self.kill()
        self._stdout.close()
        self._stderr.close()

    # -- looking at it ------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self._listens_at

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            raise RuntimeError("the broker is not running")
        return self._client

    def new_client(self, **options: Any) -> httpx.Client:
        """A client with connections of its own; close it, or use it in a `with`."""
        chosen = {"timeout": REQUEST_TIMEOUT_S} | options
        return httpx.Client(base_url=self.url, trust_env=False, **chosen)

    def stdout(self) -> str:
        return _contents(self._stdout)

    def wait_for_seal(self) -> None:
        """Waits until the log was sealed once. Sealing takes only idle time of the CPU while few
        segments wait, and a machine that runs other tests beside this one has little of it."""
        assert self.data_dir is not None
        manifest = self.data_dir / "MANIFEST"
        eventually(manifest.exists, timeout_s=SEAL_TIMEOUT_S)

    def stderr(self) -> str:
        return _contents(self._stderr)

    def rss_bytes(self) -> int:
        if self.process is None:
            raise RuntimeError("the broker is not running")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None, status
        return int(found.group(1)) * 1024

    def cpu_s(self) -> float:
        """What it has worked so far: a measure that a busy machine does not stretch as it does
        the time of a clock."""
        if self.process is None:
            raise RuntimeError("the broker is not running")
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # -- the requests nearly every test makes -------------------------------------------------

    def create_topic(self, name: str, partitions: int = 1) -> str:
        reply = self.client.post("/v1/topics", json={"name": name, "partitions": partitions})
        assert reply.status_code == 201, reply.text
        return name

    def produce(
        self, topic: str, value: str, key: str = "", envelope: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """One produce, whatever the answer."""
        body: dict[str, Any] = {"topic": topic, "key": key, "value": value}
        if envelope is not None:
            body["envelope"] = dict(envelope)
        return self.client.post("/v1/produce", json=body)

    def put(
        self, topic: str, value: str, key: str = "", envelope: Mapping[str, Any] | None = None
    ) -> None:
        """One produce that must succeed."""
        reply = self.produce(topic, value, key, envelope)
        assert reply.status_code == 200, reply.text

    @contextmanager
    def consume(
        self,
        topic: str,
        group: str = "g",
        owner: str = "o",
        lease_ms: int | None = 60_000,
        **options: Any,
    ) -> Iterator[ConsumeStream]:
        """An open consume stream, with a lease that ends only where a test is about leases."""
        stream = self.open_consume(topic, group, owner, lease_ms, **options)
        try:
            yield stream
        finally:
            stream.close()

    def open_consume(
        self,
        topic: str,
        group: str = "g",
        owner: str = "o",
        lease_ms: int | None = 60_000,
        **options: Any,
    ) -> ConsumeStream:
        parameters: dict[str, str | int] = {"topic": topic, "group": group, "owner": owner}
        if lease_ms is not None:
            parameters["lease_ms"] = lease_ms
        receive_buffer = options.pop("receive_buffer", None)
        parameters.update(options)
        target = str(httpx.URL("/v1/consume", params=parameters))
        stream = ConsumeStream(self.port, target, receive_buffer=receive_buffer)
        assert stream.status == 200, (stream.status, stream.rest_of_body())
        return stream

    def ack(self, topic: str, item: Any, group: str = "g", owner: str = "o") -> httpx.Response:
        return self.client.post("/v1/ack", json=settle_body(topic, item, group, owner))

    def nack(
        self,
        topic: str,
        item: Any,
        group: str = "g",
        owner: str = "o",
        reason: str = "because",
        **how: Any,
    ) -> httpx.Response:
        body = settle_body(topic, item, group, owner) | {"reason": reason} | how
        return self.client.post("/v1/nack", json=body)

    # -- inside -------------------------------------------------------------------------------

    def _may_be_a_copy(self) -> bool:
        """Whether only settings of the broker tell this start from any other one."""
        return self.is_copy and self.cwd is None and not self.safe_path and is_plain(self.env)

    def _start_copy(self) -> CopiedProcess:
        files = self._stdout.fileno(), self._stderr.fileno()
        return template().start(self._command()[3:], self._environment(), *files)

    def _start_fresh(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(),
            env=self._environment(),
            cwd=self.cwd,
            stdout=self._stdout,
            stderr=self._stderr,
            stdin=subprocess.DEVNULL,
        )

    def _command(self) -> list[str]:
        where = ["--memory"] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        return [
            sys.executable, *(["-P"] if self.safe_path else []), "-m", "penstock", "serve",
            "--host", self.host, "--port", str(self._port), *where, *self.flags,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        paths = [str(SOURCE), self.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        return inherited | PATIENCE | self.env | python_settings(paths)

    def _wait_for_address(self, process: RunningBroker) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            code = process.poll()
            found = _ADDRESS.search(self.stdout())
            if found is not None:
                self.scheme = found.group(1)
                return int(found.group(2))
            if code is not None:
                raise StartFailed(code, self.stdout() + self.stderr())
            time.sleep(0.01)
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        raise StartFailed(None, self.stdout() + self.stderr())

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _contents(output: IO[bytes]) -> str:
    """The whole file, without moving the position the broker writes at."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="replace")


def settle_body(topic: str, item: Any, group: str, owner: str) -> dict[str, Any]:
    """What ack, nack and extend need to name a delivery."""
    return {
        "topic": topic,
        "group": group,
        "partition": item.partition,
        "offset": item.offset,
        "owner": owner,
    }


def eventually(
    look: Callable[[], T], good: Callable[[T], object] = bool, timeout_s: float = 10.0
) -> T:
    """What `look` returns, as soon as it is `good`; fails with the last thing seen."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if good(seen):
            return seen
        assert time.monotonic() < deadline, f"not within {timeout_s} s; last seen: {seen!r}"
        time.sleep(0.02)


def wait_until(moment: float) -> None:
    """Until `time.monotonic()` is past the moment: for tests about time itself."""
    while (remaining := moment - time.monotonic()) >= 0:
        time.sleep(remaining + 0.001)
