"""The rules of bearer tokens: creating, rotating, revoking, and what ends with a tenant."""

from __future__ import annotations

import pytest

from penstock.core import tokens as rules
from penstock.core.image import decode_image, encode_image, restore_image, take_image
from penstock.core.invariants import BrokenInvariant, check
from penstock.core.state import BrokerState, apply
from penstock.core.tenancy import decide_create, decide_delete
from penstock.core.tokens import decide_create_token, decide_revoke_token, decide_rotate_token
from penstock.model.errors import AlreadyExists, NotFound, ResourceExhausted
from penstock.model.limits import Limits
from penstock.model.records import TokenRevoked, TokenSet, decode_record, encode_record
from penstock.model.tenancy import Entry
from penstock.model.tokens import Token

NOW = 1000
DIGEST = b"d" * 32


def token(name: str = "t1", **fields: object) -> Token:
    shape: dict[str, object] = {
        "id": name, "principal": "p", "tenant_id": None, "namespace": None, "roles": ("r",),
        "admin": False, "created_ms": 0, "expires_ms": 0, "digest": DIGEST,
    }  # fmt: skip
    return Token(**(shape | fields))  # type: ignore[arg-type]


def state_with(*wanted: Token) -> BrokerState:
    state = BrokerState(Limits())
    for entry in (
        Entry(kind="tenant", tenant_id="acme"),
        Entry(kind="namespace", tenant_id="acme", namespace="prod"),
        Entry(kind="namespace", tenant_id="acme", namespace="test"),
    ):
        record = decide_create(state.registry, entry, NOW)
        assert record is not None
        apply(state, record)
    for each in wanted:
        create(state, each)
    return state


def create(state: BrokerState, wanted: Token, now_ms: int = NOW) -> None:
    for record in decide_create_token(state.tokens, state.registry, wanted, now_ms):
        apply(state, decode_record(encode_record(record)))


def ids(state: BrokerState) -> list[str]:
    check(state)
    return [each.id for each in state.tokens]


def test_a_token_is_kept_as_it_was_created_with_the_time_of_that() -> None:
    state = state_with(token(tenant_id="acme", namespace="prod", expires_ms=5))
    found = state.tokens.get("t1")
    assert found == token(tenant_id="acme", namespace="prod", expires_ms=5, created_ms=NOW)
    assert restore_image(decode_image(encode_image(take_image(state))), Limits()).tokens.get(
        "t1"
    ) == (found)


def test_a_token_of_a_tenant_or_namespace_that_does_not_exist_is_refused() -> None:
    state = state_with()
    for wanted in (token(tenant_id="acne"), token(tenant_id="acme", namespace="pord")):
        with pytest.raises(NotFound):
            create(state, wanted)
    assert ids(state) == []


def test_an_id_is_taken_once() -> None:
    state = state_with(token())
    with pytest.raises(AlreadyExists):
        create(state, token(principal="other"))


def test_a_rotation_keeps_the_old_secret_for_its_grace_only() -> None:
    state = state_with(token())
    apply(state, decide_rotate_token(state.tokens, "t1", b"e" * 32, NOW + 50, NOW))
    found = rules.find_token(state.tokens, "t1")
    assert (found.digest, found.old_digest, found.old_until_ms) == (b"e" * 32, DIGEST, NOW + 50)
    apply(state, decide_rotate_token(state.tokens, "t1", b"f" * 32, 0, NOW))
    found = rules.find_token(state.tokens, "t1")
    assert (found.digest, found.old_digest, found.old_until_ms) == (b"f" * 32, b"", 0)
    check(state)


def test_a_revoked_token_is_gone_and_cannot_be_revoked_again() -> None:
    state = state_with(token())
    apply(state, decide_revoke_token(state.tokens, "t1", NOW))
    assert ids(state) == []
    for decide in (
        lambda: decide_revoke_token(state.tokens, "t1", NOW),
        lambda: decide_rotate_token(state.tokens, "t1", DIGEST, 0, NOW),
    ):
        with pytest.raises(NotFound):
            decide()


def test_tokens_end_with_their_tenant_or_namespace() -> None:
    """Whoever creates a tenant of the same name later does not let the old tokens in."""
    state = state_with(
        token("all"),
        token("acme", tenant_id="acme"),
        token("prod", tenant_id="acme", namespace="prod"),
        token("test", tenant_id="acme", namespace="test"),
    )
    path = ("acme", "prod", "")
    for record in decide_delete(state.registry, "namespace", path, NOW, cascade=True):
        apply(state, record)
    assert ids(state) == ["all", "acme", "test"]
    for record in decide_delete(state.registry, "tenant", ("acme", "", ""), NOW, cascade=True):
        apply(state, record)
    assert ids(state) == ["all"]


def test_without_room_expired_tokens_go_first_and_then_creating_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "MAX_TOKENS", 2)
    state = state_with(token("a", expires_ms=NOW + 1), token("b"))
    with pytest.raises(ResourceExhausted, match="revoke those that nobody uses"):
        create(state, token("c"), NOW)
    create(state, token("c"), NOW + 1)
    assert ids(state) == ["b", "c"]


def test_the_records_have_tags_30_and_31() -> None:
    assert encode_record(TokenRevoked(1, "x"))[1] == 31
    assert encode_record(TokenSet(1, token()))[1] == 30


def test_a_token_that_would_hold_a_secret_breaks_an_invariant() -> None:
    state = state_with()
    state.tokens.put(token(digest=b"the secret itself"))
    with pytest.raises(BrokenInvariant, match="hashes only"):
        check(state)
