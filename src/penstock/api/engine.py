"""The `Engine` protocol: everything that a server asks of a broker.

Topics and producers are named by their full names (model/scopes.py); reports and errors have plain
ones. Validation, hashing, backoff and the decisions about attempts are pure functions of `core`,
which every engine can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.api.access import AccessPart
from penstock.api.audit import AuditPart
from penstock.api.caches import CachesPart
from penstock.api.consumers import Consumer, Sink
from penstock.api.durability import Capabilities, Health
from penstock.api.effects import EffectsPart
from penstock.api.journal import JournalPart
from penstock.api.messages import Produce, ProduceOutcome, Settle, SettleOutcome
from penstock.api.metrics import EngineMetrics
from penstock.api.outcomes import Done
from penstock.api.quotas import QuotasPart
from penstock.api.ranges import RangesPart
from penstock.api.registry import RegistryPart
from penstock.api.streams import StreamsPart
from penstock.api.tokens import TokensPart
from penstock.api.topics import NO_RETRIES, RetryDefaults, TopicReport
from penstock.api.transactions import TransactionsPart
from penstock.api.writes import WritesPart
from penstock.model.limits import Limits
from penstock.model.progress import Reached
from penstock.model.records import Message
from penstock.model.scopes import Scope


class Engine(Protocol):
    limits: Limits
    capabilities: Capabilities

    @property
    def ranges(self) -> RangesPart: ...

    @property
    def journal(self) -> JournalPart: ...

    @property
    def registry(self) -> RegistryPart: ...

    @property
    def streams(self) -> StreamsPart: ...

    @property
    def caches(self) -> CachesPart: ...

    @property
    def writes(self) -> WritesPart: ...

    @property
    def effects(self) -> EffectsPart: ...

    @property
    def transactions(self) -> TransactionsPart: ...

    @property
    def quotas(self) -> QuotasPart: ...

    @property
    def tokens(self) -> TokensPart: ...

    @property
    def access(self) -> AccessPart: ...

    @property
    def audit(self) -> AuditPart: ...

    def produce(self, command: Produce, done: Done[Message | None]) -> None:
        """Gives the stored message, or None for a duplicate."""
        ...

    def produce_many(self, commands: list[Produce], done: Done[list[ProduceOutcome]]) -> None:
        """Gives an outcome for each command, in order. All share one commit."""
        ...

    def ack(self, command: Settle, done: Done[None]) -> None: ...

    def ack_many(self, commands: list[Settle], done: Done[list[SettleOutcome]]) -> None:
        """Gives an outcome for each command, in order. All share one commit."""
        ...

    def nack(
        self,
        command: Settle,
        reason: str,
        done: Done[None],
        *,
        delay_ms: int | None = None,
        dead: bool = False,
    ) -> None:
        """Ends a delivery as failed. `delay_ms` replaces the backoff of the policy. With `dead` the
        message goes to the dead letters without a retry."""
        ...

    def release(self, command: Settle, done: Done[None]) -> None: ...

    def release_many(self, commands: list[Settle], done: Done[list[SettleOutcome]]) -> None:
        """Gives an outcome for each command, in order. All share one commit."""
        ...

    def extend(self, command: Settle, lease_ms: int, done: Done[None]) -> None: ...

    def create_topic(
        self,
        name: str,
        partitions: int,
        done: Done[bool],
        *,
        after_archive: bool | None = None,
        retries: RetryDefaults = NO_RETRIES,
    ) -> None:
        """Gives False if the topic existed already."""
        ...

    def delete_topic(self, name: str, done: Done[None]) -> None: ...

    def configure_topic(
        self,
        name: str,
        retention_ms: int | None,
        retention_bytes: int | None,
        done: Done[None],
        *,
        after_archive: bool | None = None,
        retries: RetryDefaults = NO_RETRIES,
    ) -> None: ...

    def delete_group(self, topic: str, group: str, done: Done[None]) -> None: ...

    def set_progress(
        self,
        topic: str,
        group: str,
        reached: Sequence[Reached],
        done: Done[list[Reached]],
        *,
        topic_id: int | None = None,
    ) -> None:
        """Gives the group's new position in each partition named. With `topic_id` the topic must
        have this id, and not be a later one of the same name."""
        ...

    def list_topics(self, scope: Scope, done: Done[list[str]]) -> None:
        """Gives the plain names of the topics in the scope, sorted."""
        ...

    def describe_topic(self, name: str, done: Done[TopicReport]) -> None: ...

    def open_consumer(
        self,
        topic: str,
        group: str,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        done: Done[Consumer],
    ) -> None:
        """Opens a consumer. Nothing is delivered to `sink` before `done` was called."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> EngineMetrics: ...

    def end_streams(self, reason: str) -> None:
        """Ends every open stream, because the broker is about to stop."""
        ...

    def close(self) -> None:
        """Flushes, syncs and releases the data directory."""
        ...
