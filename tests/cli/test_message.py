"""`penstock produce` and `penstock consume`, `ack`, `nack` and `extend`."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.cli.conftest import Run

WAIT = ("--timeout", "0.4")


@pytest.fixture
def topic(broker: BrokerProcess, request: pytest.FixtureRequest) -> str:
    return broker.create_topic(request.node.name)


def test_a_message_is_produced_consumed_and_acked_by_hand(penstock: Run, topic: str) -> None:
    produced = penstock("produce", topic, "hello")
    assert (produced.code, produced.out) == (
        0,
        f"produced to {topic}, partition 0, offset 0\n",
    )
    assert penstock("consume", topic, "--group", "g", "--max", "1").out == "0:0  hello\n"
    assert penstock("ack", topic, "--group", "g", "--offset", "0").code == 0
    assert penstock("consume", topic, "--group", "g", *WAIT).out == ""


def test_a_nacked_message_comes_again_with_its_reason(penstock: Run, topic: str) -> None:
    penstock("produce", topic, "hello", "--key", "k")
    penstock("consume", topic, "--group", "g", "--max", "1")
    assert penstock("extend", topic, "--group", "g", "--offset", "0").code == 0
    assert penstock("nack", topic, "--group", "g", "--offset", "0", "--reason", "why").code == 0
    again = penstock("consume", topic, "--group", "g", "--max", "1", "--ack").out
    assert again == "0:0  hello   attempt=2  key=k  last_error=why\n"
    refused = penstock("nack", topic, "--group", "g", "--offset", "0")
    assert refused.code == 1
    assert "FAILED_PRECONDITION" in refused.err


def test_a_message_nacked_as_dead_is_said_to_go_to_the_dead_letters(
    penstock: Run, topic: str
) -> None:
    penstock("produce", topic, "v")
    penstock("consume", topic, "--group", "g", "--max", "1")
    done = penstock("nack", topic, "--group", "g", "--offset", "0", "--dead")
    assert done.out == f"nacked {topic} 0:0 for group g; it goes to dlq.{topic}\n"
    assert penstock("consume", f"dlq.{topic}", "--group", "g", "--max", "1").out.startswith("0:0")


def test_every_option_in_milliseconds_takes_a_duration(penstock: Run, topic: str) -> None:
    retries = ("--retry-backoff-ms", "1s", "--retry-max-backoff-ms", "2m")
    assert penstock("produce", topic, "v", *retries).code == 0
    here = ("--group", "g", "--offset", "0")
    taken = penstock("consume", topic, "--group", "g", "--max", "1", "--lease-ms", "5m", "--json")
    policy = json.loads(taken.out)["envelope"]["retry_policy"]
    assert policy == {"backoff_ms": 1000, "max_backoff_ms": 120_000}
    extended = penstock("extend", topic, *here, "--lease-ms", "1m")
    assert extended.out.endswith("the lease ends 60000 ms from now\n")
    assert penstock("nack", topic, *here, "--delay-ms", "2h").code == 0
    refused = penstock("nack", topic, *here, "--delay-ms", "soon")
    assert (
        refused.code,
        "'soon' is not allowed; it takes milliseconds or a duration" in refused.err,
    ) == (2, True)


def test_a_released_message_comes_again_uncounted(penstock: Run, topic: str) -> None:
    penstock("produce", topic, "hello", "--retry-max-attempts", "1")
    penstock("consume", topic, "--group", "g", "--max", "1")
    released = penstock("release", topic, "--group", "g", "--offset", "0")
    assert (released.code, released.out) == (0, f"released {topic} 0:0 for group g\n")
    assert penstock("consume", topic, "--group", "g", "--max", "1", "--ack").out == "0:0  hello\n"
    refused = penstock("release", topic, "--group", "g", "--offset", "0")
    assert refused.code == 1
    assert "FAILED_PRECONDITION" in refused.err


def test_every_envelope_field_has_its_flag(penstock: Run, topic: str) -> None:
    produced = penstock(
        "produce", topic, "v", "--run-id", "r", "--step-id", "s", "--parent-step-id", "p",
        "--tenant-id", "t", "--idempotency-key", "i", "--target-topic", topic,
        "--partition-override", "0", "--deadline", "2100-01-01T00:00:00Z",
        "--retry-max-attempts", "3", "--retry-backoff-ms", "10", "--retry-max-backoff-ms", "20",
    )  # fmt: skip
    assert produced.code == 0, produced.err
    line = penstock("consume", topic, "--group", "g", "--max", "1", "--json").out
    assert json.loads(line)["envelope"] == {
        "run_id": "r",
        "step_id": "s",
        "parent_step_id": "p",
        "tenant_id": "t",
        "idempotency_key": "i",
        "target_topic": topic,
        "partition_override": 0,
        "deadline": "2100-01-01T00:00:00Z",
        "retry_policy": {"max_attempts": 3, "backoff_ms": 10, "max_backoff_ms": 20},
    }


def test_json_of_a_consumed_message_is_the_wires_item(penstock: Run, topic: str) -> None:
    penstock("produce", topic, "a\u2028b")
    item = json.loads(penstock("consume", topic, "--group", "g", "--max", "1", "--json").out)
    delivery_id = item.pop("delivery_id")
    assert delivery_id
    assert item == {
        "partition": 0,
        "offset": 0,
        "attempts": 1,
        "key": "",
        "value": "a\u2028b",
        "last_error": "",
    }


def test_a_known_idempotency_key_is_reported(penstock: Run, topic: str) -> None:
    words = ("produce", topic, "v", "--idempotency-key", "once")
    assert json.loads(penstock(*words, "--json").out)["offset"] == 0
    assert "nothing was stored again" in penstock(*words).out


def test_lines_of_stdin_are_produced_and_blank_ones_left_out(penstock: Run, topic: str) -> None:
    done = penstock("produce", topic, "-", stdin="one\n\ntwo\r\nthree")
    assert (done.code, done.out) == (0, "produced 3 messages\n")
    consumed = penstock("consume", topic, "--group", "g", "--ack", "--max", "3")
    assert consumed.out == "0:0  one\n0:1  two\n0:2  three\n"


def test_a_slow_writers_line_is_produced_before_its_next(broker: BrokerProcess, topic: str) -> None:
    command = [sys.executable, "-m", "penstock", "produce", topic, "-"]
    with subprocess.Popen(
        [*command, "--url", broker.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"early\n")
        process.stdin.flush()
        with broker.consume(topic) as stream:
            assert stream.next().value == "early"
        process.stdin.close()
    assert process.returncode == 0


def test_a_refused_line_is_named(penstock: Run, topic: str) -> None:
    done = penstock("produce", topic, "-", "--partition-override", "7", stdin="\none\ntwo\n")
    assert done.code == 1
    assert done.err.startswith("Error: line 2: INVALID_ARGUMENT: ")
    assert "and 1 more" in done.err
    assert penstock("produce", "nowhere", "v").code == 1


def test_consume_takes_no_more_than_it_prints(
    penstock: Run, broker: BrokerProcess, topic: str
) -> None:
    for number in range(5):
        broker.put(topic, str(number))
    penstock("consume", topic, "--group", "g", "--max", "2")
    penstock("consume", topic, "--group", "h", "--max", "2", "--ack")
    report = broker.client.get(f"/v1/topics/{topic}").json()
    taken = {group["name"]: group["partitions"][0]["in_flight"] for group in report["groups"]}
    assert taken == {"g": 2, "h": 0}


def test_consume_ends_when_nothing_came_for_its_timeout(penstock: Run, topic: str) -> None:
    started = time.monotonic()
    done = penstock("consume", topic, "--group", "g", "--timeout", "0.3")
    assert (done.code, done.out) == (0, "")
    assert time.monotonic() - started < 10


def test_ctrl_c_ends_consume_without_complaint(broker: BrokerProcess, topic: str) -> None:
    broker.put(topic, "v")
    command = [sys.executable, "-m", "penstock", "consume", topic, "--group", "g"]
    with subprocess.Popen(
        [*command, "--url", broker.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0:0  v\n"
        process.send_signal(2)
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_end_of_the_topic_ends_consume_with_an_error(broker: BrokerProcess, topic: str) -> None:
    command = [sys.executable, "-m", "penstock", "consume", topic, "--group", "g"]
    with subprocess.Popen(
        [*command, "--url", broker.url],
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stderr is not None
        report = f"/v1/topics/{topic}"
        eventually(lambda: broker.client.get(report).json()["groups"])
        broker.client.delete(report)
        assert b"the broker ended the stream" in process.stderr.read()
    assert process.returncode == 1


def test_control_characters_of_a_message_are_shown_not_sent(penstock: Run, topic: str) -> None:
    penstock("produce", topic, "\x1b[31mred\nline")
    out = penstock("consume", topic, "--group", "g", "--max", "1").out
    assert out == "0:0  \\x1b[31mred\\nline\n"


def test_a_value_is_asked_for_when_there_is_none(penstock: Run, topic: str) -> None:
    assert penstock("produce", topic, stdin="").out == "produced 0 messages\n"
    assert penstock("produce", topic, "").code == 1
    assert penstock("consume", topic).code == 2
