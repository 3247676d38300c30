"""The headers of a request, sorted by their use, and the verdict on them.

A request whose end two readers could see in different places is ambiguous, and refused (request
smuggling).
"""

from __future__ import annotations

import re

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_REQUEST_ID_CHARS
from penstock.server.http.forwarded_head import VIA_HEADER
from penstock.server.http.requests import NO_NOTES, Notes
from penstock.server.http.scope_headers import SCOPE_HEADERS

_PRINTABLE = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_LENGTH = re.compile(rb"[0-9]{1,19}")

_NOTED = frozenset(
    {b"accept", b"if-match", b"if-none-match", b"last-event-id", b"access-control-request-method"}
)
"""Headers that the answer depends on. The values of a repeated one are joined with commas."""

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, values as the parser reported them."""


class RequestVerdict(msgspec.Struct):
    """The meaning of a request's headers and HTTP version.

    `content_length` is 0 without that header. `is_ambiguous`: it is not clear where the body ends.
    `until_ms`: from this time on the same headers may mean something else; 0 for never.
    `is_of_connection`: they may mean something else on another connection.
    """

    request_id: bytes = b""
    content_length: int = 0
    is_chunked: bool = False
    is_ambiguous: bool = False
    expects_continue: bool = False
    is_cross_site: bool = False
    notes: Notes = NO_NOTES
    refusal: PenstockError | None = None
    cross_site_refusal: PenstockError | None = None
    until_ms: int = 0
    is_of_connection: bool = False

    def is_preflight(self, method: bytes) -> bool:
        return method == b"OPTIONS" and self.notes.is_preflight

    def is_welcome(self) -> bool:
        """Returns whether nothing is refused on any path, and no 100 Continue is due."""
        refusals = (self.refusal, self.notes.token_refusal, self.cross_site_refusal)
        return refusals == (None, None, None) and not self.expects_continue

    def has_body(self) -> bool:
        """Returns whether bytes of the request may follow its head."""
        return self.content_length > 0 or self.is_chunked or self.is_ambiguous


class SortedHeaders:
    """The headers of one request, sorted by their use. `size` is that of all names and values.

    `verdict` is the beginning of a verdict: the members that need only the headers.
    """

    __slots__ = (
        "_codings",
        "_lengths",
        "all",
        "credentials",
        "hosts",
        "noted",
        "origin",
        "scoping",
        "size",
        "verdict",
        "via",
    )

    def __init__(self, headers: Headers) -> None:
        self.all = headers
        self.verdict = verdict = RequestVerdict()
        self.hosts: list[bytes] = []
        self.origin: bytes | None = None
        self.credentials: list[bytes] = []
        self.noted: dict[bytes, bytes] = {}
        self.scoping: Headers = []
        self.via = b""
        self._lengths: list[bytes] = []
        self._codings: list[bytes] = []
        noted = self.noted
        size = 0
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"host":
                self.hosts.append(value)
            elif name == b"origin":
                self.origin = value
            elif name == b"authorization":
                self.credentials.append(value)
            elif name == b"content-length":
                self._lengths.append(value)
            elif name == b"transfer-encoding":
                self._codings.append(value)
            elif name in _NOTED:
                noted[name] = noted[name] + b", " + value if name in noted else value
            elif name in SCOPE_HEADERS:
                self.scoping.append((name, value))
            elif name == VIA_HEADER:
                self.via = value.strip() or b"?"
            else:
                _note(verdict, name, value)
        self.size = size

    def read_framing(self, http_version: str) -> PenstockError | None:
        """Notes where the body ends, and refuses a request that leaves it open. The parser is
        strict as well; the connection compares both when the body has come."""
        verdict, lengths, codings = self.verdict, self._lengths, self._codings
        if not lengths and not codings:
            return None
        if not codings and len(lengths) == 1:
            length = lengths[0].strip(b" \t")
            if _LENGTH.fullmatch(length):
                verdict.content_length = int(length)
                return None
        elif not lengths and http_version != "1.0" and _is_chunked(codings):
            verdict.is_chunked = True
            return None
        verdict.is_ambiguous = True
        if codings and lengths:
            return InvalidArgument("Content-Length and Transfer-Encoding exclude each other")
        if codings:
            return InvalidArgument("the only Transfer-Encoding is one 'chunked', with HTTP/1.1")
        return InvalidArgument("Content-Length must be one decimal number")


def check_request_line(method: bytes, http_version: str) -> PenstockError | None:
    """Refuses what the parser lets through: CONNECT, HTTP/0.9 and HTTP/2.0."""
    if method == b"CONNECT":
        return InvalidArgument("CONNECT is for proxies; the broker is none")
    if http_version not in ("1.0", "1.1"):
        return InvalidArgument(f"HTTP/{http_version} is not supported; use HTTP/1.1")
    return None


def _is_chunked(codings: list[bytes]) -> bool:
    return [coding.strip(b" \t").lower() for coding in codings] == [b"chunked"]


def _note(verdict: RequestVerdict, name: bytes, value: bytes) -> None:
    if name == b"sec-fetch-site":
        # Browsers send this where they send no Origin: for an image, a link, a frame.
        verdict.is_cross_site = value.strip().lower() in (b"cross-site", b"same-site")
    elif name == b"expect" and value.lower() == b"100-continue":
        verdict.expects_continue = True
    elif (
        name == b"x-request-id"
        and len(value) <= MAX_REQUEST_ID_CHARS
        and _PRINTABLE.fullmatch(value)
    ):
        verdict.request_id = value
