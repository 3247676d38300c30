"""Pipelines and their runs: what they are, and the queries and jobs of a run. Knows no pipeline by
name.
"""
