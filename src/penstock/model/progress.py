"""Progress of a group in a partition, as published by a reader that counts by itself."""

from __future__ import annotations

import msgspec


class Reached(msgspec.Struct, frozen=True, gc=False):
    """Everything in the partition below `next` is done."""

    partition: int
    next: int
