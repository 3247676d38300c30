"""A session that runs already is used as it is."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.spark import session


def test_a_session_that_is_there_is_kept_as_it_is(spark: SparkSession):
    before = dict(spark.sparkContext.getConf().getAll())
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        again = session("another", "local[7]", {"spark.sql.ansi.enabled": True})
        assert again.sparkContext is spark.sparkContext
        assert dict(again.sparkContext.getConf().getAll()) == before
        assert again.conf.get("spark.sql.session.timeZone") == "Europe/Berlin"
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
