"""A table whose writer is killed: after every single step of every kind of commit, the next one to
come finishes what was decided, and the rows are exactly those before it or those after it.

A kill is an exception after a step of the file system, behind which nothing works any more. What
Spark writes is prepared once, and copied to where Spark would have written it: its part is in
`test_table.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock.spark.lake.files import Files
from penstock.spark.lake.table import FEW, Table

SCHEMA = StructType([StructField("part", StringType()), StructField("number", LongType())])


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


class MortalFiles(Files):
    """Lives for so many steps. If the one after them writes a text, half of it is written."""

    def __init__(self, spark: SparkSession, root: str, steps: int) -> None:
        super().__init__(spark, root)
        self.left = steps
        self.is_dying: Callable[[str], bool] = lambda name: False

    def put(self, name: str, text: str | bytes) -> None:
        if self.left == 0:
            super().put(name, text[: len(text) // 2])
        self._step()
        super().put(name, text)

    def rename(self, name: str, to: str) -> bool:
        if self.is_dying(to):
            self.left = 0
        self._step()
        return super().rename(name, to)

    def delete(self, name: str) -> None:
        self._step()
        super().delete(name)

    def make_dirs(self, name: str) -> None:
        self._step()
        super().make_dirs(name)

    def _step(self) -> None:
        if self.left <= 0:
            self.left = -1
            raise Killed
        self.left -= 1


class PreparedTable(Table):
    """Spark's part of a write is done already."""

    prepared: Path

    def _write(self, frame: DataFrame, path: str) -> int:
        shutil.copytree(self.prepared, path.removeprefix("file:"), dirs_exist_ok=True)
        return 1


def numbers(path: Path) -> list[tuple[str, int]]:
    """As any reader of Parquet sees them."""
    if not path.exists():
        return []
    found = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    if not found.num_rows:
        return []
    return sorted(zip(found["part"].to_pylist(), found["number"].to_pylist(), strict=True))


@dataclass(frozen=True)
class Kind:
    """A kind of commit: the table before it, what Spark writes for it, and how it is asked for."""

    before: Path
    prepared: Path
    act: Callable[[Table, DataFrame], object]


Kinds = dict[str, Kind]


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.sql(
        "select * from values ('a', 100L), ('b', 101L), ('c', 102L) as t(part, number)"
    )


@pytest.fixture(scope="module")
def kinds(spark: SparkSession, frame: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Partition a has as many files as are joined, b has one."""
    where = tmp_path_factory.mktemp("kinds")
    new = prepare(where / "new", a=[100], b=[101], c=[102])
    full = where / "full"
    table = PreparedTable(spark, str(full), SCHEMA, ("part",))
    for batch in range(FEW):
        b = [50] if batch == 0 else []
        table.prepared = prepare(where / f"batch-{batch}", a=[batch], b=b)
        table.append(frame, "w", batch)
    joined = prepare(where / "joined", a=list(range(FEW)))
    (where / "none").mkdir()
    return {
        "first append": Kind(where / "none", new, lambda t, f: t.append(f, "w", FEW)),
        "append": Kind(full, new, lambda t, f: t.append(f, "w", FEW)),
        "replace": Kind(full, new, lambda t, f: t.replace(f, [["a"], ["b"], ["c"]])),
        "compact": Kind(full, joined, lambda t, f: t.compact()),
    }


def prepare(path: Path, **parts: list[int]) -> Path:
    for part, found in parts.items():
        (path / f"part={part}").mkdir(parents=True)
        if found:
            pq.write_table(pa.table({"number": found}), path / f"part={part}" / "part-0.parquet")
    return path


def run(
    spark: SparkSession, kind: Kind, frame: DataFrame, path: Path, files: Files | None = None
) -> None:
    table = PreparedTable(spark, str(path), SCHEMA, ("part",), files=files)
    table.prepared = kind.prepared
    kind.act(table, frame)


@pytest.mark.parametrize("name", ["first append", "append", "replace", "compact"])
def test_a_kill_after_any_step_leaves_all_or_nothing(
    spark: SparkSession, kinds: Kinds, frame: DataFrame, tmp_path: Path, name: str
):
    kind = kinds[name]
    whole = tmp_path / "whole"
    shutil.copytree(kind.before, whole)
    run(spark, kind, frame, whole)
    before, after = numbers(kind.before), numbers(whole)
    seen = []
    for steps in range(200):
        path = tmp_path / f"killed-{steps}"
        shutil.copytree(kind.before, path)
        try:
            run(spark, kind, frame, path, MortalFiles(spark, str(path), steps))
        except Killed:
            pass
        else:
            break
        recovered = tmp_path / f"recovered-{steps}"
        shutil.copytree(path, recovered)
        Table(spark, str(recovered), SCHEMA, ("part",)).recover()
        seen.append(numbers(recovered))
        assert seen[-1] in (before, after), f"killed after {steps} steps"
        run(spark, kind, frame, path)
        assert numbers(path) == after, f"killed after {steps} steps, and done again"
        assert not list((path / "_commits").glob("*/*.json"))
    assert len(seen) > 10
    assert before in seen
    assert after in seen
    # Once it is decided it stays decided.
    assert seen == sorted(seen, key=lambda rows: rows == after)


def test_a_reader_finishes_what_it_finds_decided(
    spark: SparkSession, kinds: Kinds, frame: DataFrame, tmp_path: Path
):
    kind = kinds["replace"]
    path = tmp_path / "killed"
    shutil.copytree(kind.before, path)
    files = MortalFiles(spark, str(path), 200)
    files.is_dying = lambda name: name.endswith(".parquet") and "part=b" in name
    with pytest.raises(Killed):
        run(spark, kind, frame, path, files)
    assert list(path.glob("_commits/*/*.json"))
    mixed = numbers(path)
    rows = Table(spark, str(path), SCHEMA, ("part",)).read().collect()
    assert sorted(map(tuple, rows)) == [("a", 100), ("b", 101), ("c", 102)] != mixed
