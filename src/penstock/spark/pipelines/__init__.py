"""Pipelines: what flows through the broker, archived, traced, counted, grouped, replayed.

Each pipeline is a module: functions from DataFrames to DataFrames, and a `PIPELINE` that says what
it is called, which options it takes and how a run of it starts. A pipeline knows its tables and its
broker through its `Run` only. What a run is, is in `running/`; tables are in `lake/`; what starts,
watches and stops runs is in `launching/`.
"""

from __future__ import annotations

from penstock.spark.pipelines.user import pipeline

__all__ = ["pipeline"]
