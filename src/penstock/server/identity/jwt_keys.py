"""The keys that sign JWTs: read from a file or fetched from a URL, and kept current.

Invariants: a key verifies only algorithms of its own kind, so that a public key is never used as a
shared secret; nothing is fetched on the event loop; keys that cannot be read again leave the last
good ones in force. Must not know tokens or claims.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.exceptions import PyJWTError

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import KIB

MAX_KEYS_BYTES = 256 * KIB
MAX_KEYS = 256
FETCH_TIMEOUT_S = 5.0
UNKNOWN_KEY_INTERVAL_S = 30.0
"""An unknown key id lets the keys be fetched again, at most this often: anyone can invent ids."""
MIN_RSA_BITS = 2048
MIN_SHARED_KEY_BYTES = 32
"""RFC 7518: a key for HS256 is at least as long as its hash."""

HS256 = "HS256"
_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_PUBLIC_MEMBERS = frozenset({"kty", "n", "e", "crv", "x", "y"})

_log = logging.getLogger("penstock.server")


class VerifyingKey(NamedTuple):
    """`kid` is empty if the key has no id. `fingerprint` identifies the key itself."""

    kid: str
    algorithms: frozenset[str]
    key: Any
    fingerprint: bytes


def read_shared_key(data: bytes) -> list[VerifyingKey]:
    secret = data.strip()
    if len(secret) < MIN_SHARED_KEY_BYTES:
        raise InvalidArgument(f"a shared key has at least {MIN_SHARED_KEY_BYTES} bytes")
    return [VerifyingKey("", frozenset({HS256}), secret, hashlib.sha256(secret).digest())]


def read_key_set(data: bytes) -> list[VerifyingKey]:
    """Reads a JWKS. Leaves out keys that are not for signatures or of an unknown kind."""
    try:
        document = msgspec.json.decode(data)
        entries = document["keys"]
        if not isinstance(entries, list) or len(entries) > MAX_KEYS:
            raise ValueError
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError):
        raise InvalidArgument(
            'not a JWKS: a JSON object {"keys": […]} is expected; a shared key needs '
            "jwt_algorithms HS256"
        ) from None
    found = [key for key in map(_read_key, entries) if key is not None]
    if not found:
        raise InvalidArgument("the JWKS has no RSA, EC or Ed25519 key for signatures")
    return found


def _read_key(entry: Any) -> VerifyingKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    kid, operations = entry.get("kid", ""), entry.get("key_ops", ["verify"])
    if not isinstance(kid, str) or not isinstance(operations, list) or "verify" not in operations:
        return None
    public = {name: value for name, value in entry.items() if name in _PUBLIC_MEMBERS}
    try:
        key, algorithms = _public_key(public)
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
    wanted = entry.get("alg")
    if wanted is not None:
        algorithms &= {wanted} if isinstance(wanted, str) else set()
    fingerprint = hashlib.sha256(msgspec.json.encode(public, order="deterministic")).digest()
    return VerifyingKey(kid, algorithms, key, fingerprint) if algorithms else None


def _public_key(entry: dict[str, Any]) -> tuple[Any, frozenset[str]]:
    kind = entry.get("kty")
    if kind == "RSA":
        key = RSAAlgorithm.from_jwk(entry)
        if not isinstance(key, RSAPublicKey) or key.key_size < MIN_RSA_BITS:
            raise ValueError("too short")
        return key, _RSA
    if kind == "EC":
        return ECAlgorithm.from_jwk(entry), frozenset({_CURVES[entry["crv"]]})
    if kind == "OKP" and entry.get("crv") == "Ed25519":
        return OKPAlgorithm.from_jwk(entry), frozenset({"EdDSA"})
    raise ValueError("unknown kind of key")


class JwtKeys:
    """The keys in force."""

    def __init__(
        self,
        source: str,
        *,
        is_shared: bool,
        refresh_ms: int,
        fetch: Callable[[str], bytes] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.is_url = source.startswith(("https://", "http://"))
        if self.is_url and is_shared:
            raise InvalidArgument("jwt_keys: a shared key comes from a file, not from a URL")
        self.keys: tuple[VerifyingKey, ...] = ()
        self.is_fetching = False
        self._when_changed: list[Callable[[], None]] = []
        self._read = read_shared_key if is_shared else read_key_set
        self._fetch = fetch or fetch_keys
        self._refresh_s = refresh_ms / 1000
        self._monotonic = monotonic
        self._fetched_at = float("-inf")
        self._seen: tuple[int, int, int] | None = None

    def find(self, kid: str, algorithm: str) -> VerifyingKey | None:
        """Returns the key with this id. Without an id, the only key for the algorithm."""
        fit = [key for key in self.keys if algorithm in key.algorithms]
        if kid and self._read is not read_shared_key:
            fit = [key for key in fit if key.kid == kid]
        return fit[0] if len(fit) == 1 else None

    def has(self, fingerprint: bytes) -> bool:
        return any(key.fingerprint == fingerprint for key in self.keys)

    def when_changed(self, then: Callable[[], None]) -> None:
        """Calls `then` whenever the keys differ from those before."""
        self._when_changed.append(then)

    async def start(self) -> None:
        """Loads the keys. Raises InvalidArgument if a file has none; a URL may answer later."""
        if self.is_url:
            await self._refresh()
            return
        self._seen = _stamp(self.source)
        self.keys = tuple(self._read(_read_file(self.source)))

    def tick(self) -> None:
        """Reads a file that has changed, or fetches a URL when it is time. Called once a second."""
        if self.is_url:
            if self._monotonic() - self._fetched_at >= self._refresh_s:
                self._begin_refresh()
        elif (stamp := _stamp(self.source)) != self._seen and stamp is not None:
            self._seen = stamp
            self.read_again()

    def read_again(self) -> None:
        """Reads or fetches the keys now. The keys stay as they were if that fails."""
        if self.is_url:
            self._begin_refresh()
            return
        try:
            self._use(self._read(_read_file(self.source)))
        except InvalidArgument as error:
            _log.error("the keys for JWTs stay as they were: %s", error.message)

    def ask_for_unknown(self) -> bool:
        """Called when a token names a key that is not there. Returns whether the keys are being
        fetched."""
        if not self.is_url:
            return False
        if self._monotonic() - self._fetched_at >= UNKNOWN_KEY_INTERVAL_S:
            self._begin_refresh()
        return self.is_fetching

    def _begin_refresh(self) -> None:
        if not self.is_fetching:
            self.is_fetching = True
            self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        self.is_fetching = True
        self._fetched_at = self._monotonic()
        loop = asyncio.get_running_loop()
        try:
            self._use(self._read(await loop.run_in_executor(None, self._fetch, self.source)))
        except (PenstockError, httpx.HTTPError, OSError, ssl.SSLError) as error:
            text = error.message if isinstance(error, PenstockError) else str(error) or repr(error)
            _log.error("the keys for JWTs stay as they were; %s: %s", self.source, text)
        finally:
            self.is_fetching = False

    def _use(self, keys: list[VerifyingKey]) -> None:
        before = {(key.kid, key.fingerprint) for key in self.keys}
        self.keys = tuple(keys)
        if before != {(key.kid, key.fingerprint) for key in keys}:
            _log.info("there are %d keys for JWTs", len(keys))
            for changed in self._when_changed:
                changed()


def fetch_keys(url: str) -> bytes:
    """Fetches a JWKS; blocks. Follows no redirect: the address is the one that was configured."""
    context = ssl.create_default_context()
    options: dict[str, Any] = {"timeout": FETCH_TIMEOUT_S, "trust_env": False, "verify": context}
    with httpx.Client(**options) as client, client.stream("GET", url) as answer:
        if answer.status_code != 200:
            raise InvalidArgument(f"the answer was HTTP {answer.status_code}")
        data = b""
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) > MAX_KEYS_BYTES:
                raise InvalidArgument(f"the answer has more than {MAX_KEYS_BYTES} bytes")
        return data


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_KEYS_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"jwt_keys: {error}") from error
    if len(data) > MAX_KEYS_BYTES:
        raise InvalidArgument(f"jwt_keys: {path} has more than {MAX_KEYS_BYTES} bytes")
    return data


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Returns what changes when a file is replaced or written; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
