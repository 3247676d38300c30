"""The names of the built-in pipelines, and of what they keep in a lake. Must not know Spark.

Each built-in pipeline is a module of this package with a `PIPELINE`.
"""

from __future__ import annotations

import hashlib
import re

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


def path_name(text: str, safe: str = "A-Za-z0-9.-", stripped: str = "-.") -> str:
    """Returns the text, if it can be part of a path. Otherwise it replaces the characters that are
    not safe, and adds a hash so that two texts never get the same name."""
    plain = re.sub(f"[^{safe}]+", "-", text).strip(stripped)[:80]
    if plain == text:
        return text
    return f"{plain}-{hashlib.blake2s(text.encode(), digest_size=4).hexdigest()}"
