"""A standalone cluster from the pip package, a master and two workers, reads a broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.quick_java import OPTIONS
from tests.spark.sources import produce

SOURCE = Path(__file__).parents[2] / "src"
SPARK_HOME = Path(pyspark.__file__).parent
CLASS = "org.apache.spark.deploy"
MASTER_URL = re.compile(r"Starting Spark master at (spark://\S+)")
REGISTERED = "Registering worker"

PIPELINES = """
from penstock.spark import pipeline
from pyspark.sql import functions as F

@F.udf("string")
def loud(value):
    return value.upper()

@pipeline(source="{topic}", sink="table:loud")
def louder(rows):
    return rows.select(loud("value").alias("value"))
"""
JOB = """
import sys
from penstock.spark import session
url, topic, master, out, java_options = sys.argv[1:]
spark = session("cluster", master, {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m", "spark.executor.cores": 1, "spark.cores.max": 2,
    "spark.executor.extraJavaOptions": java_options,
})
options = {"url": url, "topic": topic}
rows = spark.read.format("penstock").options(minPartitions=4, **options).load()
print("batch", sorted(row.value for row in rows.collect()))
stream = spark.readStream.format("penstock").options(maxRowsPerTrigger=30, **options).load()
query = (stream.writeStream.format("parquet").option("checkpointLocation", out + "/checkpoint")
         .trigger(availableNow=True).start(out + "/rows"))
query.awaitTermination(600)
print("stream", sorted(row.value for row in spark.read.parquet(out + "/rows").collect()))
print("batches", [progress["numInputRows"] for progress in query.recentProgress])
hosts = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
print("executors", len(hosts) - 1)
"""


@contextmanager
def daemon(log: Path, *arguments: str, work_dir: Path) -> Iterator[Path]:
    environ = os.environ | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": OPTIONS,
        "SPARK_WORKER_DIR": str(work_dir),
        "PYTHONPATH": str(SOURCE),
        "PYSPARK_PYTHON": sys.executable,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def master(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster whose two workers have come."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as stack:
        log = stack.enter_context(
            daemon(tmp_path / "master.log", f"{CLASS}.master.Master", *place, work_dir=tmp_path)
        )
        found = eventually(lambda: MASTER_URL.search(log.read_text()), timeout_s=60)
        assert found is not None
        size = ("--cores", "1", "--memory", "512m")
        for number in range(2):
            stack.enter_context(
                daemon(
                    tmp_path / f"worker-{number}.log",
                    *(f"{CLASS}.worker.Worker", *place, *size, found[1]),
                    work_dir=tmp_path / f"work-{number}",
                )
            )
        eventually(lambda: log.read_text().count(REGISTERED) == 2, timeout_s=60)
        yield found[1]


def test_a_batch_and_a_stream_are_read_on_a_cluster(
    broker: BrokerProcess, topic: str, master: str, tmp_path: Path
):
    wanted = sorted(produce(broker, topic, range(100)))
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = subprocess.run(
        [sys.executable, str(job), broker.url, topic, master, str(tmp_path), OPTIONS],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = done.stdout + done.stderr
    assert f"batch {wanted}" in done.stdout, said
    assert f"stream {wanted}" in done.stdout, said
    assert "batches [30, 30, 30, 10]" in done.stdout, said
    assert "executors 2" in done.stdout, said


def test_a_pipeline_runs_on_a_cluster_through_spark_submit(
    broker: BrokerProcess, topic: str, master: str, tmp_path: Path
):
    wanted = sorted(value.upper() for value in produce(broker, topic, range(50)))
    (tmp_path / "mine.py").write_text(PIPELINES.format(topic=topic))
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": OPTIONS,
        "spark.sql.shuffle.partitions": "2",
    }
    changed = {"PYTHONPATH": str(SOURCE), "PENSTOCK_URL": broker.url, "PENSTOCK_TOKEN": "s3cret"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock", "pipeline", "run", "mine.py", "--once"),
            *("--master", master, "--lake", f"file://{tmp_path}/lake"),
            *(word for each in settings.items() for word in ("--conf", "=".join(each))),
        ],
        env=os.environ | changed | {"XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"on {master}" in said
    assert done.stdout.split()[-1] == "finished", said
    found = pq.read_table(tmp_path / "lake" / "loud").column("value").to_pylist()
    assert sorted(found) == wanted
    (kept,) = (tmp_path / "state" / "penstock" / "pipelines").iterdir()
    assert "s3cret" not in kept.read_text()
