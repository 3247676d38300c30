"""One publisher, two subscribers: each gets every event, in order.

Run a broker, and this:

    penstock serve
    python fan_out.py

It prints

    dashboard  21.5
    dashboard  21.7
    dashboard  22.1
    alarm      22.1 is too warm

An event goes to who subscribes when it is published, and is then forgotten: a subscriber that
comes later, or comes back, does not see it. For work that must not be lost use a topic and a group.
"""

from __future__ import annotations

from penstock.client import Client

STREAM = "temperature"
TOO_WARM = 22.0


def main() -> None:
    with Client() as client:  # PENSTOCK_URL and PENSTOCK_TOKEN say where
        client.create_stream("default", "default", STREAM)
        stream = client.stream(STREAM)
        # Both are open before anything is published. With wait_s they end when nothing comes any
        # more; a program that runs on leaves it out, and subscribes again after `Unavailable`.
        with stream.subscribe(wait_s=1) as dashboard, stream.subscribe(wait_s=1) as alarm:
            stream.publish("21.5")
            stream.publish_batch(["21.7", "22.1"])
            # Here they are read one after the other, which the broker does not mind: what one has
            # not read waits for that one alone. Programs have a thread, a task or a process each.
            for payload in dashboard:
                print(f"dashboard  {payload.decode()}")
            for payload in alarm:
                if float(payload) > TOO_WARM:
                    print(f"alarm      {payload.decode()} is too warm")


if __name__ == "__main__":
    main()
