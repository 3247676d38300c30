"""JWTs: which are accepted, as whom, and which are refused, whoever made them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import jwt
import pytest

from penstock.model.errors import InvalidArgument, PenstockError, Unauthenticated, Unavailable
from penstock.model.principals import Principal
from penstock.server.identity import jwt as jwt_module
from penstock.server.identity.credentials import Credential
from penstock.server.identity.jwt import MAX_JWT_BYTES, ClaimNames, JwtVerifier
from penstock.server.identity.jwt_keys import (
    UNKNOWN_KEY_INTERVAL_S,
    JwtKeys,
    read_key_set,
    read_shared_key,
)
from penstock.server.identity.jwt_settings import check_jwt_settings, start_jwt
from penstock.server.settings import Settings
from penstock.server.tls import open_tls
from tests.jwt_tokens import (
    AUDIENCE,
    EC_KEY,
    ED_KEY,
    ISSUER,
    KEYS,
    RSA_KEY,
    SHORT_RSA_KEY,
    claims,
    damaged,
    forged,
    jwk,
    key_set,
    public_pem,
    signed,
)

NOW_S = 1_800_000_000
NOW_MS = NOW_S * 1000
LEEWAY_MS = 30_000
SHARED = b"0123456789abcdef0123456789abcdef"


class Issuer:
    """A verifier with a clock and keys that a test sets."""

    def __init__(self, *algorithms: str, **names: str) -> None:
        self.now_ms = NOW_MS
        self.keys = JwtKeys("keys.json", is_shared=algorithms == ("HS256",), refresh_ms=1000)
        self.keys.keys = tuple(read_key_set(key_set(**KEYS)))
        if algorithms == ("HS256",):
            self.keys.keys = tuple(read_shared_key(SHARED))
        self.verifier = JwtVerifier(
            self.keys,
            issuer=ISSUER,
            audience=AUDIENCE,
            algorithms=algorithms or ("RS256", "ES256", "EdDSA"),
            leeway_ms=LEEWAY_MS,
            claims=ClaimNames(**names),
            now_ms=lambda: self.now_ms,
        )

    def principal(self, text: bytes) -> Principal:
        outcome = self.verifier.verify(text)
        assert isinstance(outcome, Credential), outcome
        return outcome.principal

    def refusal(self, text: bytes) -> str:
        outcome = self.verifier.verify(text)
        assert isinstance(outcome, Unauthenticated), outcome
        return outcome.message


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("kid", [None, ""])
def test_a_good_token_names_its_sender(algorithm: str, kid: str | None) -> None:
    """Without a key id, the only key for the algorithm is meant."""
    text = signed(claims(NOW_S, namespace="prod"), algorithm, kid)
    assert Issuer().principal(text) == Principal(
        "alice", "default", "prod", frozenset({"reader"}), False, NOW_MS + 60_000 + LEEWAY_MS
    )


def test_a_shared_key_signs_with_hs256_alone() -> None:
    text = signed(claims(NOW_S), "HS256", "any", SHARED)
    assert Issuer("HS256").principal(text).name == "alice"
    assert "algorithm is not allowed" in Issuer().refusal(text)
    other = signed(claims(NOW_S), "HS256", "any", b"x" * 32)
    assert "signature does not match" in Issuer("HS256").refusal(other)


BAD_CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"exp": None}, "must have the claims"),
    ({"iss": None}, "must have the claims"),
    ({"aud": None}, "must have the claims"),
    ({"exp": NOW_S - LEEWAY_MS // 1000}, "has expired"),
    ({"exp": "soon"}, "exp is no number"),
    ({"exp": True}, "exp is no number"),
    ({"exp": 1e300}, "exp is out of range"),
    ({"exp": -1}, "exp is out of range"),
    ({"nbf": NOW_S + LEEWAY_MS // 1000 + 1}, "not valid yet"),
    ({"nbf": "now"}, "nbf is no number"),
    ({"iat": NOW_S + LEEWAY_MS // 1000 + 1}, "not valid yet"),
    ({"aud": "another"}, "another audience"),
    ({"aud": ["a", "b"]}, "another audience"),
    ({"iss": "https://evil.example"}, "another issuer"),
    ({"sub": None}, "no claim 'sub'"),
    ({"sub": ""}, "is no name"),
    ({"sub": "a\nb"}, "is no name"),
    ({"tenant_id": None}, "no claim 'tenant_id'; jwt_tenant_claim"),
    ({"tenant_id": 7}, "is no name"),
    ({"namespace": ["x"]}, "is no name"),
    ({"roles": {"a": 1}}, "roles are no list"),
    ({"roles": [1]}, "roles are no list"),
    ({"roles": ["r"] * 65}, "roles are no list"),
]


@pytest.mark.parametrize(("change", "told"), BAD_CLAIMS)
def test_a_token_with_a_bad_claim_is_refused(change: dict[str, Any], told: str) -> None:
    assert told in Issuer().refusal(_signed_as_is(claims(NOW_S, **change)))


def _signed_as_is(body: dict[str, Any]) -> bytes:
    """PyJWT would not sign some of these claims, so the payload is signed as bytes."""
    made = jwt.api_jws.encode(json.dumps(body).encode(), RSA_KEY, "RS256", headers={"kid": "RS256"})
    return made.encode()


def test_the_leeway_counts_at_both_ends() -> None:
    issuer = Issuer()
    text = signed(claims(NOW_S, nbf=NOW_S + 30, exp=NOW_S + 60))
    assert issuer.principal(text).expires_ms == NOW_MS + 90_000
    issuer.now_ms = NOW_MS + 90_000 - 1
    assert issuer.principal(text).name == "alice"
    issuer.now_ms = NOW_MS + 90_000
    assert "has expired" in issuer.refusal(text)


@pytest.mark.parametrize("name", ["broker", "static-token", "Broker"])
def test_nobody_is_the_broker_itself(name: str) -> None:
    """Whoever was could act under its name in the audit log."""
    assert "the broker's own" in Issuer().refusal(signed(claims(NOW_S, sub=name)))


def test_an_unsigned_token_is_refused_in_every_spelling() -> None:
    for algorithm in ("none", "None", "NONE", "nOnE", "", None, 1, ["RS256"], {"a": 1}):
        text = forged({"alg": algorithm, "kid": "RS256"}, claims(NOW_S))
        assert isinstance(Issuer().verifier.verify(text), Unauthenticated)


def test_a_public_key_is_never_a_shared_secret() -> None:
    """Algorithm confusion: HMAC with the bytes of the public key, which everybody has."""
    secrets = [public_pem(RSA_KEY), json.dumps(jwk("RS256", RSA_KEY)).encode(), b""]
    for secret in secrets:
        for header in ({"alg": "HS256", "kid": "RS256"}, {"alg": "RS256", "kid": "RS256"}):
            text = forged(header, claims(NOW_S), secret)
            assert isinstance(Issuer().verifier.verify(text), Unauthenticated)
            assert isinstance(Issuer("HS256").verifier.verify(text), Unauthenticated)


def test_a_key_signs_only_algorithms_of_its_own_kind() -> None:
    """A token of one key that names another's id and algorithm is refused."""
    body = claims(NOW_S)
    assert "no key" in Issuer().refusal(signed(body, "ES256", "RS256"))
    assert "algorithm is not allowed" in Issuer().refusal(signed(body, "RS512", "RS256", RSA_KEY))
    assert Issuer("RS512").principal(signed(body, "RS512", "RS256", RSA_KEY)).name == "alice"


