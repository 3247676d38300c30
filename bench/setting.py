"""The parameters of every load: duration, size, number of runs, cores and available tools."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.cores import Cores
from bench.processes import BareResponder, Broker, RedisServer


class Setting(msgspec.Struct, frozen=True):
    """Parameters of a load. `messages` is the targets' million; `missing` names absent tools."""

    cores: Cores
    out: Path
    runs: int = 3
    seconds: float = 8.0
    messages: int = 1_000_000
    missing: tuple[str, ...] = ()

    def broker(self, name: str, **settings: int | str) -> Broker:
        return Broker(self.cores, self.out / name, **settings)

    def bare_responder(self) -> BareResponder:
        return BareResponder(self.cores, self.out / "bare-responder")

    def redis_server(self, *, durable: bool = True) -> RedisServer:
        return RedisServer(self.cores, self.out / "redis", durable=durable)

    def each_run(self, load: str) -> Iterator[int]:
        for run in range(1, self.runs + 1):
            self.say(f"{load}: run {run} of {self.runs}")
            yield run

    def lacks(self, *tools: str) -> str:
        """Returns a note about missing tools, or an empty text if all are there."""
        lacking = [tool for tool in tools if tool in self.missing]
        return f"missing on this machine: {', '.join(lacking)}" if lacking else ""

    def say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)
