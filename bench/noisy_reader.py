"""A process that reads ranges and entries of a cache as fast as it can, until it is stopped.

No quota limits such reads, so all of them are answered. Argument: the port.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from bench.batches import VALUE
from bench.lean_client import Asking
from bench.processes import TOPIC
from bench.rows import BenchFailed

READER = "reader"
MESSAGES = 20_000
"""The messages in a range: some megabytes, which take many pieces of an answer."""
ENTRY = f"/v1/tenants/{READER}/namespaces/default/caches/bench/entries/k"
_CONNECTIONS = 4
"""For each of the two."""
_RANGE = f"/v1/topics/{TOPIC}/partitions/0/records?format=arrow"
_LONGEST = 64 << 20
_LAST_CHUNK = b"\r\n0\r\n\r\n"


def filling() -> list[dict[str, str]]:
    """Returns the messages that the ranges have."""
    return [{"topic": TOPIC, "key": f"{number:08}", "value": VALUE} for number in range(MESSAGES)]


async def main(port: int) -> None:
    readers = [each(port) for each in (_read_entries, _read_ranges) for _ in range(_CONNECTIONS)]
    await asyncio.gather(*readers)


async def _read_entries(port: int) -> None:
    connection = await Asking().connect(port)
    request = _get(ENTRY)
    while True:
        await connection.ask(request)


async def _read_ranges(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST)
    request = _get(_RANGE)
    while True:
        writer.write(request)
        answer = await reader.readuntil(_LAST_CHUNK)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BenchFailed(f"a range was refused: {answer[:500]!r}")


def _get(path: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", f"X-Penstock-Tenant: {READER}", "\r\n")
    return "\r\n".join(lines).encode()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
