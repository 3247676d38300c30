"""JWTs and their keys, as an identity provider makes them, and as an attacker would."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from random import Random
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


def damaged(random: Random, good: list[bytes], now_s: float) -> bytes:
    """Returns one of the good tokens cut, with a bit flipped or with parts of others; or an attack,
    or random bytes. By chance it may be a good one again."""
    text = random.choice(good)
    parts = text.split(b".")
    kind = random.randrange(7)
    if kind == 0:
        return text[: random.randrange(len(text))]
    if kind == 1:
        at = random.randrange(len(text))
        # The last character of a part may have bits that mean nothing: those are left alone.
        while at + 1 in _ends(text):
            at = random.randrange(len(text))
        return text[:at] + bytes([text[at] ^ 1 << random.randrange(8)]) + text[at + 1 :]
    if kind == 2:
        other = random.choice(good).split(b".")
        mixed = b".".join(random.choice(pair) for pair in zip(parts, other, strict=True))
        return mixed if mixed not in good else b""
    if kind == 3:
        return random.randbytes(random.randrange(200))
    if kind == 4:
        return b".".join(random.choices([*parts, b"", b"e30"], k=random.randrange(6)))
    if kind == 5:
        header = {"alg": random.choice(["none", "HS256", "RS256", "ES256", "x"]), "typ": "JWT"}
        return forged(header, claims(now_s), random.choice([None, b"", public_pem(EC_KEY)]))
    deep = b"[" * random.randrange(1, 3000)
    return forged({"alg": "RS256", "kid": "RS256"}, {"x": deep.decode()}, deep[:5])


def _ends(text: bytes) -> set[int]:
    return {at for at in range(len(text) + 1) if text[at : at + 1] in (b".", b"")}
