"""`penstock apply`: shows a plan, asks, and carries it out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.cli.conftest import Ran, Run, call_penstock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "resources.toml"
    path.write_text('port = 8080\n[[topics]]\nname = "declared"\nmax_attempts = 3\n')
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Run]:
    """Commands to a broker that keeps durable streams."""
    with BrokerProcess(tmp_path / "data") as process:

        def run(*words: str) -> Ran:
            return call_penstock(*words, env={"PENSTOCK_URL": process.url})

        yield run


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[topics]]\nnmae = "t"\n', "[[topics]] number 1: unknown key nmae; did you mean name?"),
        ('[[topics]]\nname = "a"\n[[topics]]\nname = "b"\npartitions = "x"\n',
         "[[topics]] number 2 (b), partitions: Expected a whole number, got text in quotes"),
        ('[topics]\nname = "t"\n', "write [[topics]], once for each, instead of [topics]"),
        ('topics = ["t"]\n', "topics is a list of tables: write [[topics]]"),
        ('[[streams]]\nname = "s"\nretention_ms = "7d"\n',
         "unknown key retention_ms; streams have retention"),
        ('[[topics]]\nname = "t"\nretention = "7d"\n',
         "unknown key retention; topics have retention_ms"),
        ('[[quotas]]\ntenant_id = "t"\nrequest_id = "r"\n', "unknown key request_id"),
    ],
)  # fmt: skip
def test_errors_speak_of_the_file(penstock: Run, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "resources.toml"
    file.write_text(text)
    refused = penstock("apply", str(file))
    assert (refused.code, str(file) in refused.err) == (2, True)
    assert told in refused.err
    assert "JSON" not in refused.err
    assert "$." not in refused.err


def test_the_plan_names_quotas_and_what_is_missing(penstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "resources.toml"
    file.write_text('[[tenants]]\ntenant_id = "solo"\n[[topics]]\ntenant_id = "solo"\nname = "x"\n')
    shown = penstock("apply", str(file))
    assert shown.out == (
        "+ tenant solo\n! topic solo/default/x\n    there is no namespace 'default' of tenant "
        "'solo': declare it with namespaces = [\"default\"] in the [[tenants]] of 'solo'\n"
    )
    quota = '[[quotas]]\ntenant_id = "umbrella"\ntopics = 3\nstream_retention = "7d"\n'
    tenant = '[[tenants]]\ntenant_id = "umbrella"\nnamespaces = ["default"]\n'
    file.write_text(tenant + quota)
    assert penstock("apply", str(file), "-y").out == (
        "+ tenant umbrella\n+ quota umbrella\n    topics: 3\n    stream_retention: 7d\n"
        "+ namespace umbrella/default\napplied\n"
    )
    file.write_text(tenant + quota.replace("3", "4"))
    changed = penstock("apply", str(file), "-y").out
    assert "~ quota umbrella\n    topics: 3 -> 4\n" in changed
    file.write_text(quota.replace("umbrella", "absent"))
    assert (
        "! quota absent\n    there is no tenant 'absent': declare it"
        in penstock("apply", str(file)).out
    )


def test_the_plan_shows_the_key_and_the_unit_of_the_file(disk: Run, tmp_path: Path) -> None:
    file = tmp_path / "resources.toml"
    text = '[[streams]]\nname = "ev"\ndurable = true\nretention = "7d"\n'
    file.write_text(text)
    assert disk("apply", str(file), "-y").code == 0
    file.write_text(text.replace("7d", "8d"))
    assert "    retention: 7d -> 8d\n" in disk("apply", str(file), "--dry-run").out
    file.write_text(text.replace("true", "false"))
    conflict = disk("apply", str(file)).out
    assert conflict.endswith("\n    durable cannot change; create another\n")
