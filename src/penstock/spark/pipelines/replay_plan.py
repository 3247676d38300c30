"""What a replay would do, in lines for the person who is about to do it.

Invariant: a line stays a line, whatever is in the messages. Must not know how it was found out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Row

from penstock.spark.pipelines.replays import Pending

SAMPLES = 5
SAMPLE_CHARS = 80


def plan(
    name: str,
    groups: Sequence[Row],
    samples: Sequence[Row],
    pending: Pending | None = None,
    limit: int | None = None,
) -> str:
    """What a replay would do, in lines."""
    left, done = sum(row.left for row in groups), sum(row.done for row in groups)
    lines = [f"replay {name}: a dry run, nothing is sent; apply=true sends"]
    if pending is not None:
        lines.append(f"  first, what an earlier run has left: {unfinished(pending)}")
    for row in groups:
        if row.left:
            times = f"{row['first']:%Y-%m-%d %H:%M:%S} to {row['last']:%Y-%m-%d %H:%M:%S}"
            lines.append(f"  {row.left} from {row.source_topic} to {row.target}, of {times}")
    if not left:
        lines.append("  no message is left to send")
    if done:
        lines.append(f"  {done} left out: sent before under this name, or selected already")
    if limit is not None and limit < left:
        lines.append(f"  limit: the first {limit} of {left}")
    lines += [f"  such as {_sample(row)}" for row in samples]
    return "\n".join(lines)


def _sample(row: Row) -> str:
    place = f"{row.source_topic}/{row.source_partition} @{row.source_offset}"
    words = [place, f"{row.source_timestamp:%Y-%m-%d %H:%M:%S}"]
    for name, said in (("key", row.key), ("run", row.run_id), ("error", row.dlq_last_error)):
        if said:
            words.append(f"{name}={_short(said)}")
    return " ".join([*words, f"value={_short(row.value)}"])


def _short(text: str) -> str:
    """On one line, whatever is in it."""
    shown = "".join(sign if sign.isprintable() else " " for sign in text[: SAMPLE_CHARS + 1])
    return shown if len(text) <= SAMPLE_CHARS else shown[: SAMPLE_CHARS - 1] + "…"


def unfinished(pending: Pending) -> str:
    return f"a selection of {pending.rows} messages to {', '.join(pending.targets)}"
