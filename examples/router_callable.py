"""A router as a Python function: the broker asks it where each message goes.

Run it, from the folder of this file:

    penstock serve --router router_callable:route

or, with the coroutine function, which can wait without blocking a thread:

    penstock serve --router router_callable:route_async

Then, in another terminal:

    penstock topic create tickets
    penstock topic create tickets.urgent
    penstock produce tickets "the printer is on fire"
    penstock consume tickets.urgent --group crew --ack --timeout 2

If the router raises, or takes longer than --router-timeout-ms, the message is stored where its
producer sent it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

URGENT = ("fire", "down", "urgent")


def route(topic: str, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Sends urgent tickets to a separate topic. All members of the answer are optional.

    `message` has `key`, `value` and `envelope`. None keeps the producer's choice.
    """
    if topic != "tickets":
        return None
    words = [word for word in URGENT if word in message["value"].lower()]
    if not words:
        return {"label": "routine"}
    return {"label": "urgent", "target_topic": "tickets.urgent", "meta": {"because": words[0]}}


async def route_async(topic: str, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Does the same for a router that waits for a model or a database."""
    await asyncio.sleep(0.001)
    return route(topic, message)
