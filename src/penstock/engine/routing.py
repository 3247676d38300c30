"""The router's turn in a produce, and the idempotency keys that are PENDING meanwhile.

Invariant: a command whose router fails, is late or answers nonsense is stored unrouted and
counted; a produce never waits for a router beyond the router's own time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.core.produce import Produce, routed
from penstock.core.state import BrokerState
from penstock.model.envelope import RoutingDecision
from penstock.model.errors import FailedPrecondition, PenstockError

Decided = Callable[[RoutingDecision | None], None]


class Router(Protocol):
    def route(self, command: Produce, decided: Decided) -> None:
        """Calls `decided` once, on the loop, with the decision, or None when there is none."""
        ...


class RoutingGate:
    def __init__(self, state: BrokerState, router: Router) -> None:
        self._state = state
        self._router = router
        self._pending: set[tuple[str, str, str]] = set()
        self.failures = 0

    def pass_through(self, command: Produce, store: Callable[[Produce], None]) -> None:
        """Calls `store` with the routed command; raises while its idempotency key is PENDING."""
        identity = _identity(command)
        if identity is not None:
            if identity in self._pending:
                raise FailedPrecondition("a produce with this idempotency_key is under way")
            self._pending.add(identity)

        def decided(decision: RoutingDecision | None) -> None:
            if identity is not None:
                self._pending.discard(identity)
            store(self._apply(command, decision))

        self._router.route(command, decided)

    def _apply(self, command: Produce, decision: RoutingDecision | None) -> Produce:
        if decision is None:
            self.failures += 1
            return command
        try:
            return routed(self._state, command, decision)
        except PenstockError:
            self.failures += 1
            return command


def _identity(command: Produce) -> tuple[str, str, str] | None:
    """The identity before routing: the router may move the topic, and then decides for both."""
    envelope = command.envelope
    if envelope is None or not envelope.idempotency_key:
        return None
    topic = envelope.target_topic or command.topic
    return envelope.tenant_id, topic, envelope.idempotency_key
