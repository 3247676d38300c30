"""A table of a lake: Parquet files, and commits that add and remove files all at once.

Readers of Parquet see `<column>=<value>/…/*.parquet` and nothing else. Everything else has a name
with an underscore: `_table-*.json` (the schema; the last one counts), `_staging` (files that Spark
is writing), `_commits`.

Invariant: a batch of a writer is in the table once, whenever a process is killed: Spark writes its
files where no reader looks, and `commits.py` moves them. Several writers may append at a time, each
under its own name; `replace` and `compact` are for one writer at a time. Compaction joins files of
one partition only, and leaves fewer than `FEW` small files alone: each is written once more.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.model.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock.spark.lake.commits import Commit, Commits, writer_name
from penstock.spark.lake.files import Files, exactly
from penstock.spark.lake.table_schema import TableSchema, check_added, fitted
from penstock.spark.sink import QUERY_ID

TARGET_BYTES = 128 << 20
REPLACE, COMPACT = "replace", "compact"
READ_TRIES = 20
FEW = 8
MOST_FILES = 2000
"""The most files of one commit. It bounds what the driver lists, and repeats if it dies."""

_ABOUT = "_table-*.json"
_STAGING = "_staging"
_BIN, _FILE = "_bin", "_file"
_TIMES = "spark.sql.parquet.outputTimestampType"

_decode = msgspec.json.Decoder(TableSchema).decode


@dataclass(frozen=True)
class Bin:
    """Files that become one."""

    names: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class StagedFiles:
    """Files that Spark has written, by name, and how many rows they have."""

    token: str
    folder: str
    names: tuple[str, ...]
    rows: int


class Table:
    """`files` is for tests."""

    def __init__(
        self,
        spark: SparkSession,
        path: str,
        schema: StructType,
        partition_by: tuple[str, ...] = (),
        *,
        files: Files | None = None,
    ) -> None:
        self.spark = spark
        self.path = path
        self.schema = schema
        self.partition_by = partition_by
        self._files = files or Files(spark, path)
        self._commits = Commits(self._files)
        self._data = "/".join([*(f"{column}=*" for column in partition_by), "*.parquet"])
        self._is_open = False

    # -- writing -------------------------------------------------------------------------------

    def append(self, frame: DataFrame, writer: str, batch: int) -> int:
        """Returns the number of rows added: 0 if this batch of the writer is there already."""
        return self.append_checked(frame, writer, batch, lambda _: None)

    def append_checked(
        self, frame: DataFrame, writer: str, batch: int, check: Callable[[DataFrame], None]
    ) -> int:
        """Appends like `append`, unless `check` raises, which receives the rows first."""
        self._open()
        self._commits.finish_all()
        name = writer_name(writer)
        query = self.spark.sparkContext.getLocalProperty(QUERY_ID) or ""
        last = self._commits.last(name)
        if last is not None:
            is_other = bool(query and last.query) and query != last.query
            if is_other or batch < last.batch:
                raise FailedPrecondition(
                    f"{self.path} has batch {last.batch} of {writer}, and this is batch {batch} of "
                    "another checkpoint. Nothing was written, because the rows may be there "
                    "already. Restore the checkpoint, or move both checkpoint and table away to "
                    "start again"
                )
            if batch == last.batch:
                if query:
                    # Spark updates the state of its aggregations only when the batch is computed.
                    frame.write.format("noop").mode("overwrite").save()
                return 0
        staged = self.stage(frame, name)
        check(self._rows_of(staged))
        return self.commit(staged, name, batch, query=query)

    def replace(self, frame: DataFrame, partitions: Sequence[Sequence[str]] | None = None) -> int:
        """Replaces all rows, or those of `partitions`, which are values of `partition_by`."""
        self._open()
        self._commits.finish_all()
        staged = self.stage(frame, REPLACE)
        old = self._committed()
        if partitions is not None:
            wanted = {tuple(values) for values in partitions}
            self._check_within(staged, wanted)
            old = [name for name in old if partition_of(name) in wanted]
        return self.commit(staged, REPLACE, self._commits.next_batch(REPLACE), old)

    def compact(self, target_bytes: int = TARGET_BYTES) -> int:
        """Joins small files of a partition. Returns how many files fewer there are."""
        if not self.exists():
            return 0
        self._open()
        self._commits.finish_all()
        gone = 0
        for bins in bins_of(self._files, self._committed(), target_bytes):
            staged, old = self.stage_joined(bins)
            self.commit(staged, COMPACT, self._commits.next_batch(COMPACT), old)
            gone += len(old) - len(staged.names)
        return gone

    def check(self) -> None:
        """Raises if an existing table has another schema, as writing to it would."""
        kept = stored_schema(self._files)
        if kept is not None:
            check_added(self.path, kept, self.schema, self.partition_by)

    def recover(self) -> None:
        """Finishes decided commits. All other methods do that first."""
        self._commits.finish_all()

    # -- reading -------------------------------------------------------------------------------

    def read(self) -> DataFrame:
        """Returns the committed rows; an empty frame with the schema if there are none. Older rows
        have nulls in columns that were added later."""
        kept = stored_schema(self._files)
        if kept is None:
            return self.spark.createDataFrame([], self.schema)
        check_added(self.path, kept, self.schema, self.partition_by, is_read=True)
        for _ in range(READ_TRIES):
            self._commits.finish_all()
            before = self._commits.state()
            # Spark lists the files now and reads them later.
            frame = self.spark.read.schema(self.schema).parquet(self._files.path())
            if self._commits.state() == before and all(one.is_done for one in before):
                return frame.select(*(F.col(f"`{name}`") for name in self.schema.names))
        raise Unavailable(f"{self.path} changes too fast to be listed; try again")

    def partitions(self) -> list[tuple[str, ...]]:
        """Returns the values of `partition_by` that have files, as text."""
        return sorted({partition_of(name) for name in self._files.find(self._data)})

    def exists(self) -> bool:
        return bool(self._files.find(_ABOUT))

    # -- the two halves of writing -------------------------------------------------------------

    def stage(self, frame: DataFrame, writer: str) -> StagedFiles:
        """Lets Spark write the rows where no reader looks. Each try has its own directory, because
        tasks of a killed driver may still be writing."""
        wanted = fitted(frame, self.path, self.schema)
        self._files.delete(f"{_STAGING}/{writer}")
        token = uuid.uuid4().hex[:8]
        folder = f"{_STAGING}/{writer}/{token}"
        self._files.make_dirs(folder)
        rows = self._write(wanted, self._files.path(folder))
        names = self._files.find(f"{folder}/{self._data}") if rows else []
        return StagedFiles(token, folder, tuple(sorted(names)), rows)

    def stage_joined(self, bins: Sequence[Bin]) -> tuple[StagedFiles, list[str]]:
        """Stages the rows of small files as larger ones. Returns these and the old names."""
        old = [name for each in bins for name in each.names]
        reader = self.spark.read.schema(self.schema).option("basePath", self._files.path())
        rows = reader.parquet(*(self._files.path(name) for name in old))
        return self.stage(joined(rows, bins), COMPACT), old

    def commit(
        self,
        staged: StagedFiles,
        writer: str,
        batch: int,
        removals: Sequence[str] = (),
        *,
        query: str = "",
    ) -> int:
        """Moves the staged files into the table and removes others, as this batch of the writer."""
        moves = [
            (name, _target(name.removeprefix(f"{staged.folder}/"), writer, batch, staged.token, at))
            for at, name in enumerate(staged.names)
        ]
        self._commits.make(Commit(writer, batch, staged.rows, moves, list(removals), query))
        self._files.delete(f"{_STAGING}/{writer}")
        return staged.rows

    # -- inside --------------------------------------------------------------------------------

    def _rows_of(self, staged: StagedFiles) -> DataFrame:
        if not staged.names:
            return self.spark.createDataFrame([], self.schema)
        return self.spark.read.schema(self.schema).parquet(self._files.path(staged.folder))

    def _write(self, frame: DataFrame, path: str) -> int:
        _write_plain_times(frame.sparkSession)
        seen = Observation()
        counted = frame.observe(seen, F.count(F.lit(1)).alias("rows"))
        counted.write.mode("append").partitionBy(*self.partition_by).parquet(path)
        return int(seen.get["rows"])

    def _open(self) -> None:
        """Makes the table, or checks that an existing one has the same schema or fewer columns."""
        if self._is_open:
            return
        kept = stored_schema(self._files)
        wanted = TableSchema.of(self.schema, self.partition_by)
        if kept is not None:
            check_added(self.path, kept, self.schema, self.partition_by)
        if kept is None or kept.schema != wanted.schema:
            self._files.make_dirs("")
            number = len(self._files.find(_ABOUT)) + 1
            name = _ABOUT.replace("*", f"{number:04}")
            self._files.write(name, msgspec.json.encode(wanted).decode())
        self._is_open = True

    def _committed(self) -> list[str]:
        """Returns the data files, without those of a commit that another process is making now."""
        found = self._files.find(self._data)
        moving = {to for commit in self._commits.pending() for _, to in commit.moves}
        return [name for name in found if name not in moving]

    def _check_within(self, staged: StagedFiles, wanted: set[tuple[str, ...]]) -> None:
        for name in staged.names:
            partition = partition_of(name.removeprefix(f"{staged.folder}/"))
            if partition not in wanted:
                raise InvalidArgument(
                    f"{self.path}: a row belongs to partition {'/'.join(partition)}, which is not "
                    "one of those to replace"
                )


def stored_schema(files: Files) -> TableSchema | None:
    """Returns the schema that the table in this directory has; None if there is no table."""
    names = files.find(_ABOUT)
    text = files.read(max(names)) if names else None
    return None if text is None else _decode(text)


def _write_plain_times(spark: SparkSession) -> None:
    """Writes times as microseconds in UTC, which every reader understands. Spark's default, INT96,
    is deprecated and has no statistics."""
    if spark.conf.get(_TIMES) == "INT96":
        spark.conf.set(_TIMES, "TIMESTAMP_MICROS")


def partition_of(name: str) -> tuple[str, ...]:
    """Returns the partition values in a file's path, as text."""
    return tuple(unquote(part.partition("=")[2]) for part in name.split("/")[:-1])


def _target(name: str, writer: str, batch: int, token: str, at: int) -> str:
    """Returns a name in the same partition that is never used again."""
    folder, slash, _ = name.rpartition("/")
    return f"{folder}{slash}part-{writer}-{batch:010}-{token}-{at:05}.parquet"


# -- compaction ------------------------------------------------------------------------------------


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
    """Packs small files of a partition into bins of up to `target_bytes`, unless they are few."""
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
