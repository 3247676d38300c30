"""Penstock: a durable broker for agent and data workflows, and the pipeline behind it."""

__version__ = "0.1.0"
