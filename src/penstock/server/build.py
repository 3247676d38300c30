"""Which build this is. A release writes the commit in; a checkout does not know it."""

from __future__ import annotations

COMMIT = "unknown"
