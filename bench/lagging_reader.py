"""A process that reads a topic from its beginning and acks it, repeatedly, until it is stopped.

It runs at a lower priority than the measured load. Arguments: the port, the number of messages,
and a name for its groups.
"""

from __future__ import annotations

import os
import sys
from itertools import count

import uvloop

from bench.batches import consume_and_ack


async def main(port: int, messages: int, name: str) -> None:
    for number in count():
        # Small acks: this measures reading, not how long a large batch takes.
        await consume_and_ack(port, messages, f"{name}-{number}", enough=1)


if __name__ == "__main__":
    os.nice(19)
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
