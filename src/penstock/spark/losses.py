"""What a query has not read and never will: retention, or a deletion, came first.

Invariant: a loss is never silent. It fails the query and names the place and the offsets; or, with
failOnDataLoss=false, it is a warning that says how much was skipped. A topic that was deleted may
be told apart: failOnDeletedTopic=false passes over that loss only.
"""

from __future__ import annotations

import logging

from penstock.model.errors import NotFound, OutOfRange
from penstock.spark.logs import Positions, Span, TopicPartition
from penstock.spark.options import SourceSettings

_log = logging.getLogger("penstock.spark")
_ADVICE = "failOnDataLoss=false goes on without them"


class Losses:
    def __init__(self, *, fail: bool, fail_on_deletion: bool | None = None) -> None:
        self._fail = fail
        self._fail_on_deletion = fail if fail_on_deletion is None else fail_on_deletion
        self._is_deletion_told_apart = fail_on_deletion is not None

    @classmethod
    def of(cls, settings: SourceSettings) -> Losses:
        return cls(fail=settings.fail_on_data_loss, fail_on_deletion=settings.fail_on_deleted_topic)

    def between(
        self, place: TopicPartition, start: int, end: int, span: Span, *, is_looking: bool = False
    ) -> tuple[int, int]:
        """What is left of a range that is wanted whole. Who is only looking is not told what is
        skipped: it is said once, when the range is planned."""
        if start > span.next or end > span.next:
            return self._rewound(place, max(start, end), span)
        behind = min(span.earliest, end)
        if start < behind and not (is_looking and not self._fail):
            self._trimmed(place, start, behind, span)
        return max(start, behind), end

    def _trimmed(self, place: TopicPartition, start: int, behind: int, span: Span) -> None:
        """Retention has removed the beginning."""
        what = f"{place}: offsets {start} to {behind - 1} are no longer kept"
        if self._fail:
            raise OutOfRange(
                f"{what}, the oldest is {span.earliest}. They were removed before this query read "
                f"them; {_ADVICE}"
            )
        _log.warning("%s: %d offsets are skipped", what, behind - start)

    def _rewound(self, place: TopicPartition, wanted: int, span: Span) -> tuple[int, int]:
        """Offsets never go back, so what is there now is not what was read before."""
        what = f"{place} ends at offset {span.next}, and this query is at {wanted}"
        if self._fail_on_deletion:
            raise OutOfRange(
                f"{what}: it was deleted and made again, or the broker's data was replaced"
                f"{self._cure('begins anew with what is there')}"
            )
        _log.warning("%s: it is read from its beginning, offset %d", what, span.earliest)
        return span.earliest, span.next

    def replaced(self, topic: str, unread: Positions) -> None:
        """The topic was deleted and another has its name; `unread` is of the old one."""
        what = f"topic {topic!r} was deleted and made again, {_read_so_far(unread)}"
        if self._fail_on_deletion:
            raise OutOfRange(f"{what}{self._cure('begins anew with what is there')}")
        _log.warning("%s: the new one is read from its beginning", what)

    def deleted(self, what: str, unread: Positions | None = None) -> None:
        """`unread`: where the query would have gone on."""
        if self._fail_on_deletion:
            raise NotFound(f"{what} does not exist any more{self._cure('goes on without it')}")
        behind = f"; {_read_so_far(unread)}" if unread else ""
        _log.warning("%s does not exist any more: the query goes on without it%s", what, behind)

    def _cure(self, does: str) -> str:
        """For a deletion; none for who has said that it shall fail."""
        return "" if self._is_deletion_told_apart else f"; failOnDataLoss=false {does}"


def _read_so_far(unread: Positions) -> str:
    rest = [f"{at} of partition {place.partition}" for place, at in sorted(unread.items())]
    return f"it was read to before offset {', '.join(rest)}"
