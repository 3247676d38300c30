"""The services that the brokers of a cluster share: for each shard an append-only stream and a
store of staged pieces, and one small store of keys for leases.

JetStream implements both. Tests simulate them. A callback is called exactly once, in a later turn
of the loop and on its thread, never within the call. Must not know frames, records or brokers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class Stored(msgspec.Struct, frozen=True):
    """The message is stored, as durably as the stream promises."""


class Refused(msgspec.Struct, frozen=True):
    """Nothing was stored: the stream's end is elsewhere. `last_seq` is the end that the stream
    names. It may count a message that is not committed yet, even this one sent earlier."""

    last_seq: int


class Unanswered(msgspec.Struct, frozen=True):
    """Nobody knows the outcome: no answer in time, a broken connection, no leader."""

    reason: str


class Found(msgspec.Struct, frozen=True):
    data: bytes


class Missing(msgspec.Struct, frozen=True):
    """There is no such message. The stream holds those from `first_seq` to `last_seq`."""

    first_seq: int
    last_seq: int


class Bounds(msgspec.Struct, frozen=True):
    """The stream holds the messages from `first_seq` to `last_seq`. Empty: `last_seq` is the last
    that there ever was, and `first_seq` is one more. `room_bytes` is what it can take before it
    refuses, `used_bytes` what it takes now. `identity` changes when somebody deletes the stream and
    makes it anew."""

    first_seq: int
    last_seq: int
    room_bytes: int
    identity: str
    used_bytes: int = 0


AppendOutcome = Stored | Refused | Unanswered
LookUpOutcome = Found | Missing | Unanswered
BoundsOutcome = Bounds | Unanswered


class TailListener(Protocol):
    """Is told what a stream holds, in order and without gaps or repeats."""

    def received(self, seq: int, data: bytes) -> None: ...

    def purged(self, first_seq: int) -> None:
        """The next message is no longer in the stream, which begins with `first_seq`. The tail has
        ended."""
        ...


class Tail(Protocol):
    def close(self) -> None:
        """Ends the tail. Its listener is told nothing more."""
        ...


class SharedStream(Protocol):
    """A list of messages, numbered from 1. What is stored never changes; only its beginning is
    purged."""

    max_message_bytes: int
    """The largest message that can be stored."""

    def append(self, seq: int, data: bytes, done: Callable[[AppendOutcome], None]) -> None:
        """Stores `data` as message `seq`, if the last one is `seq - 1`."""
        ...

    def look_up(self, seq: int, done: Callable[[LookUpOutcome], None]) -> None:
        """Reads message `seq` where appends are decided, never from a replica that may lag."""
        ...

    def bounds(self, done: Callable[[BoundsOutcome], None]) -> None:
        """Reads the first and the last sequence where appends are decided."""
        ...

    def follow(self, seq: int, listener: TailListener) -> Tail:
        """Tells `listener` of message `seq` and all later ones, until the tail is closed. Waits as
        long as the service is away, then goes on."""
        ...

    def purge(self, up_to_seq: int, done: Callable[[Unanswered | None], None]) -> None:
        """Removes the messages up to and with `up_to_seq`."""
        ...


class Full(msgspec.Struct, frozen=True):
    """Nothing was stored: there is no room for it."""


PutOutcome = Stored | Full | Unanswered
PartOutcome = Found | Unanswered | None
PartsOutcome = dict[int, set[int]] | Unanswered


class SharedPieces(Protocol):
    """Parts of staged pieces. A part has the number of its piece and its own number in it."""

    max_message_bytes: int
    """The largest part that can be stored."""

    def put(self, number: int, part: int, data: bytes, done: Callable[[PutOutcome], None]) -> None:
        """Stores a part, in place of an earlier one of these numbers."""
        ...

    def get(self, number: int, part: int, done: Callable[[PartOutcome], None]) -> None:
        """Reads a part where changes are decided. None if there is no such part."""
        ...

    def parts(self, done: Callable[[PartsOutcome], None]) -> None:
        """Gives the numbers of all parts, by piece. Has everything that was stored before the call,
        by whatever broker."""
        ...

    def remove(self, number: int, done: Callable[[Unanswered | None], None]) -> None:
        """Removes all parts of a piece."""
        ...


class StoredKey(msgspec.Struct, frozen=True):
    """The value of a key. `revision` rises with each change of the store."""

    value: bytes
    revision: int


class Conflict(msgspec.Struct, frozen=True):
    """The key has changed since the revision that was named; nothing was written."""


class KeyStore(Protocol):
    """Keys with values, changed by compare-and-set."""

    def get(self, key: str, done: Callable[[StoredKey | Unanswered | None], None]) -> None:
        """Reads a key where changes are decided. None if it has no value."""
        ...

    def put(
        self,
        key: str,
        value: bytes,
        revision: int,
        done: Callable[[int | Conflict | Unanswered], None],
    ) -> None:
        """Sets the value if the key is still at `revision`, or has none and `revision` is 0.
        Gives the new revision."""
        ...

    def watch(self, prefix: str, changed: Callable[[str, StoredKey | None], None]) -> Tail:
        """Tells of every key that begins with `prefix`: first of those that are there, then of
        each change. Of changes of one key in quick succession it may tell the last only."""
        ...
