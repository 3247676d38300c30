"""`penstock topic` and `penstock group`."""

from __future__ import annotations

import json

from tests.broker_process import BrokerProcess
from tests.cli.conftest import Run


def test_a_topic_is_created_listed_and_deleted(penstock: Run) -> None:
    created = penstock("topic", "create", "life", "--partitions", "3")
    assert (created.code, created.out) == (0, "created topic life, 3 partitions\n")
    assert "life" in penstock("topic", "list").out.splitlines()
    assert penstock("topic", "create", "life", "-p", "3").out.startswith("exists already")
    assert penstock("topic", "delete", "life", "--yes").code == 0
    assert "life" not in penstock("topic", "list").out.splitlines()


def test_deleting_asks_first(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("precious")
    refused = penstock("topic", "delete", "precious", stdin="n\n")
    assert refused.code == 1
    assert "Delete topic precious" in refused.err
    assert "precious" in penstock("topic", "list").out.splitlines()
    assert penstock("topic", "delete", "precious", stdin="y\n").code == 0


def test_describe_shows_partitions_and_groups(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("shown", 2)
    assert "no group has consumed" in penstock("topic", "describe", "shown").out
    broker.put("shown", "v")
    with broker.consume("shown", group="readers") as stream:
        stream.next()
    text = penstock("topic", "describe", "shown").out
    assert "readers" in text
    assert "in flight" in text
    found = json.loads(penstock("topic", "describe", "shown", "--json").out)
    assert [each["partition"] for each in found["partitions"]] == [0, 1]
    assert found["groups"][0]["partitions"][0]["in_flight"] == 1


def test_configure_sets_the_retention_and_shows_it(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("kept")
    done = penstock("topic", "configure", "kept", "--retention-ms", "60000")
    assert (done.code, done.out) == (
        0,
        "topic kept, keeps finished messages for 60,000 ms\n",
    )
    assert penstock("topic", "configure", "kept").code == 2


def test_a_topic_is_told_to_wait_for_its_archive_and_no_longer_to(
    penstock: Run, broker: BrokerProcess
) -> None:
    assert penstock("topic", "create", "archived", "--after-archive").code == 0
    text = penstock("topic", "describe", "archived").out
    assert "keeps messages for ever; nothing goes before it is archived" in text
    assert json.loads(penstock("topic", "describe", "archived", "--json").out)["after_archive"]
    refused = penstock("topic", "create", "archived", "--no-after-archive")
    assert (refused.code, "after_archive" in refused.err) == (1, True)
    done = penstock("topic", "configure", "archived", "--no-after-archive")
    assert (done.code, done.out) == (0, "topic archived, keeps messages for ever\n")
    done = penstock("topic", "configure", "archived", "--after-archive", "--retention-ms", "9")
    assert done.out.endswith("for 9 ms; nothing goes before it is archived\n")


def test_offsets_are_shown(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("placed")
    broker.put("placed", "v")
    shown = penstock("topic", "offsets", "placed")
    assert [line.split() for line in shown.out.splitlines() if "0" in line] == [["0", "0", "1"]]
    timed = json.loads(penstock("topic", "offsets", "placed", "--time-ms", "0", "--json").out)
    assert timed == {"partitions": [{"partition": 0, "earliest": 0, "next": 1, "at_time": 0}]}
    assert "at time" in penstock("topic", "offsets", "placed", "--time-ms", "0").out


def test_a_group_s_progress_is_set(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("read", 2)
    for n in range(4):
        broker.put("read", "v", envelope={"partition_override": n % 2})
    done = penstock("group", "progress", "read", "query", "0=2", "1=4", "--json")
    assert json.loads(done.out) == {
        "partitions": [{"partition": 0, "next": 2}, {"partition": 1, "next": 4}]
    }
    assert penstock("group", "progress", "read", "query", "0=1").out.split()[-2:] == ["0", "2"]
    assert "OUT_OF_RANGE" in penstock("group", "progress", "read", "query", "0=9").err
    assert penstock("group", "progress", "read", "query", "first").code == 2
    assert penstock("group", "progress", "read", "query").code == 2


def test_a_group_is_deleted(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("grouped")
    with broker.consume("grouped", group="gone"):
        pass
    assert penstock("group", "delete", "grouped", "gone", "--yes").code == 0
    assert json.loads(penstock("topic", "describe", "grouped", "--json").out)["groups"] == []


def test_a_name_with_a_slash_and_a_space_is_reached(penstock: Run) -> None:
    assert penstock("topic", "create", "a b/c?").code == 0
    assert penstock("topic", "describe", "a b/c?").code == 0
    assert penstock("topic", "delete", "a b/c?", "-y").code == 0


def test_an_error_of_the_broker_is_its_code_and_message(penstock: Run) -> None:
    unknown = penstock("topic", "describe", "nowhere")
    assert unknown.code == 1
    assert unknown.err.startswith("Error: NOT_FOUND: ")
    assert unknown.err.count("\n") == 1
