"""A process that produces ten times the quota of its tenant, until it is stopped.

It sends at a steady pace, however the broker answers. Argument: the port.
"""

from __future__ import annotations

import sys

import uvloop

from bench.batches import VALUE
from bench.lean_client import Connection, connect, post
from bench.pace import keep_pace
from bench.processes import TOPIC

NOISY = "noisy"
QUOTA = 500
"""Messages a second."""
OVERDRAFT = 10
_CONNECTIONS = 4
_FOR_EVER_S = 3600.0
_TOO_MANY_REQUESTS = 429


def produce_request(tenant: str) -> bytes:
    body = f'{{"topic":"{TOPIC}","key":"k","value":"{VALUE}"}}'
    return post("/v1/produce", body.encode(), f"X-Penstock-Tenant: {tenant}")


async def main(port: int) -> None:
    request = produce_request(NOISY)
    connections: list[Connection] = []
    errors: list[Exception] = []
    for _ in range(_CONNECTIONS):
        connections.append(await connect(port, _ignore, errors.append, _TOO_MANY_REQUESTS))

    def send(number: int) -> None:
        if errors:
            raise errors[0]
        connections[number % _CONNECTIONS].write(request)

    await keep_pace(OVERDRAFT * QUOTA, _FOR_EVER_S, send)


def _ignore(_: int, body: bytes) -> None:
    """Drops the answer: whether it is a refusal is counted by the broker."""


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
