"""Spark and the broker: format("penstock") for reading and writing, and a session that has it.

    from penstock.spark import session

    spark = session()
    spark.read.format("penstock").option("topic", "orders").load().show()

The driver plans, the executors read and write. Both call the broker over HTTP, and both need this
package installed. Spark itself is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.datasource import PenstockDataSource
    from penstock.spark.pipelines.user import pipeline
    from penstock.spark.progress import follow
    from penstock.spark.sessions import session

_HOMES = {
    "PenstockDataSource": "penstock.spark.datasource",
    "follow": "penstock.spark.progress",
    "pipeline": "penstock.spark.pipelines.user",
    "session": "penstock.spark.sessions",
}

__all__ = ["PenstockDataSource", "follow", "pipeline", "session"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        error.add_note("Spark comes with: pip install 'penstock[spark]'")
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
