"""Names that are Penstock's own: its pipelines, each a module of this package with a PIPELINE, and
what they keep in a lake. Must not know Spark.
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
"""Tables, and the folder of pictures."""


def is_own_table(name: str) -> bool:
    """Would a table of that name lie among what Penstock keeps in a lake? What begins so is no
    table, to it and to readers of Parquet; and some file systems do not tell letters' cases."""
    return name.startswith(("_", ".")) or name.lower() in IN_THE_LAKE
