"""Verified credentials: bearer tokens of the broker, and the principals of client certificates.

A token is `pst_<id>_<secret>`: the id finds it, and the secret has 256 random bits. The broker
keeps the SHA-256 of the secret. A slow hash would add nothing: such a secret cannot be guessed. The
TLS layer has verified a certificate before anything here sees it. Must not know which tokens exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import ssl
import time
from typing import Any, Literal

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.principals import Principal, clean_principal


def certificate_of(transport: asyncio.Transport) -> Credential | None:
    """Returns what the client's certificate proves; None without one, or if it names nobody."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    try:
        name = clean_principal(_name_in(certificate))
    except InvalidArgument:
        return None
    expires_ms = int(ssl.cert_time_to_seconds(certificate["notAfter"])) * 1000
    return Credential(Principal(name, expires_ms=expires_ms), "certificate")


def _name_in(certificate: dict[str, Any]) -> str:
    """Returns the common name of the subject, or else its first DNS name."""
    for attributes in certificate.get("subject", ()):
        for kind, value in attributes:
            if kind == "commonName" and value.strip():
                return str(value)
    names = (value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
    return next(names, "")


_TOKEN = re.compile(rb"pst_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")

CredentialKind = Literal["static", "token", "jwt", "certificate"]


class Credential(msgspec.Struct, frozen=True):
    """A verified credential. It is valid until the principal expires, or until `digest` no longer
    matches the token `id`, the static token or a key that signs JWTs."""

    principal: Principal
    kind: CredentialKind
    digest: bytes = b""
    id: str = ""


class NewSecret(msgspec.Struct, frozen=True):
    """The secret of a token, as it is shown once: `text` is the whole token."""

    text: str
    digest: bytes


def new_token_id() -> str:
    return secrets.token_hex(8)


def new_secret(token_id: str) -> NewSecret:
    secret = secrets.token_urlsafe(32)
    return NewSecret(f"pst_{token_id}_{secret}", digest_of(secret.encode()))


def read_token_text(text: bytes) -> tuple[str, bytes] | None:
    """Returns the id and the hash of the secret, or None if this is no token of a broker."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1].decode(), digest_of(found[2]))


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def wall_ms() -> int:
    """Returns the machine's time, with which times that people give are compared."""
    return time.time_ns() // 1_000_000
