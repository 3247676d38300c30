"""Runs that die between two steps: after a table has a batch, or after the broker has one."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.running.run import Run


class Killed(Exception):
    """The end of the process, as far as a pipeline can see. It is an Exception, for Spark waits for
    ever for a batch that ends with anything else."""


class Deadly:
    """Ends the run after the `nth` step, from 1, whose name begins so; never, without a name."""

    def __init__(self, step: str = "", nth: int = 1) -> None:
        self.step = step
        self.left = nth
        self.steps: list[str] = []

    def after(self, step: str) -> None:
        self.steps.append(step)
        if self.step and step.startswith(self.step):
            self.left -= 1
            if self.left == 0:
                raise Killed(step)


class DeadlyTable(Table):
    deadly: Deadly
    name: str

    def append(self, frame: DataFrame, writer: str, batch: int) -> int:
        rows = super().append(frame, writer, batch)
        self.deadly.after(f"append {self.name}")
        return rows


class DeadlyLake(Lake):
    deadly: Deadly

    def table(self, name: str, schema: StructType, partition_by: tuple[str, ...] = ()) -> Table:
        table = DeadlyTable(self.spark, f"{self.path}/{name}", schema, partition_by)
        table.deadly, table.name = self.deadly, name
        return table


class DeadlyRun(Run):
    def __init__(self, *arguments: Any, deadly: Deadly | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deadly = deadly or Deadly()
        lake = DeadlyLake(self.spark, self.lake.path)
        lake.deadly = self.deadly
        self.lake = lake

    def write(self, frame: DataFrame, txn: str, **options: Any) -> None:
        super().write(frame, txn, **options)
        self.deadly.after(f"write {options.get('txnBatch')}")
