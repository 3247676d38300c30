"""What was sent to topics and what was seen of it: a plain model of the queue side.

It knows no sockets. A message is STORED once an answer said so or a reader found it, REFUSED once
an answer said that it is not stored, and UNKNOWN while its answer is lost: then it is there or not,
and ABSENT for good once a reader did not find it. Each promise that is found broken is a line in
`violations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.soak.read_paths import Row

Item = dict[str, Any]

UNKNOWN, STORED, REFUSED, ABSENT = "unknown", "stored", "refused", "absent"


@dataclass(slots=True, eq=False)
class Sent:
    value: str = field(repr=False)
    key: str
    partition: int
    envelope: dict[str, Any]
    max_attempts: int = 0
    """Of its own policy or of its topic; 0: it is never given up."""
    state: str = UNKNOWN
    offset: int | None = None
    may_come_later: bool = False
    """Its batch may be committed, and is then stored row by row, after a restart too."""

    @property
    def is_idempotent(self) -> bool:
        return "idempotency_key" in self.envelope


@dataclass(slots=True, eq=False)
class Story:
    """One message in one group: its deliveries and what was said of them."""

    round: int = 0
    attempts: set[int] = field(default_factory=set)
    earlier: int = 0
    """The highest attempt of the rounds before this one."""
    ack_sent: int = 0
    """The latest attempt that an ack was sent for, whatever became of it."""
    acked_in: int | None = None
    is_firm: bool = False
    """It was acked under a lease that cannot have ended."""
    nacked: dict[int, str] = field(default_factory=dict)
    is_dead: bool = False
    is_given_up: bool = False
    """It was nacked as dead; `is_dead` once its letter is found."""
    may_be_given_up: bool = False
    """The same, whatever was answered."""
    is_released: bool = False
    """A delivery of it was given back, so its number may come again, and later than others."""
    may_be_done: bool = False
    """Progress was published past it, or its effect was committed."""

    @property
    def may_be_finished(self) -> bool:
        return bool(self.ack_sent or self.is_dead or self.may_be_done)


class Group:
    def __init__(self) -> None:
        self.stories: dict[int, Story] = {}
        self.progress: dict[int, int] = {}
        self.effects: dict[tuple[str, str], tuple[str, int]] = {}
        """By tenant and key, the results of committed effects and the round of their commit."""
        self.maybe_effects: set[tuple[str, str]] = set()
        """Those whose commit has no answer."""

    def story(self, offset: int) -> Story:
        return self.stories.setdefault(offset, Story())


def effect_of(message: Sent) -> tuple[str, str]:
    """What the effect of a message is called: tenant and key."""
    return message.envelope.get("tenant_id", ""), message.envelope.get("idempotency_key", "")


class Topic:
    def __init__(self, name: str, partitions: int, groups: Iterable[str]) -> None:
        self.name = name
        self.partitions = partitions
        self.topic_id = 0
        self.has_retention = False
        self.max_attempts = 0
        self.sent: dict[str, Sent] = {}
        self.values: dict[int, str] = {}
        self.groups = {group: Group() for group in groups}
        self.letters: set[tuple[str, str]] = set()
        self.unanswered: list[Sent] = []
        """Idempotent, with no answer: to be sent again."""

    @property
    def dead_letters(self) -> str:
        return f"dlq.{self.name}"


class QueueModel:
    def __init__(self) -> None:
        self.round = 0
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.topics: dict[str, Topic] = {}

    def claim(self, is_true: object, text: str) -> None:
        if not is_true:
            self.violations.append(f"round {self.round}: {text}")

    # -- produce --------------------------------------------------------------------------------

    def stored(self, topic: Topic, message: Sent, result: dict[str, Any] | None = None) -> None:
        """An answer says so; `result` is that of a batch, with the place or as a duplicate."""
        if result is not None and result.get("duplicate"):
            self.claim(message.is_idempotent, f"a duplicate without a key: {message}")
            self.counts["duplicates"] += 1
        elif result is not None and "offset" in result:
            is_new = message.state != STORED
            self.claim(is_new or message.offset == result["offset"], f"stored again: {message}")
            self.found(
                topic, Row(result["partition"], result["offset"], message.key, message.value)
            )
        self.counts["produced"] += 1
        message.state = STORED

    def refused(self, message: Sent) -> None:
        """It is never there, also after a restart of a broker whose log failed."""
        if message.state == UNKNOWN and not message.is_idempotent:
            message.state = REFUSED
        self.counts["refused"] += 1

    def found(self, topic: Topic, row: Row) -> Sent | None:
        """A reader found a message: it was sent, as it is now, and nowhere else before."""
        message = topic.sent.get(row.value)
        if message is None:
            self.claim(False, f"{topic.name}: never sent: {row}")
            return None
        is_possible = message.state not in (REFUSED, ABSENT)
        self.claim(is_possible, f"{topic.name}: was {message.state}, and is there: {row}")
        as_sent = (message.key, message.partition)
        self.claim((row.key, row.partition) == as_sent, f"sent as {message}, found as {row}")
        there = topic.values.setdefault(row.offset, row.value)
        self.claim(there == row.value, f"{topic.name} @{row.offset}: {there[:40]!r}, now {row}")
        self.claim(message.offset in (None, row.offset), f"{message} is also at {row.offset}")
        message.offset = row.offset
        message.state = STORED
        return message

    # -- deliveries -----------------------------------------------------------------------------

    def delivered(self, topic: Topic, group: str, item: Item) -> Sent | None:
        row = Row(item["partition"], item["offset"], item["key"], item["value"])
        message = self.found(topic, row)
        if message is None:
            return None
        came = item.get("envelope", {})
        self.claim(message.envelope == came, f"sent as {message}, came as {item}")
        self._check_delivery(f"{topic.name}/{group}", item, message, topic.groups[group])
        self.counts["delivered"] += 1
        return message

    def _check_delivery(self, where: str, item: Item, message: Sent, group: Group) -> None:
        attempts, story = item["attempts"], group.story(item["offset"])
        if story.round != self.round:
            story.round, story.earlier = self.round, max(story.attempts, default=0)
        what = f"{where} got {item['offset']} with attempts {attempts}"
        is_fewer = attempts < story.earlier or (attempts == story.earlier and not story.is_released)
        self.claim(not is_fewer, f"{what} after {story.earlier}")
        is_again = attempts in story.attempts and not story.is_released
        self.claim(not is_again, f"{what} twice")
        story.attempts.add(attempts)
        limit = message.max_attempts
        self.claim(not limit or attempts <= limit, f"{what} of {limit}")
        self.claim(not story.is_dead, f"{what}, and is a dead letter")
        if story.acked_in is not None:
            is_later = self.round > story.acked_in
            is_beyond = not limit and attempts > story.ack_sent
            self.claim(not is_later and not is_beyond, f"{what}, acked in {story.acked_in}")
        reason = None if story.is_released else story.nacked.get(attempts - 1)
        said = item["last_error"]
        self.claim(reason in (None, said), f"{what}, nacked for {reason!r}, says {said!r}")
        committed = group.effects.get(effect_of(message), ("", self.round))
        self.claim(committed[1] == self.round, f"{what}; its effect was committed: {committed}")

    # -- settling -------------------------------------------------------------------------------

    def ack_answered(self, where: str, story: Story, item: Item, status: int, leased: bool) -> None:
        what = f"{where}: ack of {item['offset']} is {status}"
        if status == 204:
            self.counts["acked"] += story.acked_in is None
            story.is_firm |= leased
            story.acked_in = self.round if story.acked_in is None else story.acked_in
        elif status == 409:
            self.claim(not leased, what)
            was_done = story.acked_in not in (None, self.round)
            self.claim(not was_done, f"{what}; it was acked in round {story.acked_in}")
        else:
            self.claim(status == 503, what)

    def nack_answered(
        self, where: str, story: Story, item: Item, reason: str, status: int, leased: bool
    ) -> None:
        if status == 204:
            self.counts["nacked"] += 1
            story.nacked[item["attempts"]] = reason
        elif status == 409:
            self.claim(not leased, f"{where}: nack of {item['offset']} is 409")
        else:
            self.claim(status == 503, f"{where}: nack of {item['offset']} is {status}")
