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
        "topic kept, keeps finished messages for 1m\n",
    )
    assert penstock("topic", "configure", "kept").code == 2


def test_configure_takes_durations_and_sizes(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("sized")
    words = ("--retention-ms", "7d", "--retention-bytes", "1GB")
    done = penstock("topic", "configure", "sized", *words)
    assert done.out == "topic sized, keeps finished messages for 7d and up to 1 GiB\n"
    found = broker.client.get("/v1/topics/sized").json()
    assert (found["retention_ms"], found["retention_bytes"]) == (604_800_000, 2**30)
    waiting = penstock("topic", "configure", "sized", "--retry-backoff-ms", "2s")
    assert waiting.out.endswith("; retries after 2s\n")
    assert broker.client.get("/v1/topics/sized").json()["retry_backoff_ms"] == 2000
    for wrong in (("--retention-ms", "7 weeks"), ("--retention-bytes", "1PB")):
        refused = penstock("topic", "configure", "sized", *wrong)
        assert (refused.code, "it takes" in refused.err) == (2, True)
    assert penstock("topic", "configure", "sized", "--retention-ms", "0").code == 0


def test_describe_shows_the_longest_wait_that_is_in_force(
    penstock: Run, broker: BrokerProcess
) -> None:
    """The first wait goes before a longest wait that is shorter."""
    broker.create_topic("waits")
    words = ("--retry-backoff-ms", "9s", "--retry-max-backoff-ms", "5s")
    done = penstock("topic", "configure", "waits", *words)
    assert "; retries after 9s; waits at most 9s\n" in done.out
    assert "; retries after 9s; waits at most 9s\n" in penstock("topic", "describe", "waits").out
    done = penstock("topic", "configure", "waits", "--retry-backoff-ms", "0")
    assert "; waits at most 5s, or the broker's first wait if that is longer\n" in done.out


def test_a_refusal_names_the_command_that_helps(penstock: Run, broker: BrokerProcess) -> None:
    broker.create_topic("refusing")
    for words in (("--max-attempts", "4"), ("--after-archive",)):
        refused = penstock("topic", "create", "refusing", *words)
        assert "PATCH or `penstock topic configure` changes it" in refused.err
    assert "or `penstock topic create`" in penstock("topic", "describe", "nowhere").err


def test_after_archive_is_set_and_cleared(penstock: Run, broker: BrokerProcess) -> None:
    assert penstock("topic", "create", "archived", "--after-archive").code == 0
    text = penstock("topic", "describe", "archived").out
    assert "keeps messages for ever; nothing goes before it is archived" in text
    assert json.loads(penstock("topic", "describe", "archived", "--json").out)["after_archive"]
    refused = penstock("topic", "create", "archived", "--no-after-archive")
    assert (refused.code, "after_archive" in refused.err) == (1, True)
    done = penstock("topic", "configure", "archived", "--no-after-archive")
    assert (done.code, done.out) == (0, "topic archived, keeps messages for ever\n")
    done = penstock("topic", "configure", "archived", "--after-archive", "--retention-ms", "9")
    assert done.out.endswith("for 9ms; nothing goes before it is archived\n")


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
