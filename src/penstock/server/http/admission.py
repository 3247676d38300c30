"""Admission: checks Host, Origin, credentials and the headers that say where a body ends.

A page of another site must not reach a broker on its user's machine: a foreign Origin is refused,
and on a loopback bind so is a Host that is no loopback name (DNS rebinding). A request whose end
two readers could see in different places is refused (request smuggling).
"""

from __future__ import annotations

import hmac
import ipaddress
import re

import msgspec

from penstock.model.errors import (
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
)
from penstock.model.limits import MAX_HEADER_BYTES, MAX_REQUEST_ID_CHARS
from penstock.model.principals import UNVERIFIED, Principal
from penstock.model.scopes import Scope
from penstock.model.tenancy import DEFAULT
from penstock.server.http.forwarded_head import VIA_HEADER, forwarded_head
from penstock.server.http.requests import NO_NOTES, Notes
from penstock.server.http.scope_headers import NO_SCOPE, SCOPE_HEADERS, RequestScope, read_scope
from penstock.server.identity.authenticator import Authentication
from penstock.server.identity.credentials import Credential, wall_ms

_PRINTABLE = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?|[A-Za-z0-9._~-]+(:[0-9]{1,5})?")
_OWN_ORIGIN = re.compile(r"https?://([^/?#]+)/?", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,19}")

_NOTED = frozenset(
    {b"accept", b"if-match", b"if-none-match", b"last-event-id", b"access-control-request-method"}
)
"""Headers that the answer depends on. The values of a repeated one are joined with commas."""

_CORS = (
    b"access-control-allow-credentials: true\r\n"
    b"access-control-expose-headers: etag, retry-after, x-request-id, penstock-partition, "
    b"penstock-offset, penstock-duplicate\r\n"
)
_VARY = b"vary: origin\r\n"

MAX_SENDERS = 10_000
"""The tenants and namespaces that are kept so that connections compare them by identity."""

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


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


class _Found:
    """The headers that a verdict is about."""

    def __init__(self) -> None:
        self.hosts: list[bytes] = []
        self.lengths: list[bytes] = []
        self.codings: list[bytes] = []
        self.origin: bytes | None = None
        self.credentials: list[bytes] = []
        self.noted: dict[bytes, bytes] = {}
        self.scoping: Headers = []
        self.via = b""
        self.size = 0

    def read(self, headers: Headers, verdict: RequestVerdict) -> None:
        noted = self.noted
        for name, value in headers:
            self.size += len(name) + len(value)
            if name == b"host":
                self.hosts.append(value)
            elif name == b"origin":
                self.origin = value
            elif name == b"authorization":
                self.credentials.append(value)
            elif name == b"content-length":
                self.lengths.append(value)
            elif name == b"transfer-encoding":
                self.codings.append(value)
            elif name in _NOTED:
                noted[name] = noted[name] + b", " + value if name in noted else value
            elif name in SCOPE_HEADERS:
                self.scoping.append((name, value))
            elif name == VIA_HEADER:
                self.via = value.strip() or b"?"
            else:
                _note(verdict, name, value)


