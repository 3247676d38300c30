"""Measures how long a key has not changed, in time in which the key store could be read.

While the store is away no owner can renew its lease. Without this rule every broker would take over
when the store comes back, although all owners are alive. Must not know what the values mean.
"""

from __future__ import annotations


class StoreAvailability:
    """Hears of each answer of the store. Between two answers more than `gap_ms` apart the store
    counts as away, and no time passes."""

    def __init__(self, gap_ms: int) -> None:
        self._gap_ms = gap_ms
        self._last_answer_ms: int | None = None
        self._readable_ms = 0

    def answered(self, now_ms: int) -> None:
        """The store has answered a request."""
        if self._last_answer_ms is not None:
            gap_ms = now_ms - self._last_answer_ms
            if gap_ms <= self._gap_ms:
                self._readable_ms += gap_ms
        self._last_answer_ms = now_ms

    @property
    def readable_ms(self) -> int:
        """The time for which the store was readable. Rises with answers only."""
        return self._readable_ms

    def readable_at(self, now_ms: int) -> int:
        """Returns what `readable_ms` would be if the store answered now."""
        if self._last_answer_ms is None or now_ms - self._last_answer_ms > self._gap_ms:
            return self._readable_ms
        return self._readable_ms + now_ms - self._last_answer_ms


class Standstill:
    """How long one key has had the same revision. It is never overrated: the time between the last
    answer and the news of a revision does not count."""

    def __init__(self, availability: StoreAvailability) -> None:
        self._availability = availability
        self._revision = -1
        self._since_ms = 0

    def seen(self, revision: int, now_ms: int) -> None:
        """The key was read, or told of, with this revision."""
        if revision != self._revision:
            self.begin_again(revision, now_ms)

    def begin_again(self, revision: int, now_ms: int) -> None:
        """Forgets how long the key has had this revision."""
        self._revision = revision
        self._since_ms = self._availability.readable_at(now_ms)

    def lasted_ms(self, revision: int) -> int:
        if revision != self._revision:
            return 0
        return self._availability.readable_ms - self._since_ms
