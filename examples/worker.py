"""A worker that charges each order once, whatever crashes or is delivered twice.

Run a broker, this worker, and give it work:

    penstock serve
    python worker.py
    penstock produce orders "17 EUR" --idempotency-key order-1 --retry-max-attempts 3
    penstock produce orders "no amount" --retry-max-attempts 3 --retry-backoff-ms 200

The second order fails three times and then goes to `dlq.orders`:

    penstock consume dlq.orders --group people --timeout 2

Start as many workers as you like: they share the group's work. Ctrl-C stops one cleanly.
"""

from __future__ import annotations

import logging
import signal

from penstock.client import Client, Delivery, Worker


def charge(order: Delivery) -> str:
    """Charges one order. The return value is the effect's result; an error makes it fail."""
    amount = order.value.split()[0]
    if not amount.isdigit():
        raise ValueError(f"{amount!r} is not an amount")
    print(f"charging {order.value} (attempt {order.attempts})", flush=True)
    return f"charged {amount}"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with Client() as client:  # reads PENSTOCK_URL, PENSTOCK_TOKEN and PENSTOCK_TOKEN_FILE
        client.create_topic("orders")
        worker = Worker(client, "orders", "billing", charge, effect=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: worker.stop())
        print(f"waiting for orders as {worker.owner}", flush=True)
        worker.run()


if __name__ == "__main__":
    main()