def test_critical_headers_and_detached_payloads_are_refused() -> None:
    headers: list[dict[str, Any]] = [
        {"crit": ["exp"]}, {"crit": []}, {"b64": False}, {"crit": ["b64"], "b64": True},
    ]  # fmt: skip
    for header in headers:
        payload = json.dumps(claims(NOW_S)).encode()
        given: dict[str, Any] = {"kid": "RS256"} | header
        try:
            text = jwt.api_jws.encode(payload, RSA_KEY, "RS256", headers=given).encode()
        except jwt.PyJWTError:
            continue
        assert isinstance(Issuer().verifier.verify(text), Unauthenticated), header


def test_an_oversized_token_is_refused_before_it_is_read() -> None:
    text = signed(claims(NOW_S, more="x" * MAX_JWT_BYTES))
    assert "at most 8192 bytes" in Issuer().refusal(text)


def test_a_token_is_verified_once_and_again_when_the_keys_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issuer, text = Issuer(), signed(claims(NOW_S))
    decoded: list[str] = []
    decode = jwt.decode

    def counting(token: str, *args: Any, **options: Any) -> Any:
        decoded.append(token)
        return decode(token, *args, **options)

    monkeypatch.setattr(jwt, "decode", counting)
    for _ in range(5):
        issuer.principal(text)
    assert len(decoded) == 1
    told: list[int] = []
    issuer.verifier.follow_keys(lambda: told.append(1))
    issuer.keys._use(read_key_set(key_set(ES256=EC_KEY)))
    assert told == [1]
    assert "no key" in issuer.refusal(text)


