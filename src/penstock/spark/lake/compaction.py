"""Chooses the small files of a table to join, and joins their rows.

Invariant: only files of one partition are joined, and a file is in one bin. A partition with fewer
than `FEW` small files is left alone, because every joined file is written once more. Must not know
commits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.lake.files import Files, exactly

FEW = 8
MOST_FILES = 2000
"""The most files of one commit. It bounds what the driver lists, and what is repeated if it
dies."""

_BIN, _FILE = "_bin", "_file"


@dataclass(frozen=True)
class Bin:
    """Files that become one."""

    names: tuple[str, ...]
    size: int


def bins_of(files: Files, names: Sequence[str], target_bytes: int) -> Iterator[list[Bin]]:
    """Yields the files that are worth joining, in lots of one commit each."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_folder[name.rpartition("/")[0]].append(name)
    lot: list[Bin] = []
    for folder in sorted(by_folder):
        if len(by_folder[folder]) < FEW:
            continue
        sizes = files.sizes(f"{exactly([folder])}/*.parquet" if folder else "*.parquet")
        lot += packed(
            {name: sizes[name] for name in by_folder[folder] if name in sizes}, target_bytes
        )
        if sum(len(each.names) for each in lot) >= MOST_FILES:
            yield lot
            lot = []
    if lot:
        yield lot


def packed(sizes: dict[str, int], target_bytes: int) -> list[Bin]:
    """Packs the small files of a partition into bins of up to `target_bytes`, oldest first. Returns
    none if they are few."""
    small = sorted(name for name, size in sizes.items() if size < target_bytes // 2)
    if len(small) < FEW:
        return []
    found: list[Bin] = []
    names: list[str] = []
    size = 0
    for name in small:
        if names and size + sizes[name] > target_bytes:
            found.append(Bin(tuple(names), size))
            names, size = [], 0
        names.append(name)
        size += sizes[name]
    found.append(Bin(tuple(names), size))
    return [each for each in found if len(each.names) > 1]


def joined(rows: DataFrame, bins: Sequence[Bin]) -> DataFrame:
    """Returns the rows arranged so that one task writes all rows of a bin."""
    spark = rows.sparkSession
    if len(bins) == 1:
        return rows.coalesce(1)
    found = [(name.rpartition("/")[2], at) for at, each in enumerate(bins) for name in each.names]
    pairs = [f"('{file}', {at})" for file, at in found]
    known = spark.sql(f"select * from values {', '.join(pairs)} as t({_FILE}, {_BIN})")
    return (
        rows.withColumn(_FILE, F.col("_metadata.file_name"))
        .join(F.broadcast(known), _FILE)
        .repartitionById(len(bins), _BIN)
        .drop(_FILE, _BIN)
    )
