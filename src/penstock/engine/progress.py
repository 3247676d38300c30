"""Commands that set the progress of a group, for readers that keep count themselves, such as a
query that reads ranges.

Invariant: how much is finished by it is known exactly before it is decided, and deliveries in
flight below it are finished like an ack. One command is one frame of the log: a crash keeps all of
it or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from penstock.api.outcomes import Done
from penstock.core.produce import find_topic
from penstock.core.progress_rules import ProgressTarget, below, check_not_past_end, decide_progress
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.engine.disk_lookups import DiskLookups
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.partition_index import PartitionIndex
from penstock.engine.quotas import Quotas
from penstock.engine.window import Window
from penstock.model.errors import NotFound, PenstockError
from penstock.model.progress import Reached
from penstock.model.records import Advanced
from penstock.model.scopes import noun_of, plain_name
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log

_Counted = tuple[Topic, list[ProgressTarget]]


class ProgressCommands:
    def __init__(
        self,
        state: BrokerState,
        window: Window,
        log: Log,
        history: HistoryReader | None,
        ledger: Ledger,
        dispatcher: Dispatcher,
        lookups: DiskLookups,
        quotas: Quotas,
    ) -> None:
        self._state = state
        self._quotas = quotas
        self._window = window
        self._log = log
        self._history = history
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._lookups = lookups

    def advance(
        self,
        topic: str,
        group: str,
        reached: Sequence[Reached],
        done: Done[list[Reached]],
        topic_id: int | None = None,
        *,
        only_new: bool = False,
    ) -> None:
        """Moves the cursor of a group. With `only_new` a group that exists stays where it is."""

        def look() -> Callable[[], _Counted]:
            if self._ledger.failure is not None:
                raise self._ledger.failure
            found = find_topic(self._state, topic, topic_id)
            check_not_past_end(found, reached)
            return partial(_count, found, [self._counter(found, each) for each in reached])

        def counted(outcome: _Counted | PenstockError) -> None:
            if isinstance(outcome, PenstockError):
                self._ledger.answer(done, outcome)
                return
            topic, targets = outcome
            if only_new and group in topic.groups:
                targets = []
            self._ledger.decide(lambda: self._decide(topic, targets, group), done)

        self._lookups.run(look, counted)

    def _counter(self, topic: Topic, reached: Reached) -> Callable[[], ProgressTarget]:
        """Returns how to count all that was ever stored below an offset: everything, without what
        lies behind it."""
        index, offset = reached.partition, reached.next
        partition = topic.partitions[index]
        msgs, nbytes = partition.backlog.stored_msgs, partition.backlog.stored_bytes
        start = max(offset, partition.first_offset)
        rows = PartitionIndex(self._window.log(topic.id, index), start, self._log, self._history)

        def count() -> ProgressTarget:
            behind_msgs, behind_bytes = rows.count()
            return ProgressTarget(index, offset, msgs - behind_msgs, nbytes - behind_bytes)

        return count

    def _decide(self, topic: Topic, targets: list[ProgressTarget], name: str) -> list[Reached]:
        if self._state.topics.get(topic.name) is not topic:
            raise NotFound(
                f"{noun_of(topic.name)} {plain_name(topic.name)!r} was deleted meanwhile"
            )
        records = decide_progress(self._state, topic, name, targets, self._ledger.now_ms())
        group = topic.groups.get(name)
        if group is None and self._quotas.is_active:
            self._quotas.check_group(topic.scope)
        advanced = [record for record in records if isinstance(record, Advanced)]
        entries = [
            entry
            for record in advanced
            if group is not None
            for entry in below(group.progress[record.partition], record.next)
        ]
        if records:
            self._ledger.must_record(*records)
        for entry in entries:
            self._dispatcher.left_flight(entry)
        progress = topic.groups[name].progress
        for record in advanced:
            self._dispatcher.mark(progress[record.partition])
        self._ledger.wake()
        return [Reached(target.partition, progress[target.partition].floor()) for target in targets]


def _count(topic: Topic, counters: list[Callable[[], ProgressTarget]]) -> _Counted:
    return topic, [count() for count in counters]