def test_the_memory_for_verified_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_module, "MAX_VERIFIED", 3)
    issuer = Issuer("HS256")
    for number in range(20):
        issuer.principal(signed(claims(NOW_S, sub=f"s{number}"), "HS256", "", SHARED))
        assert len(issuer.verifier._verified) <= 3


def test_the_claims_can_have_other_names() -> None:
    issuer = Issuer(principal="email", tenant_id="org", roles="scope", admin_role="root")
    body = claims(NOW_S, email="a@b.example", org="acme", scope="reader root", sub=None)
    found = issuer.principal(signed(body))
    assert (found.name, found.tenant_id, found.is_admin) == ("a@b.example", "acme", True)
    assert found.roles == {"reader", "root"}


def test_a_sender_without_a_tenant_reaches_all_only_if_that_is_configured() -> None:
    text = signed(claims(NOW_S, tenant_id=None))
    assert "jwt_tenant_claim" in Issuer().refusal(text)
    assert Issuer(tenant_id="").principal(text).tenant_id is None
    admin = signed(claims(NOW_S, tenant_id=None, roles=["root"]))
    assert Issuer(admin_role="root").principal(admin).is_admin
    inside = signed(claims(NOW_S, tenant_id=None, roles=["root"], namespace="n"))
    assert "without a tenant" in Issuer(admin_role="root").refusal(inside)


# -- key sets --------------------------------------------------------------------------------------


def test_keys_that_are_not_for_signatures_or_too_weak_are_left_out() -> None:
    good = jwk("good", RSA_KEY)
    entries = [
        good,
        good | {"kid": "enc", "use": "enc"},
        good | {"kid": "ops", "key_ops": ["encrypt"]},
        good | {"kid": "alg", "alg": "HS256"},
        good | {"kid": "broken", "n": "!!"},
        {"kty": "oct", "kid": "oct", "k": "c2VjcmV0"},
        jwk("short", SHORT_RSA_KEY),
        {"kty": "EC", "crv": "P-256"},
        "text",
        {},
    ]
    found = read_key_set(json.dumps({"keys": entries}).encode())
    assert [key.kid for key in found] == ["good"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"keys": 1}', b'{"keys": []}', b"\xff"]
)
def test_a_file_that_is_no_key_set_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        read_key_set(data)


def test_a_short_shared_key_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 32 bytes"):
        read_shared_key(b"x" * 31 + b"\n")


def test_two_keys_with_one_id_are_not_guessed_between() -> None:
    issuer = Issuer()
    entries = [jwk("RS256", RSA_KEY), jwk("RS256", KEYS["RS256"]) | {"e": "Aw"}]
    issuer.keys.keys = tuple(read_key_set(json.dumps({"keys": entries}).encode()))
    assert "no key" in issuer.refusal(signed(claims(NOW_S)))


class Provider:
    """A URL with keys, that can fail, and a clock."""

    def __init__(self, data: bytes) -> None:
        self.data: bytes | Exception = data
        self.fetches = 0
        self.now_s = 0.0
        self.keys = JwtKeys(
            "https://issuer.example/keys",
            is_shared=False,
            refresh_ms=300_000,
            fetch=self._fetch,
            monotonic=lambda: self.now_s,
        )

    def _fetch(self, url: str) -> bytes:
        self.fetches += 1
        if isinstance(self.data, Exception):
            raise self.data
        return self.data

    async def rest(self) -> None:
        while self.keys.is_fetching:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)

    def kids(self) -> set[str]:
        return {key.kid for key in self.keys.keys}


