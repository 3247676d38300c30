"""Names of topics, groups and owners: the rules, and how a name is read from a request."""

from __future__ import annotations

import re
from functools import lru_cache

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_NAME_BYTES
from penstock.model.scopes import DEFAULT_SCOPE, Scope, beside, full_name, plain_name

DLQ_PREFIX = "dlq."
ARCHIVE_GROUP = "archive"
"""The group whose progress says how far a topic is archived."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def clean_name(raw: str | None, what: str) -> str:
    """Returns the trimmed name, or raises InvalidArgument, which says what is wrong with it."""
    if raw and len(raw) > MAX_NAME_BYTES:
        return _clean(raw.strip(), what)
    return _remembered(raw or "", what)


def full_name_in(scope: Scope, raw: str | None, what: str = "topic") -> str:
    """Returns the full name of a topic or producer that a request names plainly, or raises as
    `clean_name` does. All full names that come from requests are made here."""
    name = clean_name(raw, what)
    return name if scope is DEFAULT_SCOPE else full_name(scope, name)


def _clean(raw: str, what: str) -> str:
    name = raw.strip()
    if not name:
        raise InvalidArgument(f"{what} is required")
    # The name of a dead-letter topic is its source's plus the prefix, so it may be longer.
    limit = MAX_NAME_BYTES + (len(DLQ_PREFIX) if name.startswith(DLQ_PREFIX) else 0)
    if len(name) > limit or (not name.isascii() and len(name.encode()) > limit):
        raise InvalidArgument(f"{what} is longer than {MAX_NAME_BYTES} bytes")
    if not name.isprintable() and _CONTROL.search(name):
        raise InvalidArgument(f"{what} has control characters in it")
    return name


_remembered = lru_cache(4096)(_clean)


def dead_letter_topic(topic: str) -> str:
    """Takes and returns a full name: the dead letters of a topic are in its own namespace."""
    return beside(topic, DLQ_PREFIX + plain_name(topic))


def is_dead_letter_topic(topic: str) -> bool:
    return plain_name(topic).startswith(DLQ_PREFIX)
