"""How durable an engine is, and whether it can write now."""

from __future__ import annotations

from typing import Literal

import msgspec

FsyncMode = Literal["commit", "interval", "none"]


class Capabilities(msgspec.Struct, frozen=True):
    """`durability` says in words what a 2xx means."""

    wal_enabled: bool
    fsync: FsyncMode
    durability: str


class Health(msgspec.Struct, frozen=True):
    """`ready` is false when nothing can be written; `reason` says why. A `warning` is for
    operators: the broker serves, but something needs their attention."""

    ready: bool
    reason: str = ""
    warning: str = ""
