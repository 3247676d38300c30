"""A streaming table of the messages in the topic `orders`, and a view on that table.

Use one writer per table: one function fills each table here, and nothing else does.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json
from pyspark.sql.functions import sum as total


@dp.table
def orders() -> DataFrame:
    """Grows with the topic: each run adds the messages since the last one."""
    stream = SparkSession.active().readStream.format("penstock").option("topic", "orders").load()
    order = from_json("value", "item string, count int")
    return stream.select("partition", "offset", "timestamp", "key", order.alias("order")).select(
        "partition", "offset", "timestamp", "key", "order.*"
    )


@dp.materialized_view
def totals() -> DataFrame:
    """Recomputed by each run."""
    orders = SparkSession.active().read.table("orders")
    return orders.groupBy("item").agg(total(col("count")).alias("count"))
