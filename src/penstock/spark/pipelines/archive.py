"""The archive: every message and every row of the journal in the lake, each once.

The table `records` is partitioned by topic and date, the table `journal` by date. They have the
columns of format("penstock") and `date`, the day of `timestamp` in UTC. Invariant: a row is in its
table once. The progress of the group `archive`, of a topic or of the journal, covers only archived
rows: with `after_archive` the broker keeps what is not archived. A run for one tenant says nothing
about the journal, which has the rows of all. A deleted topic does not stop the
archive of the others; rows that retention removed before they were archived do.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import DateType, StructField, StructType

from penstock.model.errors import FailedPrecondition
from penstock.model.names import ARCHIVE_GROUP
from penstock.model.options import TEXT, TRUE_OR_FALSE, Option
from penstock.spark.bounds import LogName
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.running.pipeline import Pipeline, data_loss_option, max_rows_option
from penstock.spark.running.run import Run, WriteBatch
from penstock.spark.schemas import schema_of

MAX_ROWS = 1_000_000
COMPACT_EVERY = 20
"""The number of batches between two compactions in a continuous run."""

RECORDS, JOURNAL = "records", "journal"


def records_table(lake: Lake) -> Table:
    return lake.table(RECORDS, _dated("records"), ("topic", "date"))


def journal_table(lake: Lake) -> Table:
    return lake.table(JOURNAL, _dated("journal"), ("date",))


def archived(run: Run, table: Table) -> DataFrame:
    """Returns the rows of a table that the archive must have made before."""
    if not table.exists():
        raise FailedPrecondition(_no_archive(run, table))
    return table.read()


def is_awaited(run: Run, table: Table) -> bool:
    """Returns whether to wait for the archive, whose first batch another run may be making."""
    if run.once or table.exists():
        return False
    run.report(f"{run.name}: {_no_archive(run, table)}")
    return True


def _no_archive(run: Run, table: Table) -> str:
    return (
        f"the lake {run.lake.path} has no table {table.path.rpartition('/')[2]}; "
        "`penstock pipeline run archive` makes it; from=broker does not need it"
    )


def _dated(log: LogName) -> StructType:
    return StructType([*schema_of(log).fields, StructField("date", DateType())])


def dated(rows: DataFrame) -> DataFrame:
    """Adds the partition column `date`."""
    return rows.withColumn("date", utc_date(F.col("timestamp")))


def utc_date(moment: Column) -> Column:
    """Returns the day in UTC: a row must not change its partition with the session's time zone."""
    return F.date_from_unix_date(F.floor(F.unix_seconds(moment) / 86_400).cast("int"))


def start(run: Run) -> None:
    settings = run.settings
    options: dict[str, Any] = {
        "group": ARCHIVE_GROUP,
        "maxRowsPerTrigger": settings["max_rows"],
        "failOnDataLoss": settings["fail_on_data_loss"],
    }
    tables = [records_table(run.lake)]
    records = run.stream(topic=settings["topics"], failOnDeletedTopic=False, **options)
    run.start(RECORDS, records, _into(run, tables[0], RECORDS))
    if settings["journal"]:
        tables.append(journal_table(run.lake))
        if run.broker.named_scope():
            # The broker has one archived position for all tenants, and these are the rows of one.
            options = {name: value for name, value in options.items() if name != "group"}
        journal = run.stream(log="journal", **options)
        run.start(JOURNAL, journal, _into(run, tables[1], JOURNAL))
    if settings["compact"] and run.once:
        run.repeat("compact", lambda: sum(table.compact() for table in tables))


def _into(run: Run, table: Table, query: str) -> WriteBatch:
    is_compacted = run.settings["compact"] and not run.once

    def write(frame: DataFrame, batch: int) -> None:
        table.append(dated(frame), f"{run.name}-{query}", batch)
        if is_compacted and batch % COMPACT_EVERY == COMPACT_EVERY - 1:
            table.compact()

    return write


PIPELINE = Pipeline(
    name="archive",
    summary="Topics and journal into the lake, by topic and date",
    start=start,
    options=(
        Option(
            "topics",
            TEXT.described("a topic, several with commas between, or a pattern"),
            "the topics to archive",
            "*",
        ),
        Option("journal", TRUE_OR_FALSE, "archive the journal too", "true"),
        max_rows_option(MAX_ROWS),
        Option("compact", TRUE_OR_FALSE, "join small files", "true"),
        data_loss_option("archived"),
    ),
)
