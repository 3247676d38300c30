"""Pipelines and their runs: what they are, and a run's queries and jobs. Knows no pipeline."""
