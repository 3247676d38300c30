"""Verified credentials, and how bearer tokens of the broker are made and read.

A token is `pst_<id>_<secret>`: the id finds it, and the secret has 256 random bits. The broker
keeps the SHA-256 of the secret. A slow hash would add nothing: such a secret cannot be guessed.
Must not know which tokens exist.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import Literal

import msgspec

from penstock.model.principals import Principal

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
