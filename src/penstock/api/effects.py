"""Consumer-side effects: the command that names one, and its reports."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.api.outcomes import Done


class EffectCommand(msgspec.Struct, gc=False):
    """The effect that a command is about, and its owner."""

    tenant_id: str
    topic: str
    group: str
    key: str
    owner: str


class BegunEffect(msgspec.Struct, frozen=True):
    """`text` is the result if the effect is committed, else the reason of its last failure."""

    is_committed: bool
    text: str


class EffectReport(msgspec.Struct, frozen=True):
    """`lease_ms` is the rest of the owner's lease. An effect that is pending again after a failure
    still has its `last_error`."""

    status: str
    owner: str
    lease_ms: int
    result: str
    last_error: str


class EffectsPart(Protocol):
    def begin(self, command: EffectCommand, lease_ms: int, done: Done[BegunEffect]) -> None: ...

    def look_up(self, command: EffectCommand, done: Done[EffectReport]) -> None:
        """Reports the effect to any owner."""
        ...

    def renew(self, command: EffectCommand, lease_ms: int, done: Done[None]) -> None: ...

    def commit(self, command: EffectCommand, result: str, done: Done[None]) -> None: ...

    def fail(self, command: EffectCommand, reason: str, done: Done[None]) -> None: ...
