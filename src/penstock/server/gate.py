"""Who may come in: Host, Origin and bearer token, and what the headers say of the request.

A browser's page from elsewhere must not reach a broker on its user's machine: a foreign Origin
is refused, and on a loopback bind so is a Host that is no loopback name (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from urllib.parse import urlsplit

import msgspec

from penstock.model.errors import (
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
)
from penstock.model.limits import MAX_HEADER_BYTES, MAX_REQUEST_ID_CHARS

_PRINTABLE = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?|[A-Za-z0-9._~-]+(:[0-9]{1,5})?")

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


class Verdict(msgspec.Struct):
    """What one set of headers means; the same headers again need no second look."""

    request_id: bytes = b""
    content_length: int = 0
    is_chunked: bool = False
    expects_continue: bool = False
    is_cross_site: bool = False
    wants_events: bool = False
    refusal: PenstockError | None = None
    token_refusal: PenstockError | None = None
    cross_site_refusal: PenstockError | None = None

    def is_welcome(self) -> bool:
        """Nothing of it is refused or to be asked for, whatever it wants."""
        refusals = (self.refusal, self.token_refusal, self.cross_site_refusal)
        return refusals == (None, None, None) and not self.expects_continue


class Gate:
    def __init__(
        self, *, loopback_only: bool, token: str = "", allowed_origins: tuple[str, ...] = ()
    ) -> None:
        self._loopback_only = loopback_only
        self._token = token.encode()
        self._allowed_origins = frozenset(origin.rstrip("/") for origin in allowed_origins)

    def judge(self, headers: list[tuple[bytes, bytes]], http_version: str) -> Verdict:
        verdict = Verdict()
        hosts: list[bytes] = []
        origin: bytes | None = None
        credentials = b""
        size = 0
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
            elif name == b"authorization":
                credentials = value
            else:
                _note(verdict, name, value)
        if size > MAX_HEADER_BYTES:
            verdict.refusal = InvalidArgument(f"headers are over {MAX_HEADER_BYTES} bytes")
        else:
            verdict.refusal = self._check_host(hosts, http_version) or self._check_origin(
                origin, hosts
            )
        if verdict.is_cross_site and origin is None:
            verdict.cross_site_refusal = PermissionDenied(
                "a page from another site may not use the broker; see allowed_origins"
            )
        if self._token and not self._is_token(credentials):
            verdict.token_refusal = Unauthenticated(
                "this is not the broker's token"
                if credentials
                else "a bearer token is required: send the header 'Authorization: Bearer <token>'"
            )
        return verdict

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
        parts = urlsplit(text)
        own = hosts[0].decode("latin-1").strip() if hosts else ""
        if parts.scheme in ("http", "https") and own and parts.netloc.lower() == own.lower():
            return None
        if text.rstrip("/") in self._allowed_origins:
            return None
        return PermissionDenied(f"Origin {text[:200]!r} is not allowed; see allowed_origins")

    def _is_token(self, credentials: bytes) -> bool:
        scheme, _, token = credentials.partition(b" ")
        is_equal = hmac.compare_digest(token.strip(), self._token)
        return is_equal and scheme.lower() == b"bearer"


def _note(verdict: Verdict, name: bytes, value: bytes) -> None:
    if name == b"content-length":
        # The parser has refused what is no number.
        verdict.content_length = int(value) if value.isdigit() else 0
    elif name == b"transfer-encoding":
        verdict.is_chunked = True
    elif name == b"sec-fetch-site":
        # A browser says so where it sends no Origin: an image, a link, a frame.
        verdict.is_cross_site = value.strip().lower() in (b"cross-site", b"same-site")
    elif name == b"accept":
        verdict.wants_events = b"text/event-stream" in value.lower()
    elif name == b"expect" and value.lower() == b"100-continue":
        verdict.expects_continue = True
    elif (
        name == b"x-request-id"
        and len(value) <= MAX_REQUEST_ID_CHARS
        and _PRINTABLE.fullmatch(value)
    ):
        verdict.request_id = value


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    return re.sub(r":[0-9]+$", "", host).lower()


def is_loopback(name: str) -> bool:
    """Of a host name or an address, with or without brackets."""
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
