"""Rows that a query has not read and cannot read any more, because of retention or a deletion.

Invariant: a loss is never silent. It fails the query, with the partition and the offsets, or with
failOnDataLoss=false it is a warning that says how much was skipped. failOnDeletedTopic=false
accepts the loss of a deleted topic only.
"""

from __future__ import annotations

import logging

from penstock.model.errors import NotFound, OutOfRange
from penstock.spark.logs import Positions, Span, TopicPartition
from penstock.spark.options import SourceSettings

_log = logging.getLogger("penstock.spark")
_ADVICE = "failOnDataLoss=false continues without them"


class Losses:
    def __init__(
        self, *, fail: bool, fail_on_deletion: bool | None = None, noun: str = "topic"
    ) -> None:
        self._fail = fail
        self._noun = noun
        self._fail_on_deletion = fail if fail_on_deletion is None else fail_on_deletion
        self._has_deletion_option = fail_on_deletion is not None

    @classmethod
    def of(cls, settings: SourceSettings) -> Losses:
        return cls(
            fail=settings.fail_on_data_loss,
            fail_on_deletion=settings.fail_on_deleted_topic,
            noun=settings.noun,
        )

    def between(
        self, place: TopicPartition, start: int, end: int, span: Span, *, is_looking: bool = False
    ) -> tuple[int, int]:
        """Returns what is left of a range that should be read whole. `is_looking` leaves out the
        warning: it is logged once, when the range is planned."""
        if start > span.next or end > span.next:
            return self._rewound(place, max(start, end), span)
        behind = min(span.earliest, end)
        if start < behind and not (is_looking and not self._fail):
            self._trimmed(place, start, behind, span)
        return max(start, behind), end

    def _trimmed(self, place: TopicPartition, start: int, behind: int, span: Span) -> None:
        """Handles a range whose beginning retention has removed."""
        what = f"{place}: offsets {start} to {behind - 1} are no longer kept"
        if self._fail:
            raise OutOfRange(
                f"{what}, the oldest is {span.earliest}. They were removed before this query read "
                f"them; {_ADVICE}"
            )
        _log.warning("%s: %d offsets are skipped", what, behind - start)

    def _rewound(self, place: TopicPartition, wanted: int, span: Span) -> tuple[int, int]:
        """Handles a partition that ends before where the query is. Offsets never go back, so these
        are not the rows that were read before."""
        what = f"{place} ends at offset {span.next}, and this query is at {wanted}"
        if self._fail_on_deletion:
            raise OutOfRange(
                f"{what}: it was deleted and made again, or the broker's data was replaced"
                f"{self._advice('starts again with what is there')}"
            )
        _log.warning("%s: it is read from its beginning, offset %d", what, span.earliest)
        return span.earliest, span.next

    def replaced(self, topic: str, unread: Positions) -> None:
        """Handles a topic that was made again. `unread` says where the query was in the old one."""
        what = f"{self._noun} {topic!r} was deleted and made again, {_read_so_far(unread)}"
        if self._fail_on_deletion:
            raise OutOfRange(f"{what}{self._advice('starts again with what is there')}")
        _log.warning("%s: the new one is read from its beginning", what)

    def deleted(self, what: str, unread: Positions | None = None) -> None:
        """Handles a deleted topic. `unread` says where the query would have continued."""
        if self._fail_on_deletion:
            raise NotFound(f"{what} does not exist any more{self._advice('continues without it')}")
        behind = f"; {_read_so_far(unread)}" if unread else ""
        _log.warning("%s does not exist any more: the query continues without it%s", what, behind)

    def _advice(self, does: str) -> str:
        """Returns advice for a deletion; none for a user who has set failOnDeletedTopic."""
        return "" if self._has_deletion_option else f"; failOnDataLoss=false {does}"


def _read_so_far(unread: Positions) -> str:
    rest = [
        f"{at} of partition {place.partition}" if place.stream_in is None else f"{at}"
        for place, at in sorted(unread.items())
    ]
    return f"it was read to before offset {', '.join(rest)}"
