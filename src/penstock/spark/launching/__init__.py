"""Starts runs from commands: finds the pipelines, starts Spark, handles signals, shows progress,
and keeps the register of runs.
"""