class Admission:
    """Checks the heads of requests, and finds out who sends them. With an `authenticator` every
    request needs a credential, and has a principal. Without one, requests need the `token`, if
    there is one."""

    def __init__(
        self,
        *,
        loopback_only: bool,
        token: str = "",
        allowed_origins: tuple[str, ...] = (),
        authenticator: Authentication | None = None,
        is_forwarding: bool = False,
    ) -> None:
        self._loopback_only = loopback_only
        self._is_forwarding = is_forwarding
        self.generation = 0
        self.use_authenticator(authenticator)
        self._senders: dict[Scope, Scope] = {}
        self._token = token.encode()
        self._allowed_origins = frozenset(origin.rstrip("/") for origin in allowed_origins)

    @property
    def needs_token(self) -> bool:
        return bool(self._token)

    @property
    def token(self) -> str:
        """Returns the static token, empty if there is none."""
        return self._token.decode()

    def forget(self) -> None:
        """Lets no connection rely on a verdict or a sender from before."""
        self.generation += 1
        self._senders.clear()

    def use_authenticator(self, authenticator: Authentication | None) -> None:
        """Replaces what finds out who sends a request."""
        self._authenticator = authenticator
        self.now_ms = wall_ms if authenticator is None else authenticator.now_ms
        self.generation += 1

    def use_token(self, token: str) -> bool:
        """Replaces the token; returns whether it has changed."""
        before, self._token = self._token, token.encode()
        self.generation += 1
        if self._authenticator is not None:
            self._authenticator.use_token(token)
        return before != self._token

    def judge(
        self, headers: Headers, http_version: str, certificate: Credential | None = None
    ) -> RequestVerdict:
        """Reads the headers and checks them. `certificate` is what the client's certificate proves.
        Until `until_ms` the verdict depends on nothing but the arguments, the settings and what
        credentials are valid, whose changes `generation` counts: `AdmissionCache` relies on it."""
        verdict = RequestVerdict()
        found = _Found()
        found.read(headers, verdict)
        origin, credentials, noted = found.origin, found.credentials, found.noted
        framing = _read_framing(verdict, found.lengths, found.codings, http_version)
        if found.size > MAX_HEADER_BYTES:
            verdict.refusal = InvalidArgument(f"headers are over {MAX_HEADER_BYTES} bytes")
        else:
            verdict.refusal = (
                framing
                or self._check_host(found.hosts, http_version)
                or self._check_origin(origin, found.hosts)
            )
        # Another broker's certificate says nothing about the client whose request it forwards.
        outcome = self._authenticate(credentials, None if found.via else certificate)
        credential = outcome if isinstance(outcome, Credential) else None
        principal = None if credential is None else credential.principal
        if outcome is None and self._authenticator is not None:
            principal = UNVERIFIED
        scope = _scope_of(verdict, found.scoping, principal)
        accept = noted.get(b"accept", b"").lower()
        cors_head = self._cors_head(origin) if verdict.refusal is None else b""
        verdict.notes = Notes(
            wants_events=b"text/event-stream" in accept,
            wants_html=b"text/html" in accept,
            if_match=noted.get(b"if-match"),
            if_none_match=noted.get(b"if-none-match"),
            last_event_id=noted.get(b"last-event-id"),
            is_preflight=b"access-control-request-method" in noted
            and cors_head.startswith(b"access-control"),
            cors_head=cors_head,
            host=found.hosts[0] if found.hosts else b"",
            token_refusal=outcome if isinstance(outcome, PenstockError) else None,
            scope=scope.scope,
            tenant=scope.tenant,
            namespace=scope.namespace,
            principal=principal,
            credential=credential,
            via=found.via,
            forwarded_head=forwarded_head(headers) if self._is_forwarding else b"",
            sender=self._sender_of(scope, outcome),
        )
        verdict.until_ms = self._until_ms(outcome)
        # Without a bearer credential it depends on whether the connection has a certificate.
        is_bare = principal is UNVERIFIED and not credentials
        verdict.is_of_connection = is_bare or (credential is not None and credential is certificate)
        verdict.cross_site_refusal = _check_site(verdict, origin)
        return verdict

    def _sender_of(
        self, scope: RequestScope, outcome: Credential | PenstockError | None
    ) -> Scope | None:
        """Returns the scope whose quota a connection counts against. Equal scopes are one object so
        that connections can compare them with `is`. None for a principal without a tenant: it
        could otherwise use up the connections of a tenant in which it has no rights."""
        is_named = scope.tenant is not None or scope.namespace is not None
        if not is_named or isinstance(outcome, PenstockError):
            return None
        if outcome is not None and outcome.principal.tenant_id is None:
            return None
        sender = (scope.tenant or DEFAULT, scope.namespace or "")
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        return self._senders.setdefault(sender, sender)

    def _check_host(self, hosts: list[bytes], http_version: str) -> PenstockError | None:
        if len(hosts) > 1 or (not hosts and http_version == "1.1"):
            return InvalidArgument("exactly one Host header is required")
        if not hosts:
            return None
        host = hosts[0].decode("latin-1").strip()
        if not _HOST.fullmatch(host):
            return InvalidArgument("the Host header is not a host name")
        if self._loopback_only and not is_loopback(host_name(host)):
            return PermissionDenied(
                f"Host {host!r} is no loopback name, and this broker is bound to loopback"
            )
        return None

    def _check_origin(self, origin: bytes | None, hosts: list[bytes]) -> PenstockError | None:
        if origin is None:
            return None
        text = origin.decode("latin-1").strip()
        own = hosts[0].decode("latin-1").strip() if hosts else ""
        found = _OWN_ORIGIN.fullmatch(text)
        if own and found is not None and found[1].lower() == own.lower():
            return None
        if text.rstrip("/") in self._allowed_origins:
            return None
        return PermissionDenied(f"Origin {text[:200]!r} is not allowed; see allowed_origins")

    def _cors_head(self, origin: bytes | None) -> bytes:
        """Returns header lines for the answer, if pages of other origins are allowed. `vary` keeps
        a cache between from giving one page the answer to another's request."""
        if not self._allowed_origins:
            return b""
        text = (origin or b"").decode("latin-1").strip()
        if text.rstrip("/") not in self._allowed_origins:
            return _VARY
        return b"access-control-allow-origin: %b\r\n%b%b" % (
            text.encode("latin-1"),
            _CORS,
            _VARY,
        )

    def _authenticate(
        self, credentials: list[bytes], certificate: Credential | None
    ) -> Credential | PenstockError | None:
        if self._authenticator is None:
            return self._check_token(credentials[-1] if credentials else b"")
        return self._authenticator.authenticate(credentials, certificate)

    def _until_ms(self, outcome: Credential | PenstockError | None) -> int:
        """Returns when a verdict ends. A refusal is not remembered: what is not yet valid becomes
        so without a change that `generation` counts."""
        if self._authenticator is None or outcome is None:
            return 0
        return outcome.principal.expires_ms if isinstance(outcome, Credential) else 1

    def _check_token(self, credentials: bytes) -> PenstockError | None:
        if not self._token:
            return None
        scheme, _, token = credentials.partition(b" ")
        is_equal = hmac.compare_digest(token.strip(), self._token)
        if is_equal and scheme.lower() == b"bearer":
            return None
        if credentials:
            return Unauthenticated("this is not the broker's token")
        return Unauthenticated(
            "a bearer token is required: send the header 'Authorization: Bearer <token>'"
        )


