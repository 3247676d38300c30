"""Durable bytes: the log, its segments, recovery and the offline tools. Knows no queue semantics."""
