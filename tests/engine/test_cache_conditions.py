"""Preconditions of a put, a delete and an increment, as If-Match and If-None-Match name them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.model.caching import Delete, Increment, Precondition, Put
from penstock.model.errors import VersionMismatch
from penstock.model.tenancy import Path
from tests.engine.cache_harness import CacheBroker, durable, in_memory

ANY: frozenset[int] = frozenset()


@pytest.fixture(params=["ephemeral", "durable"])
def held(request: pytest.FixtureRequest) -> tuple[CacheBroker, Path]:
    if request.param == "durable":
        return durable()
    broker = in_memory()
    return broker, broker.cache("c")


def commands(path: Path, only_if: Precondition) -> list[Any]:
    return [
        Put(path, "k", b"9", only_if=only_if),
        Delete(path, "k", only_if=only_if),
        Increment(path, "k", only_if=only_if),
    ]


def outcome(broker: CacheBroker, command: Any) -> Any:
    caches = broker.engine.caches
    if isinstance(command, Put):
        return broker.call(caches.put, command)
    if isinstance(command, Delete):
        return broker.call(caches.delete, command)
    return broker.call(caches.increment, command)


def test_what_does_not_hold_changes_nothing(held: tuple[CacheBroker, Path]):
    """felix-77, 78."""
    broker, path = held
    first = broker.write(path, "k", b"1")
    version = broker.write(path, "k", b"2")
    for only_if in (
        Precondition(if_match=frozenset({first})),
        Precondition(if_match=frozenset({-1})),
        Precondition(if_none_match=ANY),
        Precondition(if_none_match=frozenset({first, version})),
        Precondition(if_match=ANY, if_none_match=frozenset({version})),
    ):
        for command in commands(path, only_if):
            assert isinstance(outcome(broker, command), VersionMismatch)
    found = broker.value(path, "k")
    assert found is not None
    assert (found.value, found.version) == (b"2", version)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_holds_is_done(held: tuple[CacheBroker, Path], which: int):
    """felix-77, 78."""
    broker, path = held
    version = broker.write(path, "k", b"1")
    for only_if in (
        Precondition(if_match=frozenset({version, 7}), if_none_match=frozenset({7})),
        Precondition(if_match=ANY),
    ):
        assert not isinstance(outcome(broker, commands(path, only_if)[which]), VersionMismatch)
        broker.write(path, "k", b"1")


def test_an_expired_value_is_none(held: tuple[CacheBroker, Path]):
    """felix-62: it matches nothing, and may be created anew."""
    broker, path = held
    version = broker.write(path, "k", b"1", 1000)
    broker.pass_ms(1000)
    stale = Put(path, "k", b"2", only_if=Precondition(if_match=frozenset({version})))
    assert isinstance(outcome(broker, stale), VersionMismatch)
    anew = Put(path, "k", b"3", only_if=Precondition(if_none_match=ANY))
    assert not isinstance(outcome(broker, anew), VersionMismatch)
    assert broker.read(path, "k") == b"3"
