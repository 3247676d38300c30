"""Rules of consumer-side effects: who may begin, renew, commit or fail one, and the record of it.

Deciding changes nothing; effects.py holds the entries. Must not know how effects are run.
"""

from __future__ import annotations

from penstock.api.effects import EffectCommand
from penstock.core.effects import Effect, effect_key
from penstock.core.produce import find_topic
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TooLarge,
)
from penstock.model.limits import MAX_REASON_BYTES, MAX_RESULT_BYTES
from penstock.model.records import COMMITTED, FAILED, PENDING, EffectSet
from penstock.model.units import utf8_bytes


def decide_begin(
    state: BrokerState, command: EffectCommand, lease_ms: int, now_ms: int
) -> EffectSet | Effect:
    """Returns a record if the owner shall run the effect; its text is why the effect failed last.
    Returns the effect if it is committed already."""
    topic, known = _find(state, command, now_ms)
    if known is not None and known.status == COMMITTED:
        return known
    if known is not None and _held_by_another(known, command.owner, now_ms):
        raise FailedPrecondition(f"the effect is being run by owner {known.owner!r}")
    if known is None:
        _check_entries(state)
    last_error = known.text if known is not None else ""
    return _set(topic, command, PENDING, now_ms + lease_ms, last_error, now_ms)


def decide_renew(
    state: BrokerState, command: EffectCommand, lease_ms: int, now_ms: int
) -> EffectSet:
    topic, known = _find_own(state, command, now_ms)
    return _set(topic, command, PENDING, now_ms + lease_ms, known.text, now_ms)


def decide_commit(
    state: BrokerState, command: EffectCommand, result: str, now_ms: int
) -> EffectSet | None:
    """Returns None if this owner has committed it before: the first result stands."""
    if utf8_bytes(result) > MAX_RESULT_BYTES:
        raise TooLarge(f"result is longer than {MAX_RESULT_BYTES} bytes")
    topic, known = _find(state, command, now_ms)
    if known is not None and known.status == COMMITTED and known.owner == command.owner:
        return None
    _check_own(known, command)
    check_results(state, len(result))
    return _set(topic, command, COMMITTED, 0, result, now_ms)


def decide_fail(state: BrokerState, command: EffectCommand, reason: str, now_ms: int) -> EffectSet:
    topic, _ = _find_own(state, command, now_ms)
    return _set(topic, command, FAILED, 0, reason[:MAX_REASON_BYTES], now_ms)


def find_effect(state: BrokerState, command: EffectCommand, now_ms: int) -> Effect:
    """Returns the effect as it is now, whoever owns it."""
    _, known = _find(state, command, now_ms)
    if known is None:
        raise NotFound("no such effect: it was never begun, or it has expired")
    return known


def _find(state: BrokerState, command: EffectCommand, now_ms: int) -> tuple[Topic, Effect | None]:
    if not command.key:
        raise InvalidArgument("key is required")
    topic = find_topic(state, command.topic)
    key = effect_key(command.tenant_id, command.key)
    known = topic.effects.get(command.group, key)
    if known is not None and known.expires <= now_ms:
        group = topic.groups.get(command.group)
        if group is None or key not in group.open_effects:
            known = None
    return topic, known


def _find_own(state: BrokerState, command: EffectCommand, now_ms: int) -> tuple[Topic, Effect]:
    topic, known = _find(state, command, now_ms)
    return topic, _check_own(known, command)


def _check_own(known: Effect | None, command: EffectCommand) -> Effect:
    if known is not None and known.status == COMMITTED:
        raise FailedPrecondition("the effect is committed already")
    if known is None or known.status != PENDING:
        raise FailedPrecondition("the effect is not begun; begin it first")
    if known.owner != command.owner:
        raise FailedPrecondition(f"the effect is held by owner {known.owner!r}")
    return known


def _held_by_another(known: Effect, owner: str, now_ms: int) -> bool:
    return known.status == PENDING and known.owner != owner and known.lease_until > now_ms


def _check_entries(state: BrokerState) -> None:
    """Raises ResourceExhausted if there is no room for another effect: none is dropped early."""
    limit = state.limits.max_idempotency_keys
    if state.effect_totals.entries >= limit:
        raise ResourceExhausted(f"{limit} effects are remembered", limit="idempotency_keys")


def check_results(state: BrokerState, more_bytes: int) -> None:
    """Raises ResourceExhausted if results of so many bytes more do not fit."""
    if state.effect_totals.text_bytes + more_bytes > state.limits.memory_bytes // 4:
        raise ResourceExhausted("the results of effects fill their memory", limit="memory_bytes")


def _set(
    topic: Topic, command: EffectCommand, status: int, lease_until: int, text: str, now_ms: int
) -> EffectSet:
    key = effect_key(command.tenant_id, command.key)
    return EffectSet(topic.id, now_ms, command.group, key, status, command.owner, lease_until, text)
