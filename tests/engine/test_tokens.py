"""Bearer tokens in the engine: durable, told to listeners at once, and the same in a standby."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.model.errors import NotFound
from penstock.model.tenancy import Entry
from penstock.model.tokens import Token
from tests.engine.harness import Broker
from tests.property.follower import Follower, must_equal, recovered
from tests.storage.faulty_vfs import FaultyVfs

DIGEST, OTHER = b"1" * 32, b"2" * 32


def new(name: str = "t1", **fields: Any) -> Token:
    shape: dict[str, Any] = {
        "id": name, "principal": "p", "tenant_id": None, "namespace": None, "roles": (),
        "admin": False, "created_ms": 0, "expires_ms": 0, "digest": DIGEST,
    }  # fmt: skip
    return Token(**(shape | fields))


@pytest.fixture
def broker() -> Broker:
    return Broker(FaultyVfs())


def test_tokens_survive_a_crash_and_a_revoked_one_stays_revoked(broker: Broker) -> None:
    tokens = broker.engine.tokens
    for name in ("a", "b", "c"):
        broker.must(tokens.create, new(name))
    broker.must(tokens.rotate, "b", OTHER, 77)
    broker.must(tokens.revoke, "c")
    broker.crash()
    found = broker.must(broker.engine.tokens.list)
    assert [(each.id, each.digest, each.old_until_ms) for each in found] == [
        ("a", DIGEST, 0),
        ("b", OTHER, 77),
    ]
    assert broker.engine.tokens.find("c") is None


def test_a_change_counts_and_is_told_before_it_is_durable(broker: Broker) -> None:
    """Nobody gets in with a token while it is being revoked."""
    tokens = broker.engine.tokens
    heard: list[Token | None] = []
    tokens.listen(lambda: heard.append(tokens.find("t1")))
    broker.must(tokens.create, new())
    assert heard == []
    answers: list[Any] = []
    tokens.rotate("t1", OTHER, 0, answers.append)
    assert answers == []
    assert heard[0] is not None
    assert heard[0].digest == OTHER
    tokens.revoke("t1", answers.append)
    assert (answers, heard[1]) == ([], None)


def test_a_refused_change_is_not_told(broker: Broker) -> None:
    heard: list[int] = []
    broker.engine.tokens.listen(lambda: heard.append(1))
    with pytest.raises(NotFound):
        broker.must(broker.engine.tokens.revoke, "nobody")
    assert heard == []


def test_deleting_a_tenant_ends_its_tokens_and_is_told(broker: Broker) -> None:
    broker.must(broker.engine.registry.create, Entry(kind="tenant", tenant_id="acme"))
    broker.must(broker.engine.tokens.create, new(tenant_id="acme"))
    heard: list[int] = []
    broker.engine.tokens.listen(lambda: heard.append(len(heard)))
    broker.must(broker.engine.registry.delete, "tenant", ("acme", "", ""), False)
    assert heard == [0]
    assert broker.engine.tokens.find("t1") is None


def test_a_standby_has_the_same_tokens(broker: Broker) -> None:
    follower = Follower(broker)
    tokens = broker.engine.tokens
    broker.must(tokens.create, new("a", expires_ms=9))
    broker.must(tokens.create, new("b"))
    broker.must(tokens.rotate, "a", OTHER, 5)
    broker.must(tokens.revoke, "b")
    follower.compare()
    must_equal(recovered(broker), broker)
