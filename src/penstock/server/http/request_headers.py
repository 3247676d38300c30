"""The headers of a request, sorted by their use: the scope they name, and the verdict on them.

A request whose end two readers could see in different places is ambiguous, and refused (request
smuggling). A sender that is bound to a tenant or namespace needs no headers for it, and may name
nothing else. Must not know which requests have topics, nor whether the scope exists.
"""

from __future__ import annotations

import re

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError, PermissionDenied
from penstock.model.limits import MAX_REQUEST_ID_CHARS
from penstock.model.names import clean_name
from penstock.model.principals import Principal
from penstock.model.scopes import DEFAULT_SCOPE, Scope
from penstock.model.tenancy import DEFAULT
from penstock.server.http.forwarded_head import VIA_HEADER
from penstock.server.http.requests import NO_NOTES, Notes

SCOPE_HEADERS = {b"x-penstock-tenant": "X-Penstock-Tenant",
                 b"x-penstock-namespace": "X-Penstock-Namespace"}  # fmt: skip


class RequestScope(msgspec.Struct, frozen=True):
    """`scope` is where plain names of the request are. `tenant` and `namespace` are None unless the
    request, or its sender, names them."""

    scope: Scope = DEFAULT_SCOPE
    tenant: str | None = None
    namespace: str | None = None


NO_SCOPE = RequestScope()


def read_scope(
    found: list[tuple[bytes, bytes]], principal: Principal | None = None
) -> RequestScope | PenstockError:
    """Takes the headers among SCOPE_HEADERS, in lower case. Returns the refusal of a wrong one."""
    if not found and principal is None:
        return NO_SCOPE
    named: dict[bytes, str] = {}
    for header, value in found:
        if header in named:
            return InvalidArgument(f"the header {SCOPE_HEADERS[header]} is given twice")
        try:
            named[header] = clean_name(value.decode(), SCOPE_HEADERS[header])
        except UnicodeDecodeError:
            return InvalidArgument(f"the header {SCOPE_HEADERS[header]} is not UTF-8")
        except InvalidArgument as error:
            return error
    bound = (principal.tenant_id, principal.namespace) if principal is not None else (None, None)
    chosen: list[str | None] = []
    for (header, text), own in zip(SCOPE_HEADERS.items(), bound, strict=True):
        given = named.get(header)
        if own is not None and given not in (None, own):
            noun = text.rpartition("-")[2].lower()
            return PermissionDenied(
                f"{text} names {given!r}, and your credential is for {noun} {own!r}: name that, or "
                "leave it out"
            )
        chosen.append(own if given is None else given)
    tenant, namespace = chosen
    scope = (tenant or DEFAULT, namespace or DEFAULT)
    # The same object, which is quicker to compare.
    return RequestScope(DEFAULT_SCOPE if scope == DEFAULT_SCOPE else scope, tenant, namespace)


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
