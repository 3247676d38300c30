"""journal_after_archive: nothing of the journal goes before somebody said that it is archived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.model.errors import NotYet
from penstock.model.journal import JournalArchive, JournalReport
from penstock.model.limits import Limits
from tests.engine.harness import Broker, on_disk
from tests.engine.test_journal import SEGMENTS, fresh, read

RETENTION_MS = 60_000


@pytest.fixture
def broker() -> Iterator[Broker]:
    limits = Limits(journal_retention_ms=RETENTION_MS, journal_after_archive=True)
    broker = on_disk(limits=limits, options=SEGMENTS)
    broker.topic()
    yield broker
    broker.close()


def archived(broker: Broker, next_: int) -> int:
    outcome = broker.must(broker.engine.journal.set_archived, next_)
    assert isinstance(outcome, JournalArchive)
    return outcome.next


def grown(broker: Broker, value: str) -> JournalReport:
    """One more message, and the journal with it in a file, long after all that was before."""
    broker.pass_ms(2 * RETENTION_MS)
    broker.put("t", value)
    return fresh(broker)


def offsets(broker: Broker) -> list[int]:
    return [row["offset"] for row in read(broker).to_pylist()]


def test_nothing_goes_before_there_is_an_archive(broker: Broker):
    for value in "abcd":
        assert grown(broker, value).archived is None
    assert offsets(broker) == [0, 1, 2, 3]


def test_what_is_archived_and_old_goes_and_the_rest_stays(broker: Broker):
    grown(broker, "a")
    end = grown(broker, "b").next
    assert archived(broker, end) == end
    assert grown(broker, "c").archived == end
    grown(broker, "d")
    assert offsets(broker) == [2, 3]


def test_a_part_of_a_file_keeps_all_of_it(broker: Broker):
    broker.put("t", "a", "b")
    whole = fresh(broker)
    inside = read(broker).to_pylist()[1]["position"]
    archived(broker, inside)
    grown(broker, "c")
    grown(broker, "d")
    assert offsets(broker) == [0, 1, 2, 3]
    assert whole.earliest < inside < whole.next


def test_how_far_it_is_archived_outlives_a_restart_from_the_log_and_from_a_snapshot(broker: Broker):
    end = grown(broker, "a").next
    archived(broker, end)
    broker.restart()
    assert broker.must(broker.engine.journal.offsets, False, None).archived == end
    grown(broker, "b")
    broker.restart()
    assert broker.must(broker.engine.journal.offsets, False, None).archived == end
    assert broker.must(broker.engine.journal.offsets, False, 0).archived == end


def test_it_never_goes_back(broker: Broker):
    end = grown(broker, "a").next
    assert archived(broker, end) == end
    assert archived(broker, 0) == end


def test_to_archive_all_there_is_comes_to_an_end(broker: Broker):
    """What it says is in the log too, and moves the journal's end: without rows, to nowhere."""
    end = grown(broker, "a").next
    archived(broker, end)
    later = fresh(broker).next
    assert later > end
    assert archived(broker, later) == end
    assert fresh(broker).next == later


def test_more_than_there_is_cannot_be_archived(broker: Broker):
    end = grown(broker, "a").next
    assert type(broker.call(broker.engine.journal.set_archived, end + 1)) is NotYet
    assert archived(broker, 0) == 0


def test_without_the_setting_rows_go_by_age_alone():
    broker = on_disk(limits=Limits(journal_retention_ms=RETENTION_MS), options=SEGMENTS)
    broker.topic()
    grown(broker, "a")
    grown(broker, "b")
    assert 0 not in offsets(broker)
    broker.close()
