"""Durable bytes: the log, its segments, recovery, the offline tools. Knows no queue semantics."""
