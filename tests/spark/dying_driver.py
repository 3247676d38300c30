"""A driver of its own that copies a topic and may be killed right after the sink's commit.

Arguments: the broker's address, source, target, checkpoint, and `die` or `live`.
"""

from __future__ import annotations

import os
import signal
import sys

from penstock.spark import session
from tests.spark.faults import nothing, register_faulty


def main(url: str, source: str, target: str, checkpoint: str, fate: str) -> None:
    spark = session("dying-driver")
    driver = os.getpgrp()

    def end_all() -> None:
        os.killpg(driver, signal.SIGKILL)

    name = register_faulty(spark, "dying", after_commit=end_all if fate == "die" else nothing)
    (
        spark.readStream.format("penstock")
        .options(url=url, topic=source, group="copy")
        .load()
        .select("key", "value")
        .writeStream.format(name)
        .options(url=url, topic=target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
