"""JWTs and their keys, as an identity provider makes them, and as an attacker would."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "penstock"

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SHORT_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
KEYS: dict[str, Any] = {"RS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}


def jwk(kid: str, key: Any) -> dict[str, Any]:
    public = key.public_key()
    if isinstance(key, rsa.RSAPrivateKey):
        entry = RSAAlgorithm.to_jwk(public, as_dict=True)
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        entry = ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        entry = OKPAlgorithm.to_jwk(public, as_dict=True)
    entry = {name: value for name, value in entry.items() if name != "key_ops"}
    return entry | {"kid": kid, "use": "sig"}


def key_set(**keys: Any) -> bytes:
    return json.dumps({"keys": [jwk(kid, key) for kid, key in keys.items()]}).encode()


def claims(now_s: float, **more: Any) -> dict[str, Any]:
    """The claims of a good token; None leaves one out."""
    good = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now_s + 60, "iat": now_s,
        "tenant_id": "default", "roles": ["reader"],
    }  # fmt: skip
    return {name: value for name, value in (good | more).items() if value is not None}


def signed(
    body: dict[str, Any], algorithm: str = "RS256", kid: str | None = None, key: Any = None
) -> bytes:
    headers = {"kid": algorithm if kid is None else kid} if kid != "" else {}
    return jwt.encode(body, key or KEYS[algorithm], algorithm, headers=headers).encode()


def forged(header: dict[str, Any], body: dict[str, Any], secret: bytes | None = None) -> bytes:
    """A token with any header; signed with HMAC, or not at all."""
    parts = b".".join(_encoded(json.dumps(part).encode()) for part in (header, body))
    seal = b"" if secret is None else hmac.new(secret, parts, hashlib.sha256).digest()
    return parts + b"." + _encoded(seal)


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
