"""The callback that every command takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.model.errors import PenstockError

T = TypeVar("T")

Done = Callable[[T | PenstockError], None]
"""Receives the outcome of a command, or the PenstockError that refused it. The engine calls it
once, on the event loop, and never before what the outcome says is durable."""
