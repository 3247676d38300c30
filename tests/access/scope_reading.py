"""Notes of requests that remember which parts of the scope a handler has read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.server.http.requests import Notes

PARTS = ("tenant", "namespace")

READ: set[str] = set()
"""What was read since somebody emptied this."""


class ReadScope(tuple[str, str]):
    __slots__ = ()

    def __getitem__(self, at: Any) -> Any:
        READ.update(PARTS[at] if isinstance(at, slice) else [PARTS[at]])
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[str]:
        READ.update(PARTS)
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        READ.update(PARTS)
        return super().__eq__(other)

    def __hash__(self) -> int:
        READ.update(PARTS)
        return super().__hash__()


class ReadNotes(Notes, frozen=True):
    def __getattribute__(self, name: str) -> Any:
        if name in PARTS:
            READ.add(name)
        return super().__getattribute__(name)


def remembering(notes: Notes) -> ReadNotes:
    members = {name: getattr(notes, name) for name in notes.__struct_fields__}
    return ReadNotes(**members | {"scope": ReadScope(notes.scope)})
