"""How far a group is in a partition, as said by somebody who keeps count elsewhere."""

from __future__ import annotations

import msgspec


class Reached(msgspec.Struct, frozen=True, gc=False):
    """Everything of the partition below `next` is done."""

    partition: int
    next: int
