"""The brokers of the cluster, as they announce themselves in the key store.

A broker is live while its announcement changes. Must not know leases, nor what announcements are
used for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.api.outcomes import Done
from penstock.cluster.lease import Identity
from penstock.cluster.shared import Conflict, KeyStore, StoredKey, Tail, Unanswered
from penstock.model.errors import FailedPrecondition, NotFound, OutcomeUnknown, Unavailable

PREFIX = "broker."
SKEW_MS = 500
"""A broker whose clock differs by more is named in the log: timers of messages would jump by that
much when it takes over."""
MOST_BROKERS = 1000
"""The most announcements that are kept. What a broker left behind is taken over by its name."""

logger = logging.getLogger("penstock.cluster")


class Standing(msgspec.Struct, frozen=True):
    """How far a broker's copy of a shard is. `sealed` is the last message that is in its synced
    files, or in those that it copies at the moment. `stream` is the identity of the stream that the
    positions are in."""

    position: int
    is_caught_up: bool
    sealed: int = 0
    is_copying: bool = False
    stream: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """`beats` rises with every announcement of one life. `now_ms` is the wall clock of the broker.
    A broker that has left says so."""

    name: str
    url: str
    node_id: str
    life_id: str
    version: str
    now_ms: int
    beats: int
    shards: dict[int, Standing]
    has_left: bool = False

    def is_of(self, me: Identity) -> bool:
        return self.life_id == me.life_id


class KnownBroker(msgspec.Struct, frozen=True):
    """A broker as this one knows it. `age_ms` is the time since its announcement changed last, or
    since this broker began to watch."""

    announcement: Announcement
    is_live: bool
    age_ms: int


class _Seen(msgspec.Struct):
    """`at_ms` is when the announcement changed last; `is_fresh` says whether it has changed since
    this broker watches."""

    announcement: Announcement
    at_ms: int
    is_fresh: bool


class Roster:
    """`live_ms` is how long a broker counts as live after its last announcement."""

    def __init__(
        self,
        keys: KeyStore,
        monotonic_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        live_ms: int,
    ) -> None:
        self._keys = keys
        self._monotonic_ms = monotonic_ms
        self._wall_ms = wall_ms
        self._live_ms = live_ms
        self._seen: dict[str, _Seen] = {}
        self._skewed: set[str] = set()
        self._watch: Tail | None = None

    def open(self) -> None:
        self._watch = self._keys.watch(PREFIX, self._told)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def live(self) -> list[Announcement]:
        """Returns the brokers that announced themselves lately, in the order of their names."""
        since_ms = self._monotonic_ms() - self._live_ms
        return [
            seen.announcement
            for _, seen in sorted(self._seen.items())
            if seen.at_ms >= since_ms and not seen.announcement.has_left
        ]

    def announcements(self) -> list[Announcement]:
        """Returns all brokers that ever announced themselves, in the order of their names."""
        return [seen.announcement for _, seen in sorted(self._seen.items())]

    def known(self) -> list[KnownBroker]:
        """Returns every broker that has an announcement, in the order of their names."""
        now_ms, live = self._monotonic_ms(), {each.name for each in self.live()}
        return [
            KnownBroker(seen.announcement, name in live, now_ms - seen.at_ms)
            for name, seen in sorted(self._seen.items())
        ]

    def remove(self, name: str, done: Done[None]) -> None:
        """Removes the announcement of a broker that is gone. Gives NotFound if there is none, and
        FailedPrecondition if the broker is live."""
        if self.find_live(name) is not None:
            done(FailedPrecondition(f"broker {name!r} is live; stop it first"))
            return
        key = PREFIX + name

        def found(outcome: StoredKey | Unanswered | None) -> None:
            if isinstance(outcome, Unanswered):
                done(Unavailable(f"NATS does not answer: {outcome.reason}"))
            elif outcome is None or decode_announcement(outcome.value) is None:
                done(NotFound(f"no broker {name!r} has ever announced itself in this cluster"))
            else:
                # A store of keys has no removal: a value that is no announcement stands for none.
                self._keys.put(key, b"", outcome.revision, written)

        def written(outcome: int | Conflict | Unanswered) -> None:
            if isinstance(outcome, int):
                done(None)
            elif isinstance(outcome, Conflict):
                done(FailedPrecondition(f"broker {name!r} has just announced itself again"))
            else:
                done(OutcomeUnknown(f"NATS does not answer: {outcome.reason}"))

        self._keys.get(key, found)

    def find_live(self, name: str) -> Announcement | None:
        return next((each for each in self.live() if each.name == name), None)

    def has_changed(self, name: str) -> bool:
        """Returns whether this broker was seen to announce itself, and not only found there."""
        return name in self._seen and self._seen[name].is_fresh

    def _told(self, key: str, entry: StoredKey | None) -> None:
        name = key.removeprefix(PREFIX)
        announcement = None if entry is None else decode_announcement(entry.value)
        if announcement is None or announcement.name != name:
            self._seen.pop(name, None)
            self._skewed.discard(name)
            return
        before = self._seen.get(name)
        if before is None and len(self._seen) >= MOST_BROKERS:
            return
        if before is None or before.announcement != announcement:
            self._seen[name] = _Seen(announcement, self._monotonic_ms(), before is not None)
        if before is not None:
            self._compare_clocks(announcement)

    def _compare_clocks(self, announcement: Announcement) -> None:
        """A message that was late by chance looks like a clock that is behind, so that one is told
        of the clocks that are ahead: of two brokers, one is."""
        ahead_ms = announcement.now_ms - self._wall_ms()
        if ahead_ms <= SKEW_MS:
            self._skewed.discard(announcement.name)
        elif announcement.name not in self._skewed:
            self._skewed.add(announcement.name)
            logger.warning(
                "the clock of broker %s is %d ms ahead of this machine's; backoffs and TTLs shift "
                "by as much when one takes over from the other",
                announcement.name,
                ahead_ms,
            )


def decode_announcement(data: bytes) -> Announcement | None:
    """Returns None for a value that is no announcement."""
    try:
        return msgspec.json.decode(data, type=Announcement)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
