"""The seam between the wire and a broker: what every engine offers.

Commands take `done`, which is called once, on the loop, with the outcome or the PenstockError
that refused it, and never before what it says is durable. Validation, hashing, backoff, the
max_attempts decision and status codes are pure functions of core and model that every engine uses.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.core.effect_rules import EffectCommand
from penstock.core.produce import Produce
from penstock.core.settle import Settle
from penstock.engine.consumers import Consumer, Sink
from penstock.engine.journal import Done
from penstock.model.limits import Limits


class Health(msgspec.Struct, frozen=True):
    """`ready` is false when nothing can be written; `reason` says why."""

    ready: bool
    reason: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    wal_enabled: bool
    fsync: str
    durability: str
    """What a 2xx means here, in words."""


class Engine(Protocol):
    limits: Limits
    capabilities: Capabilities

    def produce(self, command: Produce, done: Done) -> None:
        """Outcome: the stored Message, or None for a duplicate."""
        ...

    def produce_many(self, commands: list[Produce], done: Done) -> None:
        """Outcome: a list with an outcome or an error per command, in order; one commit."""
        ...

    def ack(self, command: Settle, done: Done) -> None: ...

    def ack_many(self, commands: list[Settle], done: Done) -> None: ...

    def nack(self, command: Settle, reason: str, done: Done) -> None: ...

    def extend(self, command: Settle, lease_ms: int, done: Done) -> None: ...

    def begin_effect(self, command: EffectCommand, lease_ms: int, done: Done) -> None:
        """Outcome: None to run it, or the committed Effect."""
        ...

    def renew_effect(self, command: EffectCommand, lease_ms: int, done: Done) -> None: ...

    def commit_effect(self, command: EffectCommand, result: str, done: Done) -> None: ...

    def fail_effect(self, command: EffectCommand, reason: str, done: Done) -> None: ...

    def create_topic(self, name: str, partitions: int, done: Done) -> None:
        """Outcome: True when created, False when it existed."""
        ...

    def delete_topic(self, name: str, done: Done) -> None: ...

    def configure_topic(
        self, name: str, retention_ms: int | None, retention_bytes: int | None, done: Done
    ) -> None: ...

    def delete_group(self, topic: str, group: str, done: Done) -> None: ...

    def list_topics(self, done: Done) -> None:
        """Outcome: the names, sorted."""
        ...

    def describe_topic(self, name: str, done: Done) -> None:
        """Outcome: a TopicReport."""
        ...

    def open_consumer(
        self,
        topic: str,
        group: str,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        done: Done,
    ) -> None:
        """Outcome: a Consumer. Nothing is delivered to `sink` before `done` was called."""
        ...

    def health(self) -> Health: ...

    def end_streams(self, reason: str) -> None:
        """Ends every open stream, as a broker does that is about to stop."""
        ...

    def close(self) -> None:
        """Flushes, syncs and lets go of the data directory."""
        ...


__all__ = ["Capabilities", "Consumer", "Done", "Engine", "Health", "Sink"]
