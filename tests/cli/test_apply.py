"""`penstock apply`: shows a plan, asks, and carries it out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "resources.toml"
    path.write_text('port = 8080\n[[topics]]\nname = "declared"\nmax_attempts = 3\n')
    return path


def test_apply_shows_the_plan_asks_and_applies(penstock: Run, file: Path) -> None:
    shown = penstock("apply", str(file), "--dry-run")
    assert (shown.code, shown.out) == (0, "+ topic declared\n")
    refused = penstock("apply", str(file), stdin="n\n")
    assert refused.code == 1
    assert "Apply 1 creation?" in refused.err
    assert "declared" not in penstock("topic", "list").out.splitlines()
    done = penstock("apply", str(file), "--yes")
    assert (done.code, done.out) == (0, "+ topic declared\napplied\n")
    assert penstock("apply", str(file)).out == "= topic declared\nnothing to do\n"
    file.write_text('[[topics]]\nname = "declared"\nmax_attempts = 5\nretention_ms = "1d"\n')
    changed = penstock("apply", str(file), "-y", "--json")
    plan = json.loads(changed.out)
    assert plan["applied"] is True
    assert [step["action"] for step in plan["steps"]] == ["change"]
    file.write_text('[[topics]]\nname = "declared"\npartitions = 9\n')
    conflict = penstock("apply", str(file), "-y")
    assert conflict.code == 1
    assert conflict.out.startswith("! topic declared\n    partitions: 1 -> 9\n")
    assert conflict.err == "Error: 1 conflict; nothing was changed\n"


def test_apply_refuses_a_file_with_unknown_tables(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "resources.toml"
    file.write_text('[[topic]]\nname = "t"\n')
    refused = penstock("apply", str(file))
    assert refused.code == 2
    assert "topics" in refused.err
    assert penstock("apply", str(tmp_path / "missing.toml")).code == 2
