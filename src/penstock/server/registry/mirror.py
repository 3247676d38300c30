"""The registry as followers get it over the wire, and a follower's copy of it.

Must not know how it is asked for.
"""

from __future__ import annotations

import msgspec

from penstock.model.tenancy import Entry, Kind, Path


class RemoteChange(msgspec.Struct, frozen=True):
    """`revision` is that of the entry."""

    revision: int
    entry: Entry
    deleted: bool


class RemoteSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`instance` is the process that answers; `follows` are those it follows, nearest first."""

    instance: str
    follows: list[str]
    epoch: int
    revision: int
    entries: list[Entry]


class RemoteChanges(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    follows: list[str]
    epoch: int
    revision: int
    changes: list[RemoteChange]


class Mirror:
    """The control plane's entries at `revision`. `is_new`: the own registry lacks some of them."""

    def __init__(self) -> None:
        self.instance = ""
        self.epoch = 0
        self.revision = 0
        self.is_new = False
        self._entries: dict[tuple[Kind, Path], Entry] = {}

    def take_snapshot(self, snapshot: RemoteSnapshot) -> None:
        self._entries = {(entry.kind, entry.path): entry for entry in snapshot.entries}
        self.instance, self.epoch = snapshot.instance, snapshot.epoch
        self.revision = snapshot.revision
        self.is_new = True

    def take_changes(self, news: RemoteChanges) -> None:
        for change in news.changes:
            key = (change.entry.kind, change.entry.path)
            if change.deleted:
                self._entries.pop(key, None)
            else:
                self._entries[key] = change.entry
        self.revision = news.revision
        self.is_new = self.is_new or bool(news.changes)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())
