"""So that Spark finds format("penstock") by itself: it looks into packages named pyspark_* for this
one name. Nothing else is here."""

from penstock.spark.datasource import PenstockDataSource as DefaultSource

__all__ = ["DefaultSource"]
