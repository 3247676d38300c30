"""ETags of cache entries, and the conditions If-Match and If-None-Match.

An entry's ETag is its version in quotes, `"17"`. Must not know connections.
"""

from __future__ import annotations

import re

from penstock.model.caching import Precondition
from penstock.model.errors import InvalidArgument
from penstock.server.http.requests import Notes

_TAG = re.compile(rb'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_VERSION = re.compile(rb"[1-9][0-9]{0,18}")

_NEVER = -1
"""A version that no key has, for tags that are no version, such as those of another server."""


def etag_head(version: int) -> bytes:
    return b'etag: "%d"\r\n' % version


def precondition_of(notes: Notes) -> Precondition | None:
    """The conditions in the request's headers; None if there are none."""
    if notes.if_match is None and notes.if_none_match is None:
        return None
    return Precondition(
        # A weak tag only says that two values are equivalent, which is not enough to change one.
        None if notes.if_match is None else _versions(notes.if_match, "If-Match", weak=False),
        None
        if notes.if_none_match is None
        else _versions(notes.if_none_match, "If-None-Match", weak=True),
    )


def _versions(header: bytes, name: str, *, weak: bool) -> frozenset[int]:
    """The versions that the header names; empty for `*`."""
    if header.strip() == b"*":
        return frozenset()
    tags = [tag.strip() for tag in header.split(b",")]
    found = [_TAG.fullmatch(tag) for tag in tags if tag]
    if not found or None in found:
        raise InvalidArgument(f'{name} takes * or ETags in quotes, as "17"')
    return frozenset(
        int(tag[2]) if _VERSION.fullmatch(tag[2]) and (weak or not tag[1]) else _NEVER
        for tag in found
        if tag is not None
    )
