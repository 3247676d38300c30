"""Commands on the effects of consumers: begin, look up, renew, commit, fail.

Must not know messages: an effect ends with its message by the records of the message.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.api.effects import BegunEffect, EffectCommand, EffectReport
from penstock.api.outcomes import Done
from penstock.core.effect_rules import (
    decide_begin,
    decide_commit,
    decide_fail,
    decide_renew,
    find_effect,
)
from penstock.core.effects import Effect
from penstock.core.state import BrokerState
from penstock.engine.ledger import Ledger
from penstock.engine.report import report_effect
from penstock.model.records import Record


class EffectCommands:
    """See `EffectsPart` for the interface."""

    def __init__(self, state: BrokerState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger

    def begin(self, command: EffectCommand, lease_ms: int, done: Done[BegunEffect]) -> None:
        def decide() -> BegunEffect:
            decision = decide_begin(self._state, command, lease_ms, self._ledger.now_ms())
            if isinstance(decision, Effect):
                return BegunEffect(is_committed=True, text=decision.text)
            self._ledger.must_record(decision)
            return BegunEffect(is_committed=False, text=decision.text)

        self._ledger.decide(decide, done)

    def look_up(self, command: EffectCommand, done: Done[EffectReport]) -> None:
        def decide() -> EffectReport:
            now_ms = self._ledger.now_ms()
            return report_effect(find_effect(self._state, command, now_ms), now_ms)

        self._ledger.decide(decide, done)

    def renew(self, command: EffectCommand, lease_ms: int, done: Done[None]) -> None:
        self._change(lambda now_ms: decide_renew(self._state, command, lease_ms, now_ms), done)

    def commit(self, command: EffectCommand, result: str, done: Done[None]) -> None:
        self._change(lambda now_ms: decide_commit(self._state, command, result, now_ms), done)

    def fail(self, command: EffectCommand, reason: str, done: Done[None]) -> None:
        self._change(lambda now_ms: decide_fail(self._state, command, reason, now_ms), done)

    def _change(self, decide: Callable[[int], Record | None], done: Done[None]) -> None:
        """Runs a command that writes one record, or none, and answers with nothing."""

        def run() -> None:
            record = decide(self._ledger.now_ms())
            if record is not None:
                self._ledger.must_record(record)

        self._ledger.decide(run, done)
