"""A process that reads a topic from its beginning and acks it, again and again, until it is ended.

It yields the core to the load that is measured. Arguments: the port, how many messages, and a
name for its groups.
"""

from __future__ import annotations

import os
import sys
from itertools import count

import uvloop

from bench.batches import consume_and_ack


async def main(port: int, messages: int, name: str) -> None:
    for number in count():
        # Small acks: what is looked at is the reading, not how long a large batch takes.
        await consume_and_ack(port, messages, f"{name}-{number}", enough=1)


if __name__ == "__main__":
    os.nice(19)
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
