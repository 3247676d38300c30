"""Publishes a streaming query's progress as the progress of a group at the broker.

Lag and retention at the broker then follow the query. A source with the option `group` writes its
group and its broker's address into its offsets. This listener receives every batch after Spark has
committed it, the last one too; a source's own `commit` comes one batch late, and never for the
last. Invariant: only committed progress is published, and no failure here reaches a query. What
could not be published is published with the next event.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.model.errors import PenstockError, Unauthenticated
from penstock.model.tenancy import DEFAULT
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import JOURNAL, Positions, TopicPartition, publish
from penstock.spark.options import BrokerSettings

LAST_EVENTS_MS = 5000

log = logging.getLogger(__name__)


class FollowedGroup(NamedTuple):
    """A group at a broker, in a topic or a stream or, with an empty topic, in the journal."""

    url: str
    group: str
    topic: str
    topic_id: int
    tenant: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        return f"group {self.group} in {self.topic or 'the journal'}"


class SourceOffset(msgspec.Struct):
    """The part of a source's offset with a group's progress. Other sources have no group."""

    group: str = ""
    url: str = ""
    records: dict[str, dict[int, int]] = {}
    events: dict[str, int] = {}
    ids: dict[str, int] = {}
    journal: int | None = None
    tenant: str = ""
    namespace: str = ""

    def positions(self) -> Positions:
        found = {
            TopicPartition(topic, number, self.ids.get(topic, 0)): at
            for topic, partitions in self.records.items()
            for number, at in partitions.items()
        }
        scope = (self.tenant or DEFAULT, self.namespace or DEFAULT)
        for stream, at in self.events.items():
            found[TopicPartition(stream, 0, self.ids.get(stream, 0), scope)] = at
        return found if self.journal is None else found | {JOURNAL: self.journal}


_read = msgspec.json.Decoder(SourceOffset, strict=False).decode


class ProgressListener(StreamingQueryListener):
    """Spark calls it for one event after the other, and waits: so it tries a broker once."""

    def __init__(self) -> None:
        self._brokers: dict[str, BrokerSettings] = {}
        self._unpublished: dict[FollowedGroup, Positions] = {}
        self._failing: set[FollowedGroup] = set()

    def know(self, settings: BrokerSettings) -> None:
        """Remembers the token for a broker. Others get the environment's token."""
        self._brokers[settings.url] = settings

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        for source in event.progress.sources:
            self._add(source.endOffset)
        self._publish()

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._publish()

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._publish()

    def _add(self, end_offset: str | None) -> None:
        try:
            reached = _read(end_offset or "{}")
        except msgspec.DecodeError:
            return  # a source of another kind
        if reached.group and reached.url:
            for place, at in reached.positions().items():
                member = FollowedGroup(
                    reached.url,
                    reached.group,
                    place.topic,
                    place.topic_id,
                    reached.tenant,
                    reached.namespace,
                )
                self._unpublished.setdefault(member, {})[place] = at

    def _publish(self) -> None:
        for member in list(self._unpublished):
            try:
                self._publish_one(member)
            except PenstockError as error:
                self._warn(member, error)
                if error.retryable:
                    continue
            else:
                self._failing.discard(member)
            del self._unpublished[member]

    def _publish_one(self, member: FollowedGroup) -> None:
        known = self._brokers.get(member.url) or BrokerSettings.of(url=member.url)
        settings = replace(known, tenant=member.tenant, namespace=member.namespace)
        with BrokerConnection(settings) as broker:
            publish(broker, member.group, self._unpublished[member])

    def _warn(self, member: FollowedGroup, error: PenstockError) -> None:
        """Warns once, until publishing works again."""
        if member in self._failing:
            return
        self._failing.add(member)
        if isinstance(error, Unauthenticated):
            log.warning(
                "progress of %s is published only when its query plans the next batch, and not "
                "after the last batch: this listener has no token that %s accepts. Give it one "
                "with penstock.spark.follow(spark, url, token)",
                member,
                member.url,
            )
        else:
            log.warning("progress of %s was not published: %s", member, error)


_listeners: WeakKeyDictionary[SparkSession, ProgressListener] = WeakKeyDictionary()


@atexit.register
def _leave() -> None:
    """Publishes the last batch of a program that ends without stopping Spark, and removes the
    listeners so that Java does not call them later."""
    for spark, listener in list(_listeners.items()):
        # Spark, or its Java, may have ended before.
        with suppress(Py4JError, OSError, AttributeError):
            spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(LAST_EVENTS_MS)
            spark.streams.removeListener(listener)


def follow(spark: SparkSession, url: str | None = None, token: str | None = None) -> None:
    """Publishes the progress of the session's queries whose source has a `group`, each to the
    broker it reads from. Call it again only to give the token of another broker."""
    settings = BrokerSettings.of(url=url, token=token)
    listener = _listeners.get(spark)
    if listener is None:
        listener = _listeners[spark] = ProgressListener()
        spark.streams.addListener(listener)
    listener.know(settings)
