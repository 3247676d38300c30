"""Penstock: a durable broker for agent and data workflows, and the pipelines that read from it.

The version is written here only; the package's metadata is built from it.
"""

__version__ = "0.1.0"
