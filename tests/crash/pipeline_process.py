"""A subscriber in a process of its own: consumes a stream and publishes to another, exactly once.

Started as `python -m tests.crash.pipeline_process URL OWNER`. It goes on until it is killed, and
keeps nothing: the transaction alone joins an event's ack to what was made of it.
"""

from __future__ import annotations

import sys
import time

from penstock.client import Client, StreamEvent
from penstock.model.errors import FailedPrecondition, PenstockError

SOURCE, TARGET, COUNTS = "orders", "invoices", "counts"
NAME = "pipeline"
LEASE_MS = 500


def transform(client: Client, event: StreamEvent) -> None:
    with client.transaction() as tx:
        tx.publish(TARGET, b"invoice " + event.payload)
        tx.ack(event)
        tx.cache(COUNTS).incr("done")


def run(url: str, owner: str) -> None:
    while True:
        try:
            with (
                Client(url) as client,
                client.stream(SOURCE).subscribe(
                    name=NAME, owner=owner, start="earliest", lease_ms=LEASE_MS, prefetch=8
                ) as events,
            ):
                for event in events:
                    transform(client, event)
        except FailedPrecondition:
            continue  # the lease has ended, and the event was delivered again
        except PenstockError as error:
            if not error.retryable:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    run(*sys.argv[1:])
