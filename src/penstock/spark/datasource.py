"""The entry point of format("penstock"), made on the driver for every read and write.

Options are read when Spark asks for a reader or a writer. So a wrong option fails its own query, by
name, before anything is read or written.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.spark.options import CacheSettings, SinkSettings, SourceSettings, reads_cache
from penstock.spark.schemas import cache_schema, schema_of


class PenstockDataSource(DataSource):
    """Reads topics, durable streams and the journal of a broker as tables and streams, and caches
    as tables; writes to topics, durable streams and caches.

    >>> spark.read.format("penstock").option("topic", "orders").load()
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        if reads_cache(self.options):
            return cache_schema(CacheSettings.from_options(self.options).columns)
        settings = SourceSettings.from_options(self.options)
        return schema_of(settings.log, settings.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.pushdown import PushdownReader
        from penstock.spark.source import BatchReader

        if reads_cache(self.options):
            from penstock.spark.cache_source import CacheReader

            return CacheReader(CacheSettings.from_options(self.options, "read"), schema)
        settings = SourceSettings.from_options(self.options, "read")
        kind = PushdownReader if settings.pushdown else BatchReader
        return kind(settings, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from penstock.spark.source import StreamReader

        if reads_cache(self.options):
            CacheSettings.from_options(self.options, "readStream")
        return StreamReader(SourceSettings.from_options(self.options, "readStream"), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import BatchSink

        return BatchSink(SinkSettings.from_options(self.options, "write"), schema, overwrite)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from penstock.spark.sink import StreamSink

        return StreamSink(SinkSettings.from_options(self.options, "writeStream"), schema, overwrite)
