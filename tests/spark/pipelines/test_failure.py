"""What is said of a failure: Spark's and the connector's words, for who gives commands."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from penstock.model.errors import Unauthenticated, Unavailable
from penstock.spark.running.failure import describe_error


class WriteFailed(AnalysisException):
    """As Spark raises it when a disk is full."""

    _stackTrace = (  # noqa: N815 - PySpark's name
        "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows.\n"
        "\tat org.apache.spark.sql.Writer(Writer.scala:1)\n"
        "Caused by: org.apache.spark.SparkException: a task\n"
        "\tat org.apache.spark.Task(Task.scala:1)\n"
        "Caused by: java.io.IOException: No space left on device\n"
        "\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)\n"
    )


def test_the_root_of_what_spark_says_is_said_too():
    told = describe_error(WriteFailed("[TASK_WRITE_FAILED] Task failed while writing rows."))
    assert told == ("[TASK_WRITE_FAILED] Task failed while writing rows.: No space left on device")


def test_an_unknown_column_is_told_without_spark_s_plan_and_with_one_s_own_line(
    spark: SparkSession,
):
    with pytest.raises(AnalysisException) as failure:
        spark.range(1).select("vale")
    told, *where = describe_error(failure.value).splitlines()
    assert told.startswith("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column")
    assert told.endswith("SQLSTATE: 42703")
    at, code = where
    assert at.startswith(f'  File "{__file__}", line ')
    assert code.strip() == 'spark.range(1).select("vale")'


def test_advice_names_what_the_command_has():
    away = Unavailable("the broker is away; tried for 60 s (option retrySeconds)")
    assert describe_error(away) == "the broker is away; tried for 60 s"
    refused = Unauthenticated(
        "no token; set the option token, or PENSTOCK_TOKEN before Spark starts"
    )
    assert describe_error(refused) == "no token; give it with --token or PENSTOCK_TOKEN"
