"""Sizes and durations as people write them, `64MB` and `7d`, and the size of a text."""

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
    """Bytes; a unit is a power of 1024. None if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * _SIZES[(found[2] or "").lower()] if found else None


def parse_duration_ms(text: str) -> int | None:
    """Milliseconds, which a bare number is already. None if it is no duration."""
    found = _DURATION.fullmatch(text.strip())
    return int(found[1]) * _DURATIONS[found[2] or ""] if found else None


def format_duration(ms: int) -> str:
    """The shortest exact way to write it."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _DURATIONS[unit] == 0:
            return f"{ms // _DURATIONS[unit]}{unit}"
    return f"{ms}ms"


def utf8_bytes(text: str) -> int:
    """The UTF-8 length of `text`, without encoding it if it is ASCII."""
    return len(text) if text.isascii() else len(text.encode())