def test_keys_are_fetched_now_and_then_and_the_last_good_ones_stay() -> None:
    async def test() -> None:
        provider = Provider(key_set(one=RSA_KEY))
        await provider.keys.start()
        assert provider.kids() == {"one"}
        for failure in (OSError("no route"), InvalidArgument("HTTP 500"), b"{}"):
            provider.data = failure
            provider.now_s += 300
            provider.keys.tick()
            await provider.rest()
            assert provider.kids() == {"one"}
        provider.data = key_set(two=RSA_KEY)
        provider.keys.tick()
        await provider.rest()
        assert (provider.kids(), provider.fetches) == ({"one"}, 4)
        provider.now_s += 300
        provider.keys.tick()
        await provider.rest()
        assert (provider.kids(), provider.fetches) == ({"two"}, 5)

    asyncio.run(test())


def test_an_unknown_key_id_lets_keys_be_fetched_once_per_interval() -> None:
    async def test() -> None:
        provider = Provider(key_set(one=RSA_KEY))
        await provider.keys.start()
        issuer = Issuer()
        issuer.keys = provider.keys
        issuer.verifier._keys = provider.keys
        text = signed(claims(NOW_S), "RS256", "two", RSA_KEY)
        assert "no key" in issuer.refusal(text)
        assert provider.fetches == 1
        provider.data = key_set(two=RSA_KEY)
        provider.now_s += UNKNOWN_KEY_INTERVAL_S
        for _ in range(3):
            assert isinstance(issuer.verifier.verify(text), Unavailable)
        await provider.rest()
        assert provider.fetches == 2
        assert issuer.principal(text).name == "alice"
        for number in range(50):
            other = signed(claims(NOW_S), "EdDSA", f"invented-{number}", ED_KEY)
            assert isinstance(issuer.verifier.verify(other), Unauthenticated)
        assert provider.fetches == 2

    asyncio.run(test())


def test_a_key_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(key_set(one=RSA_KEY))

    async def test() -> None:
        keys = JwtKeys(str(file), is_shared=False, refresh_ms=1000)
        told: list[int] = []
        keys.when_changed(lambda: told.append(1))
        await keys.start()
        keys.tick()
        assert told == []
        for data, kids in ((b"nonsense", {"one"}), (key_set(two=ED_KEY), {"two"})):
            (tmp_path / "new").write_bytes(data)
            os.replace(tmp_path / "new", file)
            keys.tick()
            assert {key.kid for key in keys.keys} == kids
        assert told == [1]
        file.unlink()
        keys.tick()
        assert {key.kid for key in keys.keys} == {"two"}

    asyncio.run(test())


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"jwt_keys": "f"}, "needs access_control"),
        ({"jwt_keys": "f", "access_control": True}, "needs jwt_issuer and jwt_audience"),
        (
            {"jwt_keys": "f", "access_control": True, "jwt_issuer": "i"},
            "needs jwt_issuer and jwt_audience",
        ),
        ({"jwt_issuer": "i", "access_control": True}, "need jwt_keys"),
        (
            {
                "jwt_keys": "f", "access_control": True, "jwt_issuer": "i", "jwt_audience": "a",
                "jwt_algorithms": ("HS256", "RS256"),
            },
            "HS256 must stand alone",
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        check_jwt_settings(Settings(**settings))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tls_cert": "f"}, "tls_cert and tls_key belong together"),
        ({"tls_key": "f"}, "tls_cert and tls_key belong together"),
        ({"tls_cert": "/no/f", "tls_key": "/no/k"}, "No such file"),
        ({"tls_client_ca": "f"}, "tls_client_ca needs tls_cert and tls_key"),
    ],
)
def test_tls_settings_that_cannot_work_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_tls(Settings(**settings))


def test_a_key_file_that_is_not_there_is_refused_at_the_start() -> None:
    settings = Settings(access_control=True, jwt_keys="/no/f", jwt_issuer="i", jwt_audience="a")
    with pytest.raises(InvalidArgument, match="No such file"):
        asyncio.run(start_jwt(settings))


# -- fuzzing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_token_is_refused_and_raises_nothing(seed: int) -> None:
    """Cut, repeated, with bits flipped, with parts of other tokens, or of random bytes."""
    random = Random(seed)
    issuer = Issuer()
    good = [signed(claims(NOW_S, sub=f"s{n}"), algorithm) for n, algorithm in enumerate(KEYS)]
    for _ in range(1500):
        text = damaged(random, good, NOW_S)
        outcome = issuer.verifier.verify(text)
        assert isinstance(outcome, PenstockError) or text in good, text
        if isinstance(outcome, PenstockError):
            assert text.decode("latin-1") not in outcome.message or len(text) < 8