def _scope_of(
    verdict: RequestVerdict, headers: Headers, principal: Principal | None
) -> RequestScope:
    """Returns the scope that headers and sender name. Refuses the request if it is wrong."""
    scope = read_scope(headers, principal)
    if isinstance(scope, PenstockError):
        verdict.refusal = verdict.refusal or scope
        return NO_SCOPE
    return scope


def _check_site(verdict: RequestVerdict, origin: bytes | None) -> PermissionDenied | None:
    if origin is not None or not verdict.is_cross_site:
        return None
    return PermissionDenied("a page from another site may not use the broker; see allowed_origins")


class AdmissionCache:
    """The last verdict on a request of one connection. `is_welcome`: the request is admitted on
    every path under /v1.

    Most clients send the same headers again and again. So the last verdict is kept, together with
    everything that it depends on: the headers, the HTTP version, the credentials in force and, if
    the credential expires, the time. `certificate` is what the client's certificate proves.
    """

    __slots__ = (
        "_admission",
        "_generation",
        "_headers",
        "_is_remembering",
        "_max_body_bytes",
        "_version",
        "certificate",
        "is_welcome",
        "verdict",
    )

    def __init__(self, admission: Admission, max_body_bytes: int, *, is_remembering: bool) -> None:
        self.verdict = RequestVerdict()
        self.is_welcome = False
        self.certificate: Credential | None = None
        self._admission = admission
        self._max_body_bytes = max_body_bytes
        self._is_remembering = is_remembering
        self._headers: Headers | None = None
        self._version = ""
        self._generation = 0

    def is_known(self, headers: Headers, http_version: str) -> bool:
        """Returns whether `verdict` is the verdict on such a request."""
        return (
            self._is_remembering
            and headers == self._headers
            and http_version == self._version
            and self._generation == self._admission.generation
            and not 0 < self.verdict.until_ms <= self._admission.now_ms()
        )

    def judge(self, headers: Headers, http_version: str) -> RequestVerdict:
        self._headers, self._version = headers, http_version
        self._generation = self._admission.generation
        verdict = self.verdict = self._admission.judge(headers, http_version, self.certificate)
        is_short = verdict.content_length <= self._max_body_bytes
        self.is_welcome = verdict.is_welcome() and is_short and http_version == "1.1"
        return verdict


def check_request_line(method: bytes, http_version: str) -> PenstockError | None:
    """Refuses what the parser lets through: CONNECT, HTTP/0.9 and HTTP/2.0."""
    if method == b"CONNECT":
        return InvalidArgument("CONNECT is for proxies; the broker is none")
    if http_version not in ("1.0", "1.1"):
        return InvalidArgument(f"HTTP/{http_version} is not supported; use HTTP/1.1")
    return None


def _read_framing(
    verdict: RequestVerdict, lengths: list[bytes], codings: list[bytes], http_version: str
) -> PenstockError | None:
    """Notes where the body ends, and refuses a request that leaves it open. The parser is strict as
    well; the connection compares both when the body has come."""
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


def host_name(host: str) -> str:
    """Returns a Host header without its port, in lower case."""
    return re.sub(r":[0-9]+$", "", host).lower()


def is_loopback(name: str) -> bool:
    """Takes a host name or an address, with or without brackets."""
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
