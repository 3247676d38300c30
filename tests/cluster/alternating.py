"""A cluster of two brokers that looks to tests like one broker: they are asked in turn.

Used for every `BrokerProcess` when PENSTOCK_TEST_CLUSTER is 1. Clients send each request to the
other broker than the one before. The port and the address are those of the broker that was the
standby after the start, so that what a test does with its own sockets is forwarded. Each broker has
metrics of its own; those of the owner are shown.
What is said about one process (its memory, CPU time, output) is said about both.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx

from tests.broker_process import (
    REQUEST_TIMEOUT_S,
    STOP_TIMEOUT_S,
    BrokerProcess,
    RunningBroker,
    eventually,
)
from tests.cluster.cluster_process import ClusterProcess, MemberProcess, delete_streams, shared_nats

STATIC_TOKEN = "the-token-that-a-cluster-needs"

_clusters: set[str] = set()
"""Clusters whose streams are still there. A test may start another one on the same directory."""


class AlternatingBroker(BrokerProcess):
    def __init__(
        self,
        data_dir: Path | None,
        *flags: str,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        cwd: Path | None = None,
    ) -> None:
        super().__init__(data_dir, *flags, env=env, host=host, port=port, cwd=cwd)
        self._standby: MemberProcess | None = None
        self._first_token = ""
        self._own = Path(tempfile.mkdtemp(prefix="penstock-")) if data_dir is None else None
        if self._needs_first_token():
            self.env["PENSTOCK_TOKEN"] = STATIC_TOKEN
        directory = self._own or data_dir
        assert directory is not None
        name = "c" + hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
        _clusters.add(name)
        self.cluster = ClusterProcess(
            shared_nats(), directory, *flags, env=self.env, host=host, cwd=cwd, name=name
        )
        if port:
            self.brokers[0]._port = port

    @property
    def brokers(self) -> list[MemberProcess]:
        return self.cluster.brokers

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> BrokerProcess:
        for broker in self.brokers:
            broker.env |= self.env
            broker.flags, broker.is_copy, broker.safe_path = (
                self.flags,
                self.is_copy,
                self.safe_path,
            )
        self.cluster.start()
        self._standby = self.cluster.standby()
        self.scheme = self._standby.scheme
        if self.data_dir is not None:
            owner = next(each for each in self.brokers if each is not self._standby)
            assert owner.data_dir is not None
            self.data_dir = owner.data_dir / "shard-0"
        self._client = self.new_client()
        if self.env.get("PENSTOCK_TOKEN") == STATIC_TOKEN:
            self._make_first_token()
        return self

    def _needs_first_token(self) -> bool:
        """Whether a broker would make a first token. A cluster has a token of its own instead."""
        is_guarded = "--access-control" in self.flags or "PENSTOCK_ACCESS_CONTROL" in self.env
        return is_guarded and not ("--token-file" in self.flags or "PENSTOCK_TOKEN" in self.env)

    def _make_first_token(self) -> None:
        """Makes the token that tests read from stdout."""
        headers = {"Authorization": f"Bearer {STATIC_TOKEN}"}
        made = self.client.get("/v1/tokens", headers=headers).json()["tokens"]
        self._first_token = ""
        if not any(each["admin"] for each in made):
            wanted = {"principal": "admin", "admin": True}
            reply = self.client.post("/v1/tokens", headers=headers, json=wanted)
            assert reply.status_code == 201, reply.text
            self._first_token = f"  first token {reply.json()['token']}\n"

    def kill(self) -> None:
        """The standby first: otherwise it would tell its clients about the owner's end."""
        self._close_client()
        for broker in sorted(self.brokers, key=lambda each: each is not self._standby):
            broker.kill()

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        self._close_client()
        return max(broker.terminate(timeout_s) for broker in self.brokers)

    def keep_port(self) -> None:
        for broker in self.brokers:
            broker.keep_port()

    def pause(self) -> None:
        for broker in self.brokers:
            broker.pause()

    def resume(self) -> None:
        for broker in self.brokers:
            broker.resume()

    def close(self) -> None:
        self._close_client()
        for broker in self.brokers:
            broker.close()
        super().close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    # -- looking at it ------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return 0 if self._standby is None else self._standby.port

    @property
    def process(self) -> RunningBroker | None:
        """That of the owner after the start; a signal goes to both."""
        first, second = (broker.process for broker in self.brokers)
        is_first = self._standby is not self.brokers[0]
        return cast(RunningBroker, _Pair(first, second) if is_first else _Pair(second, first))

    @process.setter
    def process(self, process: RunningBroker | None) -> None:
        """The brokers have their own."""

    def new_client(self, **options: Any) -> httpx.Client:
        urls = [httpx.URL(broker.url) for broker in self.brokers]
        own_port = re.compile("|".join(f":{url.port}$" for url in urls))
        owner_url = urls[0 if self._standby is not self.brokers[0] else 1]
        asked = [0]

        def direct(request: httpx.Request) -> None:
            asked[0] += 1
            url = urls[asked[0] % 2]
            if request.url.path == "/metrics":
                url = owner_url
            if own_port.search(request.url.netloc.decode()):
                for name in {"host", "origin"} & request.headers.keys():
                    request.headers[name] = own_port.sub(f":{url.port}", request.headers[name])
                request.url = request.url.copy_with(host=url.host, port=url.port)

        hooks = {"request": [direct]}
        chosen: dict[str, Any] = {"timeout": REQUEST_TIMEOUT_S, "event_hooks": hooks} | options
        return httpx.Client(base_url=str(urls[0]), trust_env=False, **chosen)

    def stdout(self) -> str:
        return "".join(broker.stdout() for broker in self.brokers) + self._first_token

    def stderr(self) -> str:
        return "".join(broker.stderr() for broker in self.brokers)

    def wait_for_seal(self) -> None:
        directories = [broker.data_dir for broker in self.brokers if broker.data_dir is not None]
        manifests = [directory / "shard-0" / "MANIFEST" for directory in directories]
        eventually(lambda: all(each.exists() for each in manifests), timeout_s=180)

    def rss_bytes(self) -> int:
        return max(broker.rss_bytes() for broker in self.brokers)

    def cpu_s(self) -> float:
        return sum(broker.cpu_s() for broker in self.brokers)

    def is_running(self) -> bool:
        return any(broker.is_running() for broker in self.brokers)


class _Pair:
    """The processes of both brokers, the owner's first."""

    def __init__(self, *processes: RunningBroker | None) -> None:
        self._processes = [each for each in processes if each is not None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processes[0], name)

    def send_signal(self, number: int) -> None:
        for each in self._processes:
            each.send_signal(number)


def forget_clusters() -> None:
    """Deletes the streams of the clusters so far. They must have ended."""
    while _clusters:
        delete_streams(shared_nats(), _clusters.pop())
