"""Exactly once, at every point where something can die: the contents are compared, not counted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.broker_process import BrokerProcess, eventually, wait_until
from tests.contract.checks import new_name
from tests.spark.conftest import StartBroker
from tests.spark.faults import die, kill, once, register_faulty, revived, until_dead
from tests.spark.sinks import numbered, values
from tests.spark.sources import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300


@pytest.fixture
def mortal(start_broker: StartBroker) -> BrokerProcess:
    """A broker that is killed, and is found at the same address afterwards."""
    return start_broker(port=free_port())


def pid(broker: BrokerProcess) -> int:
    assert broker.process is not None
    return broker.process.pid


def rows(spark: SparkSession, count: int, partitions: int = 4) -> DataFrame:
    return spark.range(0, count, numPartitions=partitions).select(
        f.rpad(f.format_string("value %d ", "id"), 100, ".").alias("value")
    )


def save(frame: DataFrame, format_name: str, broker: BrokerProcess, topic: str) -> None:
    frame.write.format(format_name).mode("append").options(url=broker.url, topic=topic).save()


def test_a_task_that_dies_after_sending_is_done_again_and_counts_once(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    topic = broker.create_topic(new_name())
    faulty = register_faulty(spark, new_name("f"), after_write=once(tmp_path / "died", die))
    save(rows(spark, 2000), faulty, broker, topic)
    assert (tmp_path / "died").exists()
    assert values(broker, topic) == numbered(range(2000), 100)


def test_a_task_whose_input_fails_half_way_counts_once(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    topic = broker.create_topic(new_name())
    fail = once(tmp_path / "failed", die)

    def failing(batches):
        for number, batch in enumerate(batches):
            yield batch
            if number == 1:
                fail()

    # More than a piece has gone when the input fails.
    large = spark.range(0, 800, numPartitions=2).select(
        f.rpad(f.format_string("value %d ", "id"), 50_000, ".").alias("value")
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 190)
    try:
        save(large.mapInArrow(failing, "value string"), "penstock", broker, topic)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / "failed").exists()
    assert values(broker, topic) == numbered(range(800), 50_000)


def test_a_broker_killed_between_stage_and_commit_stores_every_row_once(
    spark: SparkSession, mortal: BrokerProcess, tmp_path: Path
):
    topic = mortal.create_topic(new_name())
    end = once(tmp_path / "killed", kill(pid(mortal)))
    faulty = register_faulty(spark, new_name("f"), before_commit=end)
    with revived(mortal) as lives:
        save(rows(spark, 20_000), faulty, mortal, topic)
    assert lives() == 1
    assert values(mortal, topic) == numbered(range(20_000), 100)


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.2, 0.5])
def test_a_broker_killed_while_it_stores_a_batch_stores_every_row_once(
    spark: SparkSession, mortal: BrokerProcess, tmp_path: Path, after_s: float
):
    topic = mortal.create_topic(new_name())
    end = once(tmp_path / "killed", kill(pid(mortal), after_s))
    faulty = register_faulty(
        spark, new_name("f"), before_commit=end, after_commit=until_dead(pid(mortal))
    )
    with revived(mortal) as lives:
        save(rows(spark, 200_000), faulty, mortal, topic)
        eventually(lives)  # A fast commit is answered before the kill.
    assert lives() == 1
    assert values(mortal, topic) == numbered(range(200_000), 100)


def test_a_broker_killed_after_the_commit_has_every_row_once(
    spark: SparkSession, mortal: BrokerProcess, tmp_path: Path
):
    topic = mortal.create_topic(new_name())
    end = once(tmp_path / "killed", kill(pid(mortal)))
    faulty = register_faulty(spark, new_name("f"), after_commit=end)
    with revived(mortal) as lives:
        save(rows(spark, 20_000), faulty, mortal, topic)
        eventually(lives)
    assert values(mortal, topic) == numbered(range(20_000), 100)


def test_a_driver_killed_between_the_sinks_commit_and_sparks_repeats_nothing(
    broker: BrokerProcess, tmp_path: Path
):
    source, target = broker.create_topic(new_name()), broker.create_topic(new_name())
    items = [{"topic": source, "value": value} for value in numbered(range(500))]
    assert broker.client.post("/v1/produce/batch", json=items).status_code == 200
    checkpoint = tmp_path / "checkpoint"
    assert drive(broker, source, target, checkpoint, "die")[0] == -9
    assert values(broker, target) == numbered(range(500))
    commits = checkpoint / "commits"
    assert not commits.exists() or not list(commits.glob("[0-9]*"))
    items = [{"topic": source, "value": value} for value in numbered(range(500, 600))]
    assert broker.client.post("/v1/produce/batch", json=items).status_code == 200
    code, said = drive(broker, source, target, checkpoint, "live")
    assert code == 0
    assert values(broker, target) == numbered(range(600))
    assert "ERROR" not in said, "it ends without stopping Spark, and nothing is wrong with that"


def drive(
    broker: BrokerProcess, source: str, target: str, checkpoint: Path, fate: str
) -> tuple[int, str]:
    """The exit code of a driver that has a Spark of its own, and what it said."""
    command = [sys.executable, "-m", "tests.spark.dying_driver"]
    arguments = [broker.url, source, target, str(checkpoint), fate]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        start_new_session=True,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def full(start_broker: StartBroker) -> BrokerProcess:
    """A broker whose topic `full` has no room until its group `g` finishes what it was given."""
    broker = start_broker(env={"PENSTOCK_MAX_PARTITION_MSGS": "2"})
    broker.create_topic("full")
    with broker.consume("full") as stream:
        for number in range(2):
            broker.put("full", f"first {number}")
        stream.take(2)
    return broker


def publish(broker: BrokerProcess, done: int) -> None:
    path = "/v1/topics/full/groups/g/progress"
    reply = broker.client.post(path, json={"partitions": [{"partition": 0, "next": done}]})
    assert reply.status_code == 200, reply.text


def test_a_full_partition_is_waited_for(spark: SparkSession, full: BrokerProcess):
    def make_room() -> None:
        wait_until(time.monotonic() + 1.5)
        publish(full, 2)

    room = Thread(target=make_room)
    room.start()
    save(rows(spark, 100, 2), "penstock", full, "full")
    room.join()
    assert values(full, "full") == ["first 0", "first 1", *numbered(range(100), 100)]


def test_a_partition_that_stays_full_is_an_error_after_retry_seconds(
    spark: SparkSession, full: BrokerProcess
):
    write = rows(spark, 100, 2).write.format("penstock").mode("append")
    began = time.monotonic()
    with pytest.raises(
        Exception, match=r"(?s)max_partition_msgs is 2.*tried for 1 s \(option retrySeconds\)"
    ):
        write.options(url=full.url, topic="full", retrySeconds=1).save()
    assert time.monotonic() - began >= 1
    assert values(full, "full") == ["first 0", "first 1"]


def test_no_room_for_what_is_staged_is_an_error_after_retry_seconds(
    spark: SparkSession, start_broker: StartBroker
):
    broker = start_broker(env={"PENSTOCK_MAX_STAGED_BYTES": "2000"})
    topic = broker.create_topic("t")
    write = rows(spark, 100, 1).write.format("penstock").mode("append")
    with pytest.raises(Exception, match=r"(?s)max_staged_bytes.*tried for 1 s \(option retryS"):
        write.options(url=broker.url, topic=topic, retrySeconds=1).save()
    assert values(broker, topic) == []


def test_a_wrong_token_is_told_and_not_shown(spark: SparkSession, start_broker: StartBroker):
    broker = start_broker(env={"PENSTOCK_TOKEN": "right"})
    write = rows(spark, 1, 1).write.format("penstock").mode("append")
    with pytest.raises(Exception, match="does not take the token") as caught:
        write.options(url=broker.url, topic="t", token="not-this-one").save()
    assert "not-this-one" not in str(caught.value)


def test_a_broker_that_is_away_is_told_after_retry_seconds(spark: SparkSession):
    write = rows(spark, 1, 1).write.format("penstock").mode("append")
    with pytest.raises(Exception, match=r"no broker answers at http://127.0.0.1:1 "):
        write.options(url="http://127.0.0.1:1", topic="t", retrySeconds=0).save()
