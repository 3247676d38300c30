"""A streaming query's progress as a group's at the broker, where lag and retention see it.

A source with the option `group` writes its group and its broker into its offsets. This listener is
told of every batch after Spark has committed it, the last one too (a source's own `commit` comes a
batch late, and never for the last), and says so to the broker. Invariant: only what is committed is
said, and no failure here reaches a query. What could not be said is said with the next event.
"""

from __future__ import annotations

import atexit
import logging
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.model.errors import PenstockError, Unauthenticated
from penstock.spark.broker import Broker
from penstock.spark.logs import JOURNAL, Positions, TopicPartition, publish
from penstock.spark.options import BrokerSettings

LAST_WORDS_MS = 5000

log = logging.getLogger(__name__)


class FollowedGroup(NamedTuple):
    """A group at a broker, in a topic or, without one, the journal."""

    url: str
    group: str
    topic: str
    topic_id: int

    def __str__(self) -> str:
        return f"group {self.group} in {self.topic or 'the journal'}"


class SourceOffset(msgspec.Struct):
    """The part of a source's offsets that names a group's progress; others have no group."""

    group: str = ""
    url: str = ""
    records: dict[str, dict[int, int]] = {}
    ids: dict[str, int] = {}
    journal: int | None = None

    def positions(self) -> Positions:
        found = {
            TopicPartition(topic, number, self.ids.get(topic, 0)): at
            for topic, partitions in self.records.items()
            for number, at in partitions.items()
        }
        return found if self.journal is None else found | {JOURNAL: self.journal}


_read = msgspec.json.Decoder(SourceOffset, strict=False).decode


class ProgressListener(StreamingQueryListener):
    """Events come one after the other, and those of all queries wait for each other: a broker is
    told in one try."""

    def __init__(self) -> None:
        self._brokers: dict[str, BrokerSettings] = {}
        self._owed: dict[FollowedGroup, Positions] = {}
        self._failing: set[FollowedGroup] = set()

    def know(self, settings: BrokerSettings) -> None:
        """The token for a broker; others are told with that of the environment, if any."""
        self._brokers[settings.url] = settings

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        for source in event.progress.sources:
            self._take(source.endOffset)
        self._pay()

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._pay()

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._pay()

    def _take(self, end_offset: str | None) -> None:
        try:
            reached = _read(end_offset or "{}")
        except msgspec.DecodeError:
            return  # a source of another kind
        if reached.group and reached.url:
            for place, at in reached.positions().items():
                member = FollowedGroup(reached.url, reached.group, place.topic, place.topic_id)
                self._owed.setdefault(member, {})[place] = at

    def _pay(self) -> None:
        for member in list(self._owed):
            try:
                self._pay_one(member)
            except PenstockError as error:
                self._warn(member, error)
                if error.retryable:
                    continue
            else:
                self._failing.discard(member)
            del self._owed[member]

    def _pay_one(self, member: FollowedGroup) -> None:
        settings = self._brokers.get(member.url) or BrokerSettings.of(url=member.url)
        with Broker(settings) as broker:
            publish(broker, member.group, self._owed[member])

    def _warn(self, member: FollowedGroup, error: PenstockError) -> None:
        """Once, until it is mended."""
        if member in self._failing:
            return
        self._failing.add(member)
        if isinstance(error, Unauthenticated):
            log.warning(
                "progress of %s is told by its query alone, when it looks for the next batch, and "
                "not after its last: this listener has no token that %s takes. "
                "penstock.spark.follow(spark, url, token) gives it one",
                member,
                member.url,
            )
        else:
            log.warning("progress of %s was not told: %s", member, error)


_listeners: WeakKeyDictionary[SparkSession, ProgressListener] = WeakKeyDictionary()


@atexit.register
def _leave() -> None:
    """A program that ends without stopping Spark leaves events behind: the last batch is told, and
    then nobody is called who is gone."""
    for spark, listener in list(_listeners.items()):
        # Spark, or its Java, may have ended before.
        with suppress(Py4JError, OSError, AttributeError):
            spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(LAST_WORDS_MS)
            spark.streams.removeListener(listener)


def follow(spark: SparkSession, url: str | None = None, token: str | None = None) -> None:
    """Publishes the progress of the session's queries whose source has a `group`, each to the
    broker it reads from. Needed again only for the token of another broker."""
    settings = BrokerSettings.of(url=url, token=token)
    listener = _listeners.get(spark)
    if listener is None:
        listener = _listeners[spark] = ProgressListener()
        spark.streams.addListener(listener)
    listener.know(settings)
