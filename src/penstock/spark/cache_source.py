"""Reads a cache as a table: one task, with all entries as of one moment.

Spark makes a reader on the driver for every batch query and sends it to its only task. Invariant: a
table has the entries of one snapshot, or the read fails. A snapshot that breaks off cannot be
continued, since the next one is of another moment: so the task fails, and Spark runs it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.client.calls import segment
from penstock.model.errors import PenstockError, Unavailable
from penstock.spark.broker import BrokerConnection
from penstock.spark.existence import check_exists
from penstock.spark.options import CacheSettings
from penstock.spark.schemas import CACHE_COLUMNS, check_columns


class CacheReader(DataSourceReader):
    """spark.read.format("penstock").option("cache", "sessions")"""

    def __init__(self, settings: CacheSettings, schema: StructType) -> None:
        check_columns("a cache", CACHE_COLUMNS, schema)
        self._settings = settings
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        check_exists(self._settings, "cache", self._settings.cache)
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads the entries. Spark calls this in the task."""
        tenant, namespace, cache = map(segment, self._settings.cache.split("/"))
        path = f"/v1/tenants/{tenant}/namespaces/{namespace}/caches/{cache}/entries"
        # Without any column, as for a count, the keys say how many rows there are.
        query: dict[str, str | int] = {"columns": ",".join(self._schema.names) or "key"}
        schema = to_arrow_schema(self._schema, timezone="UTC")
        with BrokerConnection(self._settings) as broker:
            for batch in _entries(broker, path, query):
                columns = [batch.column(name) for name in schema.names]
                if columns:
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
                else:
                    yield batch


def _entries(
    broker: BrokerConnection, path: str, query: dict[str, str | int]
) -> Iterator[pa.RecordBatch]:
    """Waits for a broker that is away, until the first entries have arrived."""
    retry_time = broker.retry_time()
    has_begun = False
    while True:
        try:
            with broker.rows(path, query) as stream:
                for batch in stream:
                    has_begun = True
                    yield batch
            return
        except PenstockError as error:
            if has_begun:
                raise Unavailable(
                    f"the snapshot of the cache broke off, and the next one would be of another "
                    f"moment; read it again ({error})"
                ) from error
            retry_time.wait_after(error)
