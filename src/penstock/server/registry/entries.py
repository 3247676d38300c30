"""The settings of streams and caches as bodies give them: their types, and how they are read.

A member left out keeps its value; `null` sets the default again. Durations and sizes may have a
unit. Must not know requests or replies; core decides whether an entry is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET

from penstock.model.errors import FailedPrecondition
from penstock.model.limits import MAX_OFFSET
from penstock.model.names import clean_name
from penstock.model.options import Kind, duration_ms, read_member, size_bytes
from penstock.model.quotas import Quota
from penstock.model.tenancy import CacheConfig, Entry, Path, StreamConfig
from penstock.server.members import Name, limits, required
from penstock.server.websocket.messages import Body

MAX_TIMEOUT_MS = 600_000
"""Ten minutes: what waits longer than that is stuck."""

C = TypeVar("C", StreamConfig, CacheConfig, Quota)

EntryName = Annotated[Name | None, required("Its name: 1 to 200 bytes of UTF-8.")]
DurationText = Annotated[
    str, limits(pattern=r"^\s*(\d{1,15}\s*(ms)?|\d{1,12}\s*s|\d{1,10}\s*m|\d{1,8}\s*[hd])\s*$")
]
TimeoutText = Annotated[
    str,
    limits(
        pattern=r"^\s*(([1-9]\d{0,4}|[1-5]\d{5}|600000)\s*(ms)?|([1-9]\d?|[1-5]\d{2}|600)\s*s|"
        r"([1-9]|10)\s*m)\s*$"
    ),
]
Bytes = Annotated[int, limits(minimum=1, maximum=MAX_OFFSET)]
BytesText = Annotated[
    str,
    limits(
        pattern=r"^\s*([1-9]\d{0,14}\s*[Bb]?|[1-9]\d{0,11}\s*([Kk][Ii]?[Bb])|"
        r"[1-9]\d{0,8}\s*([Mm][Ii]?[Bb])|[1-9]\d{0,5}\s*([Gg][Ii]?[Bb])|"
        r"[1-9]\d{0,2}\s*([Tt][Ii]?[Bb]))\s*$"
    ),
]

Read = Callable[[str, Any], Any]
"""Takes a member's name and value; returns the value to keep, or raises InvalidArgument."""


def as_it_is(_: str, value: Any) -> Any:
    return value


def read_as(kind: Kind) -> Read:
    """Returns what reads a member of this kind."""

    def read(name: str, value: int | str) -> Any:
        return read_member(kind, name, value)

    return read


SIZE = read_as(size_bytes(1, MAX_OFFSET))
RETENTION = read_as(duration_ms(0, MAX_OFFSET))


def read_config(body: Body, members: dict[str, tuple[str, Read]], now: C | None, default: C) -> C:
    """Returns the config that the body asks for, given the config now. `members` has, for each
    member of the body, its name in the config and how it is read."""
    values = {}
    for member, (name, read) in members.items():
        value = getattr(body, member)
        if value is None:
            values[name] = getattr(default, name)
        elif value is not UNSET:
            values[name] = read(member, value)
    return msgspec.structs.replace(now or default, **values)


def check_lasting(entry: Entry, config: StreamConfig | CacheConfig) -> None:
    """Refuses a change of what an entry is; that takes a new entry under another name."""
    name = lasting_difference(entry, config)
    if name:
        raise FailedPrecondition(
            f"{name} of {entry.kind} {'/'.join(entry.path)!r} cannot change; create another"
        )


def lasting_difference(entry: Entry, config: StreamConfig | CacheConfig) -> str:
    """Returns the setting that differs and cannot change; nothing if there is none."""
    now = entry.stream or entry.cache
    for name in ("delivery", "durable"):
        if getattr(config, name, None) != getattr(now, name, None):
            return name
    return ""


def entry_path(*names: str | None) -> Path:
    """The names on the way to an entry, cleaned; those that do not apply are empty."""
    what = ("tenant_id", "namespace", "name")
    cleaned = [clean_name(name, each) for name, each in zip(names, what, strict=False)]
    tenant, namespace, name = [*cleaned, "", ""][:3]
    return tenant, namespace, name
