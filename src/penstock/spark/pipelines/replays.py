"""A replay under its name: what it has sent, what it will send, and the sending.

It has four steps. A selection is stored in the lake, with a name for the broker; its chunks are
written to the broker as batches under that name; its rows are added to the table `replayed`; the
selection is removed. A run that is killed between two steps leaves the selection. The next run
finds it, asks the broker for the last chunk it has, and continues after it.

Invariant: a message goes to a target once under one name. What is sent is fixed before the first
chunk, and nothing new is selected while a selection is there. Only one run of a name at a time. In
any span of time, at most the rows that the rate allows are sent, and one chunk more.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.errors import FailedPrecondition
from penstock.spark.broker import BrokerConnection
from penstock.spark.lake.files import Files
from penstock.spark.lake.table import Table
from penstock.spark.pipelines.selection import IDENTITY, POSITION, SELECTED, in_chunks, without
from penstock.spark.pipelines.targets import as_sent, partitions_of
from penstock.spark.running.run import Run
from penstock.spark.schemas import LONG, STRING, TIMESTAMP, struct
from penstock.spark.staging import ProducerBatch

TABLE = "replayed"
FOLDER = "_replays"

MAX_CHUNK_ROWS = 1_000_000
"""The largest chunk without a rate: the broker stages a chunk as a whole on its disk."""

SCHEMA = struct({"name": STRING, **POSITION, "target": STRING, "at": TIMESTAMP, "batch": LONG})


@dataclass(frozen=True)
class Pending:
    """A stored selection; none of its rows are in the table `replayed`."""

    batch: int
    rows: int
    chunks: int
    chunk_rows: int
    txn: str
    targets: tuple[str, ...]


class Pace:
    """Limits the rate to rows a second; None means as fast as possible.

    The pause is counted from the end of a chunk's write: counted from its beginning, a slow write
    and a fast one could follow each other too closely. Lost time is not made up for by a burst.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._next = -math.inf

    @property
    def chunk_rows(self) -> int:
        """The rows of about one second."""
        if self._rate is None:
            return MAX_CHUNK_ROWS
        return min(MAX_CHUNK_ROWS, max(1, round(self._rate)))

    def await_pause(self) -> None:
        """Waits until the next chunk may be written."""
        pause = self._next - self._clock()
        if pause > 0:
            self._sleep(pause)

    def written(self, rows: int) -> None:
        """Starts the pause after a chunk of `rows`."""
        if self._rate is not None:
            self._next = self._clock() + rows / self._rate


class Replay:
    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self._run = run
        self._batch: int | None = None

    def done(self) -> DataFrame:
        """Returns the identities that were sent under this name, or are about to be."""
        sent = self._ledger().read().filter(F.col("name") == self.name).select(*IDENTITY)
        return sent.unionByName(self._selection(self._next()).read().select(*IDENTITY))

    def pending(self) -> Pending | None:
        """Returns the unfinished selection, if there is one."""
        batch = self._next()
        table = self._selection(batch)
        if not table.exists():
            return None
        found = table.read().agg(
            F.count("*").alias("rows"),
            (F.max("chunk") + 1).alias("chunks"),
            F.count_if(F.col("chunk") == 0).alias("chunk_rows"),
            F.collect_set("txn").alias("txns"),
            F.collect_set("target").alias("targets"),
        )
        row = found.collect()[0]
        if not row.rows:
            return None
        if len(row.txns) > 1:
            raise FailedPrecondition(
                f"{table.path} is the selection of two runs of replay {self.name} at a time; "
                "nothing of it was sent. Stop both, remove it, and start one of them again"
            )
        targets = tuple(sorted(row.targets))
        return Pending(batch, row.rows, row.chunks, row.chunk_rows, row.txns[0], targets)

    def select(self, rows: DataFrame, pace: Pace, limit: int | None) -> Pending | None:
        """Stores the rows that were not sent yet, if any. Only if nothing is pending."""
        batch = self._next()
        # The last may be sent and not yet removed; the next may be incomplete or empty.
        for old in (batch - 1, batch):
            self._remove(old)
        # A new name, because the lake may be removed and made again: under the old name the broker
        # would take the first chunks for repetitions.
        txn = f"replay-{self.name}-{batch}-{uuid.uuid4().hex[:12]}"
        fresh = without(rows, self.done())
        chunks = in_chunks(fresh, pace.chunk_rows, txn, limit)
        if self._selection(batch).append(chunks, "selection", 0):
            return self.pending()
        self._remove(batch)
        return None

    def send(self, pending: Pending, pace: Pace) -> int:
        """Sends the chunks that the broker does not have, and returns their number of rows."""
        partitions = partitions_of(self._run.broker, pending.targets)
        rows = self._selection(pending.batch).read()
        first = self._last_chunk(pending) + 1
        for chunk in range(first, pending.chunks):
            pace.await_pause()
            of_chunk = rows.filter(F.col("chunk") == chunk).orderBy("number")
            sent = as_sent(of_chunk, "target", partitions, datetime.now(UTC))
            self._run.write(sent, pending.txn, txnBatch=chunk)
            pace.written(pending.chunk_rows)
        self._note(rows, pending)
        self._batch = pending.batch + 1
        self._remove(pending.batch)
        return max(0, pending.rows - first * pending.chunk_rows)

    # -- inside --------------------------------------------------------------------------------

    def _ledger(self) -> Table:
        return self._run.lake.table(TABLE, SCHEMA)

    def _selection(self, batch: int) -> Table:
        return self._run.lake.table(f"{FOLDER}/{self.name}/{batch}", SELECTED)

    def _next(self) -> int:
        """Returns the number of the selection that is stored, or will be next."""
        if self._batch is None:
            of_name = self._ledger().read().filter(F.col("name") == self.name)
            last = of_name.agg(F.max("batch")).collect()[0][0]
            self._batch = 0 if last is None else int(last) + 1
        return self._batch

    def _last_chunk(self, pending: Pending) -> int:
        """Returns the last chunk that the broker has committed; -1 before the first."""
        with BrokerConnection(self._run.broker) as broker:
            return ProducerBatch(broker, pending.txn, 0).last_committed()

    def _note(self, rows: DataFrame, pending: Pending) -> None:
        noted = rows.select(
            F.lit(self.name).alias("name"),
            *IDENTITY,
            F.current_timestamp().alias("at"),
            F.lit(pending.batch).cast("long").alias("batch"),
        )
        self._ledger().append(noted, f"replay-{self.name}", pending.batch)

    def _remove(self, batch: int) -> None:
        Files(self._run.spark, self._run.lake.path).delete(f"{FOLDER}/{self.name}/{batch}")
