"""Pipelines: what flows through the broker, archived, traced, counted, grouped, replayed.

Each pipeline is a module: functions from DataFrames to DataFrames, and a `PIPELINE` that says what
it is called, which options it takes and how a run of it starts. A pipeline knows its tables and its
broker through its `Run` only; what starts, watches and stops runs knows no pipeline.
"""

from __future__ import annotations

from penstock.spark.pipelines.user import pipeline

__all__ = ["pipeline"]
