"""Moments as people say them: a time, or how long ago it was."""

from __future__ import annotations

from datetime import datetime, timedelta

from penstock.model.units import parse_duration_ms

Moment = datetime | timedelta
"""How long ago is reckoned when a run begins, not when the option is read."""


def read_moment(text: str) -> Moment:
    """A bare number may be anything, and a time without a zone several moments."""
    ms = parse_duration_ms(text)
    if ms is not None and not text.strip().isdigit():
        return timedelta(milliseconds=ms)
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        raise ValueError(text)
    return moment


def moment_at(moment: Moment | None, now: datetime) -> datetime | None:
    return now - moment if isinstance(moment, timedelta) else moment
