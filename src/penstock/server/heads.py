"""Heads that were understood before: the same bytes again need no parser.

A client that asks often sends one head over and over, and parsing it costs more than answering
it. Invariant: only bytes that the parser took for the head of one ordinary request (welcome, to be
kept alive, its body's length told) are kept, and they stand for exactly that request. Whatever is
not byte for byte the same, or comes in parts, is the parser's.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.model.limits import KIB
from penstock.server.gate import Verdict
from penstock.server.requests import Request

MAX_HEADS = 4096
MAX_HEAD_BYTES = 2 * KIB
"""Together they bound what is kept: 8 MiB."""

_END = b"\r\n\r\n"


class Ordinary(NamedTuple):
    """What the parser made of an ordinary request's head."""

    method: bytes
    target: bytes
    verdict: Verdict


class _Known(NamedTuple):
    method: bytes
    path: bytes
    query: bytes
    wants_events: bool
    content_length: int


class KnownHeads:
    def __init__(self) -> None:
        self._heads: dict[bytes, _Known] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def request_at(self, data: bytes, start: int) -> tuple[Request, int] | None:
        """The request that begins there and where it ends, if all of it is there and its head
        known."""
        body = data.find(_END, start) + len(_END)
        known = self._heads.get(data[start:body])
        if known is None or len(data) < (end := body + known[4]):
            return None
        return Request(known[0], known[1], known[2], known[3], data[body:end]), end

    def keep(self, data: bytes, first: Ordinary | None) -> None:
        """What `data` begins with, if that is ordinary and its head and body are whole."""
        if first is None:
            return
        method, target, verdict = first
        end = data.find(_END) + len(_END)
        is_whole = len(data) >= end + verdict.content_length and end <= MAX_HEAD_BYTES
        # Blank lines before a request are skipped by the parser; the end found is then not its own.
        if not is_whole or not data.startswith(b"%b %b HTTP/1.1\r\n" % (method, target)):
            return
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        path, _, query = target.partition(b"?")
        self._heads[data[:end]] = _Known(
            method, path, query, verdict.wants_events, verdict.content_length
        )
