"""Asks the router about produce commands, and keeps their idempotency keys PENDING meanwhile.

Invariant: a command whose router fails, is late or answers nonsense is stored unrouted and counted.
A produce never waits for a router beyond the router's own time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.api.messages import Produce, Router
from penstock.core.idempotency import produce_identity
from penstock.core.produce import destination, routed
from penstock.core.state import BrokerState
from penstock.model.envelope import RoutingDecision
from penstock.model.errors import FailedPrecondition, PenstockError

ROUTED_AT_ONCE = 256
"""The commands of one batch that are routed at once, so that others get the router too."""

Identity = tuple[str, str, str]


class PendingRoutes:
    def __init__(self, state: BrokerState, router: Router, now_ms: Callable[[], int]) -> None:
        self._state = state
        self._router = router
        self._now_ms = now_ms
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
                if not self._is_committed(identity):
                    raise FailedPrecondition("a produce with this idempotency_key is under way")
                store(command)
                return
            self._pending.add(identity)

        def decided(decision: RoutingDecision | None) -> None:
            if identity is not None:
                self._pending.discard(identity)
            store(self._apply(command, decision))

        self._router.route(command, decided)

    def free_among(self, commands: list[Produce]) -> frozenset[Identity]:
        """Returns the keys of a batch that are not PENDING elsewhere."""
        identities = {identity for command in commands if (identity := identity_of(command))}
        return frozenset(identities - self._pending)

    def _is_committed(self, identity: Identity) -> bool:
        """Says whether the key was stored before. Then this is a repetition, and so is what is
        under way."""
        tenant_id, name, key = identity
        topic = self._state.topics.get(name)
        return topic is not None and self._state.produced.is_committed(
            produce_identity(tenant_id, topic.id, key), self._now_ms()
        )

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
    pending: PendingRoutes,
    commands: list[Produce],
    store: Callable[[list[Produce | PenstockError]], None],
) -> None:
    """Routes a batch, some at a time, and calls `store` when the last is decided, in order."""
    outcomes: list[Produce | PenstockError] = list(commands)
    waiting = iter(enumerate(commands))
    own = pending.free_among(commands)
    left, under_way, is_pumping = len(commands), 0, False

    def routed(index: int, outcome: Produce | PenstockError) -> None:
        nonlocal left, under_way
        outcomes[index] = outcome
        left -= 1
        under_way -= 1
        if left:
            pump()
        else:
            store(outcomes)

    def pump() -> None:
        nonlocal under_way, is_pumping
        # A router may decide at once: then the loop below goes on, not a call within a call.
        if is_pumping:
            return
        is_pumping = True
        while under_way < ROUTED_AT_ONCE and (found := next(waiting, None)) is not None:
            under_way += 1
            try:
                pending.pass_through(found[1], partial(routed, found[0]), own)
            except PenstockError as error:
                routed(found[0], error)
        is_pumping = False

    if commands:
        pump()
    else:
        store(outcomes)


def identity_of(command: Produce) -> Identity | None:
    """Returns the identity before routing: the router may change the topic, and then decides for
    both."""
    envelope = command.envelope
    if envelope is None or not envelope.idempotency_key:
        return None
    return envelope.tenant_id, destination(command), envelope.idempotency_key
