"""One publisher, two subscribers: each gets every event, in order.

Run a broker, and this:

    penstock serve
    python fan_out.py

It prints

    dashboard  21.5
    dashboard  21.7
    dashboard  22.1
    alarm      22.1 is too warm

An event goes to the present subscribers and is not stored: a subscriber that comes later, or comes
back, does not see it. For work that must not get lost, use a topic and a group.
"""

from __future__ import annotations

from penstock.client import Client

STREAM = "temperature"
TOO_WARM = 22.0


def main() -> None:
    with Client() as client:  # reads PENSTOCK_URL, PENSTOCK_TOKEN and PENSTOCK_TOKEN_FILE
        client.create_stream("default", "default", STREAM)
        stream = client.stream(STREAM)
        # Both are open before anything is published. With wait_s they end after a second without
        # an event. A long-running program omits it, and subscribes again after `Unavailable`.
        with stream.subscribe(wait_s=1) as dashboard, stream.subscribe(wait_s=1) as alarm:
            stream.publish("21.5")
            stream.publish_batch(["21.7", "22.1"])
            # This reads them one after the other: unread events wait in each subscription's own
            # buffer. Real programs use a thread, a task or a process for each.
            for payload in dashboard:
                print(f"dashboard  {payload.decode()}")
            for payload in alarm:
                if float(payload) > TOO_WARM:
                    print(f"alarm      {payload.decode()} is too warm")


if __name__ == "__main__":
    main()
