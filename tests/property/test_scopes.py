"""Any history in several namespaces, against a model that is a dict for each of them.

Every scope has the same topics, groups and keys, and thresholds are so small that the broker seals
and vacuums all the time. The model of one scope knows nothing of the others: whatever leaks makes
the two differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.scopes import DEFAULT_SCOPE, Scope, full_name
from penstock.model.tenancy import Entry
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, on_disk, values
from tests.property.follower import Follower, must_equal, recovered
from tests.thresholds import lowered

SCOPES: list[Scope] = [DEFAULT_SCOPE, ("acme", "prod"), ("acme", "test"), ("globex", "prod")]
NAMES = ["orders", "b"]
KEYS = ["", "", "k", "l"]
EXAMPLES, STEPS = 60, 40

scopes = st.sampled_from(SCOPES)
names = st.sampled_from(NAMES)


class ScopeModel:
    """One namespace, as somebody sees it who has the broker alone."""

    def __init__(self) -> None:
        self.exists = True
        self.stored: dict[str, list[str]] = {}
        self.keys: set[tuple[str, str]] = set()
        self.done: dict[str, int] = {}

    def create(self, name: str) -> None:
        self.stored.setdefault(name, [])
        self.done.setdefault(name, 0)

    def delete(self, name: str) -> None:
        del self.stored[name], self.done[name]
        self.keys = {key for key in self.keys if key[0] != name}


class ScopesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.broker = on_disk(
            limits=Limits(idempotency_ttl_ms=LONG_MS, memory_bytes=8 * KIB),
            options=WalOptions(segment_bytes=16 * KIB, reserve_bytes=0, frame_bytes=8 * KIB),
        )
        self.models = {scope: ScopeModel() for scope in SCOPES}
        self.count = 0
        for scope in SCOPES[1:]:
            self._create_namespace(scope)
        self.follower = Follower(self.broker)

    # -- what may happen -----------------------------------------------------------------------

    @rule(scope=scopes, name=names)
    def create(self, scope: Scope, name: str) -> None:
        outcome = self.broker.call(self.broker.engine.create_topic, full_name(scope, name), 1)
        assert isinstance(outcome, PenstockError) != self.models[scope].exists
        if self.models[scope].exists:
            self.models[scope].create(name)

    @rule(scope=scopes, name=names)
    def delete(self, scope: Scope, name: str) -> None:
        outcome = self.broker.call(self.broker.engine.delete_topic, full_name(scope, name))
        assert (outcome is None) == (name in self.models[scope].stored)
        if outcome is None:
            self.models[scope].delete(name)

    @rule(scope=scopes, name=names, key=st.sampled_from(KEYS), size=st.sampled_from([1, 1, 900]))
    def produce(self, scope: Scope, name: str, key: str, size: int) -> None:
        model = self.models[scope]
        self.count += 1
        value = f"{'/'.join(scope)}-{self.count}-".ljust(size, ".")
        envelope = Envelope(idempotency_key=key) if key else None
        outcome = self.broker.try_produce(full_name(scope, name), value, envelope=envelope)
        if name not in model.stored:
            assert isinstance(outcome, PenstockError)
        elif (name, key) in model.keys:
            assert outcome is None
        else:
            assert not isinstance(outcome, PenstockError), outcome
            model.stored[name].append(value)
            if key:
                model.keys.add((name, key))

    @rule(scope=scopes, name=names, most=st.integers(1, 5))
    def work(self, scope: Scope, name: str, most: int) -> None:
        """A consumer takes some messages in order, and acks them."""
        model = self.models[scope]
        if name not in model.stored:
            return
        reader = self.broker.consume(full_name(scope, name), lease_ms=LONG_MS, prefetch=most)
        taken = reader.take()
        start = model.done[name]
        assert values(taken) == model.stored[name][start : start + most]
        for item in taken:
            assert self.broker.ack(reader, item) is None
        model.done[name] += len(taken)
        reader.live.close()
        self.broker.settle()
        # What came while it acked goes back.
        later = values(reader.take())
        assert later == model.stored[name][model.done[name] :][: len(later)]

    @precondition(lambda self: self.models[SCOPES[1]].exists)
    @rule(cascade=st.booleans())
    def delete_namespace(self, cascade: bool) -> None:
        model, (tenant, namespace) = self.models[SCOPES[1]], SCOPES[1]
        path = (tenant, namespace, "")
        outcome = self.broker.call(self.broker.engine.registry.delete, "namespace", path, cascade)
        assert isinstance(outcome, PenstockError) == (bool(model.stored) and not cascade)
        if outcome is None:
            self.models[SCOPES[1]] = ScopeModel()
            self.models[SCOPES[1]].exists = False

    @precondition(lambda self: not self.models[SCOPES[1]].exists)
    @rule()
    def create_namespace_again(self) -> None:
        self._create_namespace(SCOPES[1])
        self.models[SCOPES[1]].exists = True

    @rule(how=st.sampled_from(["seal", "restart", "crash", "pass"]))
    def go_on(self, how: str) -> None:
        if how == "pass":
            self.broker.pass_ms(3000)  # vacuum, retention and eviction have their turns
            return
        getattr(self.broker, how)()
        if how != "seal":
            self.follower = Follower(self.broker)

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def every_scope_is_as_its_model_says(self) -> None:
        for scope, model in self.models.items():
            listed: Any = self.broker.must(self.broker.engine.list_topics, scope)
            assert listed == sorted(model.stored)
            for name, stored in model.stored.items():
                assert values(self.broker.stored(full_name(scope, name))) == stored

    @invariant()
    def a_follower_has_the_same_state(self) -> None:
        self.follower.compare()

    def teardown(self) -> None:
        must_equal(recovered(self.broker), self.broker)
        self.broker.close()

    def _create_namespace(self, scope: Scope) -> None:
        for entry in (
            Entry(kind="tenant", tenant_id=scope[0]),
            Entry(kind="namespace", tenant_id=scope[0], namespace=scope[1]),
        ):
            self.broker.must(self.broker.engine.registry.create, entry)


@pytest.fixture
def small() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(lowered())
        yield


@pytest.mark.usefixtures("small")
def test_namespaces_never_see_each_other_whatever_happens() -> None:
    run_state_machine_as_test(
        ScopesMachine,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None),
    )
