"""A lake on a file system that is not this machine's, as far as anybody but Hadoop can tell.

viewfs is Hadoop's own and needs no server: a table of mounts, here onto a directory, by which every
path of the lake goes through Hadoop, and none is one that Python could open.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import PenstockError
from penstock.spark.lake.files import Files
from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.archive import PIPELINE, records_table
from penstock.spark.running.run import Run
from tests.broker_process import SOURCE, BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import produce, values_of

PATH = "viewfs://lakes/far/deep"


@pytest.fixture(scope="module")
def mount(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A setting of Hadoop's, and what it is."""
    name, place = "fs.viewfs.mounttable.lakes.link./far", tmp_path_factory.mktemp("far").as_uri()
    conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
    conf.set(name, place)
    return name, place


@pytest.fixture
def lake(spark: SparkSession, mount: tuple[str, str]) -> Lake:
    return Lake(spark, PATH)


def rows(spark: SparkSession, *named: tuple[str, int]) -> DataFrame:
    values = ", ".join(f"('{name}', {count})" for name, count in named)
    return spark.sql(f"select * from values {values} as t(name, count)")


def contents(frame: DataFrame) -> list[tuple[str, int]]:
    return sorted((row["name"], row["count"]) for row in frame.collect())


def test_a_table_is_appended_to_joined_replaced_and_read(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.spark.lake.table.FEW", 2)
    table = lake.table("counts", rows(spark, ("a", 1)).schema, ("name",))
    assert table.read().collect() == []
    assert table.append(rows(spark, ("a/b", 1), ("{ü}", 2)), "w", 0) == 2
    assert table.append(rows(spark, ("a/b", 1), ("{ü}", 2)), "w", 0) == 0
    assert table.append(rows(spark, ("a/b", 3)), "w", 1) == 1
    assert contents(table.read()) == [("a/b", 1), ("a/b", 3), ("{ü}", 2)]
    assert table.compact() == 1
    files = Files(spark, f"{PATH}/counts")
    assert len(files.find("name=*/*.parquet")) == 2
    assert files.path().startswith("viewfs://lakes/")
    assert table.replace(rows(spark, ("a/b", 9)), [["a/b"]]) == 1
    assert contents(lake.find("counts").read()) == [("a/b", 9), ("{ü}", 2)]
    assert contents(spark.read.parquet(f"{PATH}/counts").select("name", "count")) == [
        ("a/b", 9), ("{ü}", 2),
    ]  # fmt: skip


def test_a_commit_that_was_left_in_the_middle_is_finished_by_the_next_reader(
    spark: SparkSession, lake: Lake
):
    table = lake.table("left", rows(spark, ("a", 1)).schema)
    table.append(rows(spark, ("a", 1)), "w", 0)
    staged = table.stage(rows(spark, ("b", 2)), "w")
    (name,) = staged.names
    to = "part-w-0000000001-by-hand.parquet"
    Files(spark, f"{PATH}/left").write(
        "_commits/w/0000000001.json",
        f'{{"writer": "w", "batch": 1, "rows": 1, "moves": [["{name}", "{to}"]], "removals": [],'
        ' "query": ""}',
    )
    assert contents(spark.read.parquet(f"{PATH}/left")) == [("a", 1)]
    assert contents(lake.find("left").read()) == [("a", 1), ("b", 2)]
    assert table.append(rows(spark, ("b", 2)), "w", 1) == 0


def test_a_path_that_hadoop_does_not_know_is_refused_in_a_line(
    spark: SparkSession, mount: tuple[str, str]
):
    for path in ("nowhere://host/lake", "viewfs://others/lake", "viewfs://lakes/near"):
        with pytest.raises(PenstockError) as failure:
            Files(spark, path).make_dirs("x")
        assert path.partition("//")[0] in failure.value.message
        assert "\n" not in failure.value.message


def test_an_archive_goes_on_where_it_was_also_in_another_process(
    spark: SparkSession,
    broker: BrokerProcess,
    lake: Lake,
    mount: tuple[str, str],
    tmp_path: Path,
):
    topic = broker.create_topic(new_name("far"), 2)
    wanted = produce(broker, topic, range(10))
    at = BrokerSettings(url=broker.url, retry_s=10)
    options = {"topics": topic, "journal": "false"}
    with Run("archive", spark, at, lake, PIPELINE.settings(options)) as run:
        PIPELINE.start(run)
        run.wait(600)
    wanted += produce(broker, topic, range(10, 15))
    command = [
        sys.executable, "-m", "penstock", "pipeline", "run", "archive", "--once",
        "--lake", PATH, "--url", broker.url, "--master", "local[2]",
        "--conf", f"spark.hadoop.{mount[0]}={mount[1]}",
        "--conf", "spark.sql.shuffle.partitions=2",
        *(word for name, value in options.items() for word in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "records" in done.stdout
    assert values_of(records_table(lake).read()) == sorted(wanted)
    folder = Path(mount[1].removeprefix("file://")) / "deep"
    assert (folder / "_checkpoints" / "archive" / "records" / "commits").is_dir()
