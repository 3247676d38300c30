"""The archive as a process of its own, killed at a random instant and started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.pipelines.archive import journal_table, records_table
from tests.broker_process import SOURCE, BrokerProcess, eventually, wait_until
from tests.spark.pipelines.test_archive import produced
from tests.spark.sources import as_told, frame, produce

MOST_S = 2.0
"""Between the first commit and the kill: some batches of a quiet machine."""


def start(broker: BrokerProcess, lake: Path, state: Path, *options: str) -> subprocess.Popen[bytes]:
    """In a group of its own, with its Java."""
    command = [
        sys.executable, "-m", "penstock.cli.main", "pipeline", "run", "archive", "--once",
        "--lake", str(lake), "--url", broker.url, "--master", "local[2]",
        "--conf", "spark.sql.shuffle.partitions=2", *options,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(state)}
    with (state / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command, env=env, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def test_an_archive_that_is_killed_and_started_again_has_every_row_once(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    produce(broker, topic, range(400))
    lake = tmp_path / "lake"
    after_s = random.uniform(0, MOST_S)

    process = start(broker, lake, tmp_path, "--set", "max_rows=20")
    try:
        eventually(
            lambda: process.poll() is not None or list(lake.glob("*/_commits/*/*.done")),
            timeout_s=120,
        )
        wait_until(time.monotonic() + after_s)
    finally:
        end(process)
    said = (tmp_path / "output.txt").read_text()
    assert process.returncode == -signal.SIGKILL, f"it ended before it was killed:\n{said}"

    produce(broker, topic, range(400, 420))
    process = start(broker, lake, tmp_path)
    try:
        assert process.wait(120) == 0, (tmp_path / "output.txt").read_text()
    finally:
        end(process)

    there = Lake(spark, str(lake))
    found = as_told(records_table(there).read().drop("date").collect())
    assert found == produced(broker, [topic]), f"killed {after_s:.3f} s after the first commit"
    journal = sorted(journal_table(there).read().drop("date").collect())
    assert journal == sorted(frame(spark, broker, log="journal").collect())
