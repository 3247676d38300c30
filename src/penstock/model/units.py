"""Parses and formats sizes and durations such as `64MB` and `7d`; measures texts in bytes."""

from __future__ import annotations

import re

from penstock.model.limits import GIB, KIB, MIB

_SIZE = re.compile(r"(\d{1,15})\s*(B|KB|KiB|MB|MiB|GB|GiB|TB|TiB)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,15})\s*(ms|s|m|h|d)?")
_SIZES = {
    "": 1,
    "b": 1,
    "kb": KIB,
    "kib": KIB,
    "mb": MIB,
    "mib": MIB,
    "gb": GIB,
    "gib": GIB,
    "tb": 1024 * GIB,
    "tib": 1024 * GIB,
}
_DURATIONS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_size(text: str) -> int | None:
    """Returns bytes, or None if the text is not a size. Units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * _SIZES[(found[2] or "").lower()] if found else None


def parse_duration_ms(text: str) -> int | None:
    """Returns milliseconds, or None if the text is not a duration. A number without a unit is
    milliseconds."""
    found = _DURATION.fullmatch(text.strip())
    return int(found[1]) * _DURATIONS[found[2] or ""] if found else None


def format_duration(ms: int) -> str:
    """Returns the shortest exact text for the duration."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _DURATIONS[unit] == 0:
            return f"{ms // _DURATIONS[unit]}{unit}"
    return f"{ms}ms"


def utf8_bytes(text: str) -> int:
    """Returns the UTF-8 length of `text`, without encoding it if it is ASCII."""
    return len(text) if text.isascii() else len(text.encode())
