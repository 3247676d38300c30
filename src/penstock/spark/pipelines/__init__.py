"""The pipelines: they archive, trace, count, group, replay, materialize and route messages.

Each pipeline is a module: functions from DataFrames to DataFrames, and a `PIPELINE` with its name,
its options and how a run of it starts. A pipeline reaches its tables and its broker only through
its `Run`. `running/` defines runs, `lake/` tables, and `launching/` starts, watches and stops runs.
"""

from __future__ import annotations

from penstock.spark.pipelines.user import pipeline

__all__ = ["pipeline"]
