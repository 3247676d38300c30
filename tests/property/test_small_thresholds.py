"""Any history, with every threshold so small that maintenance runs between any two steps.

The machine is that of test_any_history; what differs is how often the broker seals, vacuums, joins
files, trims, evicts and pages in, and that after each step everything stored is read through every
read path and compared with the model. The last test counts what the machine met, so that it cannot
quietly stop covering it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from penstock.api.messages import Produce
from penstock.engine import pages, sealing, window
from penstock.model.limits import KIB, Limits
from penstock.storage import seal, vacuum
from penstock.storage.log import WalOptions
from tests.property.machine import TOPICS, BrokerMachine, choice, has_topics, shapes
from tests.property.observed import TTL_MS
from tests.property.read_paths import READ_PATHS, Rows, by_a_new_group, rows_of
from tests.property.test_any_history import HISTORIES, profile
from tests.thresholds import SMALL, SPARK, lowered

EXAMPLES = 60
"""Histories in a run of the tests: they take about as long as those of test_any_history."""

READ_EVERY = 2
AUDIT_EVERY = 10
"""Steps between two looks through all read paths. What every step checks (the machine's own
invariants) reads each message too, in pages; a row that is lost stays lost, so a look somewhat
later finds it as well, for less time."""

COUNTS: Counter[str] = Counter()

AT_LEAST = {
    "seals": 150,
    "files dropped": 80,
    "files rewritten": 50,
    "files joined": 40,
    "journal files joined": 20,
    "evictions": 300,
    "pages read": 300,
    "trims": 25,
    "topics deleted": 50,
    "read paths compared": 1000,
    "audits by a new group": 100,
}
"""Over all histories of a run. Far below what is usual, far above what chance leaves of a machine
that no longer does it."""


class SmallMachine(BrokerMachine):
    """Small memory, short segments, and values short and long, so that files differ in size."""

    limits = Limits(max_in_flight=3, idempotency_ttl_ms=TTL_MS, memory_bytes=6 * KIB)
    options = WalOptions(segment_bytes=16 * KIB, reserve_bytes=0, frame_bytes=8 * KIB)
    sizes = (20, 20, 300, 1200, 2500)

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def _command(self, pick: int, shape: int, how: int, once: int) -> Produce:
        self.padding = self.sizes[(shape + how) % len(self.sizes)]
        return super()._command(pick, shape, how, once)

    @has_topics
    @rule(again=st.integers(1, 4), pick=choice, shapes=shapes)
    def seal_often(self, again: int, pick: int, shapes: list[int]) -> None:
        """Some messages and a sealed segment, several times: history gets small files."""
        for _ in range(again):
            self.produce(pick, shapes, 1, 9)
            self.broker.seal()

    @has_topics
    @rule(pick=choice, backs=st.lists(st.integers(0, 6), min_size=3, max_size=3), restarts=choice)
    def finish_and_trim(self, pick: int, backs: list[int], restarts: int) -> None:
        """Every group is nearly done, and retention takes what it may, sealed or not."""
        topic = self._topic(pick)
        for group in list(topic.groups):
            self.publish_progress(pick, group, backs)
        self.broker.must(self.broker.engine.configure_topic, topic.name, None, 100)
        topic.has_retention = True
        self.pass_time(1100)
        self.broker.seal()
        if restarts == 0:
            self.die("restart", 0, [])

    @rule(pick=choice, partitions=st.integers(1, 3), shapes=shapes)
    def replace_topic(self, pick: int, partitions: int, shapes: list[int]) -> None:
        """Rows of a deleted topic lie among those of others until vacuum takes them."""
        name = TOPICS[pick % 2]
        if name in self.model.topics:
            self._delete_topic(self.model.topics[name])
        self._create_topic(name, partitions)
        self.produce(sorted(self.model.topics).index(name), shapes, 1, 9)

    @invariant()
    def is_read_the_same_on_every_path(self) -> None:
        self.steps += 1
        if self.steps % READ_EVERY == 0:
            self.read_every_path()

    def read_every_path(self) -> None:
        for name, topic in self.model.topics.items():
            wanted = rows_of(topic.messages)
            for path in READ_PATHS:
                found = path(self.broker, name)
                assert found == wanted, _difference(path.__name__, name, found, wanted)
                COUNTS["read paths compared"] += 1
        if self.steps % AUDIT_EVERY == 0:
            self.read_by_a_new_group()

    def read_by_a_new_group(self) -> None:
        for name, topic in list(self.model.topics.items()):
            wanted = rows_of(topic.messages)
            found = by_a_new_group(self.broker, name)
            assert found == wanted, _difference("a new group", name, found, wanted)
            COUNTS["audits by a new group"] += 1


def _difference(path: str, topic: str, found: Rows, wanted: Rows) -> str:
    missing = [row[:2] for row in wanted if row not in found]
    extra = [row[:2] for row in found if row not in wanted]
    return f"{path} of {topic!r}: missing {missing}, not expected {extra}, or in another order"


@pytest.fixture(scope="module")
def counted() -> Iterator[Counter[str]]:
    """Counts what maintenance does."""
    with pytest.MonkeyPatch.context() as patch, lowered((*SMALL, *SPARK)):
        for owner, name, count in SPIES:
            patch.setattr(owner, name, _spied(getattr(owner, name), count))
        yield COUNTS


Count = Callable[..., None]


def _spied(real: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def spy(*arguments: Any, **named: Any) -> Any:
        outcome = real(*arguments, **named)
        count(outcome, *arguments)
        return outcome

    return spy


def _count_sealed(_: Any, __: Any, result: seal.Sealed) -> None:
    COUNTS["seals"] += 1
    COUNTS["files dropped"] += len(result.dropped)
    COUNTS["journal files joined"] += len(result.journal_dropped)


def _count_plan(plan: vacuum.VacuumPlan, *_: Any) -> None:
    COUNTS["files rewritten"] += len(plan.rewrite)
    COUNTS["files joined"] += len(plan.rewrite) if len(plan.rewrite) > 1 else 0


def _count(what: str) -> Count:
    def count(*_: Any) -> None:
        COUNTS[what] += 1

    return count


SPIES: list[tuple[Any, str, Count]] = [
    (sealing.Sealing, "_sealed", _count_sealed),
    (seal, "plan_vacuum", _count_plan),
    (window.Chunk, "evict", _count("evictions")),
    (window.Window, "trim", _count("trims")),
    (window.Window, "drop_topic", _count("topics deleted")),
    (pages.Pages, "load", _count("pages read")),
]


def test_every_read_path_finds_everything_after_every_step(counted: Counter[str]) -> None:
    examples = HISTORIES or EXAMPLES
    run_state_machine_as_test(SmallMachine, settings=settings(profile, max_examples=examples))


def test_the_histories_met_all_maintenance_often(counted: Counter[str]) -> None:
    """Runs after the histories; they leave their counts."""
    rare = {what: counted[what] for what, least in AT_LEAST.items() if counted[what] < least}
    assert not rare, f"too rare to be a test: {rare} of {AT_LEAST}"
