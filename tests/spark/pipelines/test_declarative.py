"""The example of Declarative Pipelines, run as its reader runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from tests.broker_process import SOURCE, BrokerProcess
from tests.quick_java import quick_java
from tests.spark.conftest import IS_CI

EXAMPLE = SOURCE.parent / "examples" / "declarative"
STORAGE = "file:///tmp/penstock-orders"


def test_the_example_makes_its_tables_from_a_topic(broker: BrokerProcess, tmp_path: Path):
    for module in ("google.rpc", "grpc", "yaml"):
        if not IS_CI and find_spec(module) is None:
            pytest.skip("needs penstock[declarative]")
    broker.create_topic("orders", 2)
    for number, item in enumerate(("fig", "nut", "fig")):
        order = json.dumps({"item": item, "count": number + 1})
        broker.put("orders", order, key=f"cart-{number}")
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    assert STORAGE in spec.read_text()
    spec.write_text(spec.read_text().replace(STORAGE, f"file://{tmp_path}/storage"))
    environ = (
        os.environ
        | {
            "PYTHONPATH": str(SOURCE),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "PENSTOCK_URL": broker.url,
        }
        | quick_java()
    )
    java = subprocess.run(
        [sys.executable, "-m", "penstock.spark.java"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-pipelines")),
            *("run", "--conf", "spark.sql.catalogImplementation=hive"),
            *("--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.ui.enabled=false"),
        ],
        env=environ | {"JAVA_HOME": java.stdout.strip()},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=project,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Run is COMPLETED" in done.stdout
    orders = pq.read_table(project / "spark-warehouse" / "orders").to_pylist()
    assert {(row["key"], row["item"], row["count"]) for row in orders} == {
        ("cart-0", "fig", 1), ("cart-1", "nut", 2), ("cart-2", "fig", 3),
    }  # fmt: skip
    totals = pq.read_table(project / "spark-warehouse" / "totals").to_pylist()
    assert {row["item"]: row["count"] for row in totals} == {"fig": 4, "nut": 2}
