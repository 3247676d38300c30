"""The head of an owner's answer, and what of it goes on to the client.

Invariants: headers about the connection to the owner stay here. Those that allow pages of other
origins are made by the broker that the client reached, so the owner's stay here too. Must not know
connections.
"""

from __future__ import annotations

import re

import msgspec

from penstock.server.http.responses import STATUS_LINES

OWNER_HEADER = b"x-penstock-owner"
"""Marks the refusal of a forwarded request by a broker that is not the owner: it was not executed.
Names the owner that this broker knows, or is `-`."""

_STAY = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade",
        b"transfer-encoding", b"content-length", b"proxy-authenticate",
        b"access-control-allow-origin", b"access-control-allow-credentials",
        b"access-control-expose-headers",
    }
)  # fmt: skip

PLAIN = re.compile(
    rb"HTTP/1\.1 (2\d\d|4\d\d) [A-Za-z -]+\r\n"
    rb"(?:(?:date|content-type|x-request-id|etag|retry-after|penstock-[a-z]+): [^\r\n]*\r\n)*+"
    rb"(?:content-length: (\d{1,5})\r\n)?\r\n"
)
"""The answers to most requests. They go on as they are, if the client's connection stays open."""

Headers = list[tuple[bytes, bytes]]


class OwnerAnswerHead(msgspec.Struct, frozen=True):
    """`length` of the body; None if it comes in chunks. `is_misdirected`: not the owner's."""

    status: int
    headers: Headers
    length: int | None
    closes: bool
    is_misdirected: bool

    def lines(self) -> bytes:
        """Returns the status line and the headers that go on."""
        first = STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        return first + b"".join([b"%b: %b\r\n" % header for header in self.headers])

    def lines_with_length(self) -> bytes:
        if self.status in (204, 304):
            return self.lines()
        return b"%bcontent-length: %d\r\n" % (self.lines(), self.length or 0)

    def content_type(self) -> bytes:
        found = [value for name, value in self.headers if name == b"content-type"]
        return found[0] if found else b""


class BadAnswer(Exception):
    """The owner's answer is not one that a broker gives."""


def read_head(status: int, headers: Headers, *, is_bodyless: bool, closes: bool) -> OwnerAnswerHead:
    """Takes names in lower case. `is_bodyless`: the request was HEAD, so no body follows."""
    lengths = [value.strip() for name, value in headers if name == b"content-length"]
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    length = _length_of(status, lengths, codings)
    if is_bodyless:
        length = length or 0
    going = [each for each in headers if each[0] not in _STAY and each != (b"vary", b"origin")]
    is_misdirected = status == 503 and any(name == OWNER_HEADER for name, _ in headers)
    return OwnerAnswerHead(status, going, length, closes, is_misdirected)


def _length_of(status: int, lengths: list[bytes], codings: list[bytes]) -> int | None:
    if status in (204, 304) and not codings:
        return 0
    if codings == [b"chunked"] and not lengths:
        return None
    if not codings and len(lengths) == 1 and re.fullmatch(rb"[0-9]{1,19}", lengths[0]):
        return int(lengths[0])
    raise BadAnswer("its answer does not say where it ends")
