"""From the topic `orders`: a streaming table of its messages, and a view that is made of it.

One writer a table: each table here is filled by one function and by nothing else.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json
from pyspark.sql.functions import sum as total


@dp.table
def orders() -> DataFrame:
    """Grows with the topic: a run takes what has come since the last one."""
    stream = SparkSession.active().readStream.format("penstock").option("topic", "orders").load()
    order = from_json("value", "item string, count int")
    return stream.select("partition", "offset", "timestamp", "key", order.alias("order")).select(
        "partition", "offset", "timestamp", "key", "order.*"
    )


@dp.materialized_view
def totals() -> DataFrame:
    """Made anew by each run."""
    orders = SparkSession.active().read.table("orders")
    return orders.groupBy("item").agg(total(col("count")).alias("count"))
