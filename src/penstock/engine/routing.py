"""The router's turn in a produce, and the idempotency keys that are PENDING meanwhile.

Invariant: a command whose router fails, is late or answers nonsense is stored unrouted and
counted; a produce never waits for a router beyond the router's own time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.core.produce import Produce, routed
from penstock.core.state import BrokerState
from penstock.model.envelope import RoutingDecision
from penstock.model.errors import FailedPrecondition, PenstockError

Identity = tuple[str, str, str]

Decided = Callable[[RoutingDecision | None], None]


class Router(Protocol):
    def route(self, command: Produce, decided: Decided) -> None:
        """Calls `decided` once, on the loop, with the decision, or None when there is none."""
        ...


class RoutingGate:
    def __init__(self, state: BrokerState, router: Router) -> None:
        self._state = state
        self._router = router
        self._pending: set[Identity] = set()
        self.failures = 0

    def pass_through(
        self,
        command: Produce,
        store: Callable[[Produce], None],
        own: frozenset[Identity] = frozenset(),
    ) -> None:
        """Calls `store` with the routed command; raises while its idempotency key is PENDING,
        except in a batch of its `own`, where what comes first is stored first."""
        identity = identity_of(command)
        if identity is not None:
            if identity in self._pending and identity not in own:
                raise FailedPrecondition("a produce with this idempotency_key is under way")
            self._pending.add(identity)

        def decided(decision: RoutingDecision | None) -> None:
            if identity is not None:
                self._pending.discard(identity)
            store(self._apply(command, decision))

        self._router.route(command, decided)

    def free_among(self, commands: list[Produce]) -> frozenset[Identity]:
        """Those keys of a batch that are not PENDING elsewhere."""
        identities = {identity for command in commands if (identity := identity_of(command))}
        return frozenset(identities - self._pending)

    def _apply(self, command: Produce, decision: RoutingDecision | None) -> Produce:
        if decision is None:
            self.failures += 1
            return command
        try:
            return routed(self._state, command, decision)
        except PenstockError:
            self.failures += 1
            return command


def route_many(
    gate: RoutingGate,
    commands: list[Produce],
    store: Callable[[list[Produce | PenstockError]], None],
) -> None:
    """Routes all commands at once and calls `store` when the last is decided, in order."""
    outcomes: list[Produce | PenstockError] = list(commands)
    left = len(commands)

    def routed(index: int, outcome: Produce | PenstockError) -> None:
        nonlocal left
        outcomes[index] = outcome
        left -= 1
        if not left:
            store(outcomes)

    if not commands:
        store(outcomes)
    own = gate.free_among(commands)
    for index, command in enumerate(commands):
        try:
            gate.pass_through(command, partial(routed, index), own)
        except PenstockError as error:
            routed(index, error)


def identity_of(command: Produce) -> Identity | None:
    """The identity before routing: the router may move the topic, and then decides for both."""
    envelope = command.envelope
    if envelope is None or not envelope.idempotency_key:
        return None
    topic = envelope.target_topic or command.topic
    return envelope.tenant_id, topic, envelope.idempotency_key
