"""Damaged data directories from fixed seeds; for longer: python -m tests.fuzz.data_directories."""

from __future__ import annotations

import pytest

from tests.fuzz.data_directories import Built, build_all, run_case, sealing_inline

GROUPS = 8
CASES = 40


@pytest.fixture(scope="module")
def directories() -> list[Built]:
    with sealing_inline():
        return build_all()


def test_the_directories_hold_every_kind_of_data(directories: list[Built]) -> None:
    for built in directories:
        kinds = {path.split("/")[-1].split("-")[0] for path in built.files}
        assert {"wal", "piece"} <= kinds
        assert ("STOPPED" in kinds) == built.is_stopped
        assert built.name.startswith("log") or {"MANIFEST", "snapshot", "history"} <= kinds
        assert all(rows for rows in built.seen.topics.values()), built.seen.topics
        assert len(built.seen.topics["written/0"] or []) == 51
        assert all(built.seen.cache.values())
        assert {row["resource_kind"] for row in built.seen.journal or []} == {"topic", "stream"}
        assert built.seen.tokens == ["token 1", "token 2", "token 3"]
        assert len(built.seen.rules) == 3
        events = built.seen.topics["\x1et\x1fn\x1fevents/0"]
        assert events is not None
        assert len(events) == 4 * 9
        assert len(built.seen.repeated or []) == 2


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_damaged_directory_is_refused_or_read_right(directories: list[Built], group: int) -> None:
    """driftq-48"""
    with sealing_inline():
        found = {run_case(seed, directories) for seed in range(group * CASES, (group + 1) * CASES)}
    assert found == {"refused", "read"}
