"""The names of the built-in pipelines, and of what they keep in a lake. Must not know Spark.

Each built-in pipeline is a module of this package with a `PIPELINE`.
"""

from __future__ import annotations

BUILT_IN = ("archive", "lineage", "metrics", "deadletters", "replay", "materialize", "route")

IN_THE_LAKE = (
    "records",
    "journal",
    "attempts",
    "steps",
    "runs",
    "critical_path",
    "metrics",
    "dead_letters",
    "replayed",
    "rejects",
    "timelines",
)
"""The tables, and the folder of timelines."""


def is_own_table(name: str) -> bool:
    """Returns whether a table of that name would collide with Penstock's own files in a lake.
    Readers of Parquet ignore names that begin with _ or a dot. Some file systems ignore case."""
    return name.startswith(("_", ".")) or name.lower() in IN_THE_LAKE
