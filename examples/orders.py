"""Events that are not lost: a durable stream, a named subscription, a transaction and a WebSocket.

Run a broker, and this:

    penstock serve
    python orders.py

It prints

    order 0 is on disk
    order 1 is on disk
    order 2 is on disk
    the dashboard saw apples 3, pears 4, plums 5
    billed 12 EUR
    3 invoices

Orders are published to a durable stream. A subscription with the name "billing" gets each of them
until it is acked; run this again, and it goes on where it was. `once` keeps the handled offsets in
a file, so that an order whose ack was lost is not billed twice. A transaction stores the invoice
and changes the total together, or not at all. A dashboard follows the stream over a WebSocket.
"""

from __future__ import annotations

from penstock.client import Client, PositionFile

ORDERS = ("apples 3", "pears 4", "plums 5")


def main() -> None:
    with Client() as client:
        client.create_stream("default", "default", "shop", delivery="at_least_once")
        client.create_cache("default", "default", "totals", durable=True)
        client.create_topic("invoices")
        shop = client.stream("shop")

        with client.connect() as socket, socket.stream("shop").subscribe(wait_s=2) as dashboard:
            for order in ORDERS:
                print("order", shop.publish(order), "is on disk")
            seen = [next(dashboard).decode() for _ in ORDERS]
            print("the dashboard saw", ", ".join(seen))

        handled = PositionFile("billing.position")
        with shop.subscribe(name="billing", start="earliest", once=handled, wait_s=1) as orders:
            for event in orders:
                goods, amount = event.payload.decode().split()
                with client.transaction(f"order-{event.offset}") as tx:
                    tx.produce("invoices", f"{amount} EUR for {goods}")
                    tx.cache("totals").incr("sales", int(amount))
                event.ack()  # stores the offset first

        total = client.cache("totals").get("sales")
        print("billed", total.value.decode() if total else "0", "EUR")
        print(client.describe_topic("invoices").next_offset, "invoices")


if __name__ == "__main__":
    main()
