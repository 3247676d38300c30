"""Starts runs from commands: finds pipelines, starts Spark, handles signals, keeps the register."""
