"""A table: what is appended, replaced and joined is what is read, by us and by any reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.spark.lake.commits import Commit, Commits, writer_name
from penstock.spark.lake.files import Files
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import FEW, Table, packed
from penstock.spark.sink import QUERY_ID

SCHEMA = "name string, day date, count long, at timestamp"
PARTITION_BY = ("name", "day")


def schema(text: str = SCHEMA) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> Table:
    return Lake(spark, str(tmp_path / "lake")).table("counts", schema(), PARTITION_BY)


def rows(spark: SparkSession, *named: tuple[str, int], more: str = "") -> DataFrame:
    """Rows of a name and a count; those of a name have one day."""
    values = ", ".join(f"('{name}', {count})" for name, count in named)
    return spark.sql(
        "select name, date'2026-01-01' as day, count,"
        f" timestamp'2026-01-01 12:00:00.000001Z' as at{more}"
        f" from values {values} as t(name, count)"
    )


def contents(frame: DataFrame) -> list[tuple[str, int]]:
    return sorted((row["name"], row["count"]) for row in frame.select("name", "count").collect())


def files_of(table: Table) -> list[Path]:
    return sorted(Path(table.path).glob("name=*/day=*/*.parquet"))


def test_rows_that_their_check_refuses_are_not_added_and_may_come_again_as_others(
    spark: SparkSession, table: Table
):
    seen: list[int] = []

    def check(staged: DataFrame) -> None:
        seen.extend(row["count"] for row in staged.collect())
        if seen == [1]:
            raise InvalidArgument("no")

    with pytest.raises(InvalidArgument, match="no"):
        table.append_checked(rows(spark, ("a", 1)), "writer", 0, check)
    assert table.read().count() == 0
    assert table.append_checked(rows(spark, ("a", 2)), "writer", 0, check) == 1
    assert table.append_checked(rows(spark, ("a", 3)), "writer", 0, check) == 0
    assert [row["count"] for row in table.read().collect()] == [2]
    assert seen == [1, 2]


def test_a_batch_is_in_the_table_once(spark: SparkSession, table: Table):
    assert not table.exists()
    assert table.read().schema == schema()
    assert table.read().collect() == []
    assert table.append(rows(spark, ("a/b", 1), ("{ü}", 2)), "w", 0) == 2
    assert table.append(rows(spark, ("a/b", 1), ("{ü}", 2)), "w", 0) == 0
    assert table.append(rows(spark, ("a/b", 3)), "another/writer", 0) == 1
    assert table.append(rows(spark, ("a/b", 4)).where("false"), "w", 1) == 0
    assert table.append(rows(spark, ("a/b", 5)), "w", 7) == 1
    with pytest.raises(FailedPrecondition, match="has batch 7 of w, and this is batch 6"):
        table.append(rows(spark, ("a/b", 6)), "w", 6)
    expected = [("a/b", 1), ("a/b", 3), ("a/b", 5), ("{ü}", 2)]
    assert contents(table.read()) == expected
    assert table.read().schema == schema()
    # For any other reader it is Parquet and nothing else.
    assert contents(spark.read.parquet(table.path)) == expected
    assert len(list(Path(table.path).glob("_commits/*/*"))) == 2
    assert not list(Path(table.path).glob("_staging/*"))


def test_the_same_number_of_another_query_is_another_batch(spark: SparkSession, table: Table):
    context = spark.sparkContext
    try:
        context.setLocalProperty(QUERY_ID, "one")
        assert table.append(rows(spark, ("a", 1)), "w", 0) == 1
        assert table.append(rows(spark, ("a", 1)), "w", 0) == 0
        context.setLocalProperty(QUERY_ID, "two")
        with pytest.raises(FailedPrecondition, match=r"batch 0 of another checkpoint\. Nothing"):
            table.append(rows(spark, ("a", 2)), "w", 0)
    finally:
        context.setLocalProperty(QUERY_ID, "")


def test_rows_take_the_place_of_all_or_of_those_of_their_partitions(
    spark: SparkSession, table: Table
):
    table.append(rows(spark, ("a", 1), ("b", 2), ("c/d", 3)), "w", 0)
    day = "2026-01-01"
    table.replace(rows(spark, ("a", 10)), [["a", day], ["c/d", day]])
    assert contents(table.read()) == [("a", 10), ("b", 2)]
    assert table.partitions() == [("a", day), ("b", day)]
    with pytest.raises(
        InvalidArgument, match="partition b/2026-01-01, which is not one of those to replace"
    ):
        table.replace(rows(spark, ("b", 20)), [["a", day]])
    assert contents(table.read()) == [("a", 10), ("b", 2)]
    table.replace(rows(spark, ("e", 5)))
    assert contents(table.read()) == [("e", 5)]
    assert contents(spark.read.parquet(table.path)) == [("e", 5)]


def test_columns_may_be_added_and_not_dropped_or_changed(spark: SparkSession, table: Table):
    table.append(rows(spark, ("a", 1)), "w", 0)

    def again(text: str, partition_by: tuple[str, ...] = PARTITION_BY) -> Table:
        return Table(spark, table.path, schema(text), partition_by)

    longer = again(f"{SCHEMA}, note string")
    assert [row["note"] for row in longer.read().collect()] == [None]
    longer.append(rows(spark, ("a", 2), more=", 'new' as note"), "w", 1)
    found = longer.read().select("count", "note").collect()
    assert sorted(map(tuple, found)) == [(1, None), (2, "new")]
    # Who reads with the shorter one may, who writes would drop what the other has written.
    assert contents(table.read()) == [("a", 1), ("a", 2)]
    with pytest.raises(FailedPrecondition, match="column note, which would be dropped: keep it"):
        again(SCHEMA).append(rows(spark, ("a", 3)), "w", 2)
    changed = again(f"{SCHEMA.replace('count long', 'count string')}, note string")
    for act in (changed.read, lambda: changed.append(rows(spark, ("a", 3)), "w", 2)):
        with pytest.raises(FailedPrecondition, match="column count is bigint, not string"):
            act()
    with pytest.raises(FailedPrecondition, match="is partitioned by name, day, not by name:"):
        again(f"{SCHEMA}, note string", ("name",)).read()
    with pytest.raises(InvalidArgument, match="have no column note"):
        longer.append(rows(spark, ("a", 3)), "w", 2)
    with pytest.raises(InvalidArgument, match="have a column other, which the table does not have"):
        longer.append(rows(spark, ("a", 3), more=", 1 as note, 2 as other"), "w", 2)


def test_small_files_are_joined_and_rows_stay(spark: SparkSession, table: Table):
    wanted = []
    for batch in range(FEW):
        named = [(name, batch) for name in ("a", "b", "few")[: 2 + (batch == 0)]]
        table.append(rows(spark, *named).coalesce(1), "w", batch)
        wanted += named
    before = [(file.stat().st_size, file.parent.parent.name) for file in files_of(table)]
    assert len(before) == 2 * FEW + 1
    assert table.compact(target_bytes=max(size for size, _ in before) * FEW // 2) > 8
    assert contents(table.read()) == sorted(wanted)
    left = [file.parent.parent.name for file in files_of(table)]
    assert {name: left.count(name) for name in left} == {"name=a": 2, "name=b": 2, "name=few": 1}
    assert table.compact() == 0


def test_files_are_packed_in_order_up_to_the_target():
    sizes = {f"f{number:02}": 10 for number in range(9)} | {"big": 60}
    assert [each.names for each in packed(sizes, 40)] == [
        ("f00", "f01", "f02", "f03"),
        ("f04", "f05", "f06", "f07"),
    ]
    assert packed(dict(list(sizes.items())[:7]), 40) == []


def test_a_lake_that_cannot_be_written_says_where_and_why(spark: SparkSession, tmp_path: Path):
    (tmp_path / "file").write_text("")
    blocked = Table(spark, str(tmp_path / "file" / "counts"), schema(), PARTITION_BY)
    with pytest.raises(FailedPrecondition, match=r"file/counts cannot be made: .*directory"):
        blocked.append(rows(spark, ("a", 1)), "w", 0)
    with pytest.raises(InvalidArgument, match=r'nofs://lake cannot be reached: .*"nofs"'):
        Table(spark, "nofs://lake", schema())


def test_a_writers_name_is_made_one_of_a_file():
    assert writer_name("archive-records") == "archive-records"
    odd = {writer_name(name) for name in ("a/b", "a-b", "a b", ".a-b", "x" * 300)}
    assert len(odd) == 5
    assert all("/" not in name and not name.startswith(".") for name in odd)
    assert max(map(len, odd)) < 120


def test_who_finishes_a_commit_too_late_changes_nothing(spark: SparkSession, table: Table):
    """Two finish it, and the slower one after its files have been replaced."""
    slow = Commits(table._files)
    taken: list[Commit] = []

    class Watched(Files):
        def rename(self, name: str, to: str) -> bool:
            if to.endswith(".done") and not taken:
                taken.extend(slow.pending())
            return super().rename(name, to)

    watched = Table(spark, table.path, schema(), PARTITION_BY, files=Watched(spark, table.path))
    watched.append(rows(spark, ("a", 1), ("b", 2)), "w", 0)
    table.replace(rows(spark, ("c", 3)))
    for commit in taken:
        slow.finish(commit)
    assert len(taken) == 1
    assert contents(table.read()) == [("c", 3)]
    assert table.append(rows(spark, ("a", 1)), "w", 0) == 0


def test_a_reader_sees_no_part_of_a_commit_that_is_made_meanwhile(
    spark: SparkSession, table: Table
):
    table.append(rows(spark, ("a", 1), ("b", 2)), "w", 0)
    looks = []

    class Slow(Files):
        def find(self, pattern: str) -> list[str]:
            if pattern.startswith("_commits"):
                looks.append(pattern)
                if len(looks) == 3:  # Spark has listed the files
                    table.replace(rows(spark, ("c", 3)))
            return super().find(pattern)

    slow = Table(spark, table.path, schema(), PARTITION_BY, files=Slow(spark, table.path))
    assert contents(slow.read()) == [("c", 3)]
