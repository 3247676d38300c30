"""Looks at a broker at rest: what is stored, on every read path, against the model.

The broker serves, and nobody else asks anything meanwhile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.broker_process import eventually
from tests.soak.process import SoakBroker
from tests.soak.queue_model import ABSENT, STORED, UNKNOWN, QueueModel, Topic
from tests.soak.read_paths import ReadPaths, Rows, difference

DYING_S = 30.0


class QueueChecks:
    def __init__(self, broker: SoakBroker, model: QueueModel) -> None:
        self._broker = broker
        self._model = model
        self._paths = ReadPaths(broker)

    def check(self, *, with_audit: bool) -> None:
        """All topics; `with_audit`: also by a new group, which takes longest."""
        for topic in self._model.topics.values():
            # First the letters: what has died may be trimmed.
            self._check_letters(topic)
            self._check_topic(topic, with_audit)
            self._model.counts["verifications"] += 1

    def _check_topic(self, topic: Topic, with_audit: bool) -> None:
        ends = self._paths.ends(topic.name)
        self._model.claim(ends["topic_id"] == topic.topic_id, f"{topic.name} is another topic")
        by_path = self._paths.of(topic.name, with_audit=with_audit)
        rows = by_path["json"]
        for path, found in by_path.items():
            text = f"{topic.name}: {path} and json: {difference(found, rows)}"
            self._model.claim(found == rows, text)
            self._model.counts["read paths compared"] += 1
        earliest = {one["partition"]: one["earliest"] for one in ends["partitions"]}
        self._against_model(topic, rows, earliest)

    def _against_model(self, topic: Topic, rows: Rows, earliest: dict[int, int]) -> None:
        claim = self._model.claim
        for before, after in pairwise(rows):
            is_next = (before.partition, before.offset) < (after.partition, after.offset)
            claim(is_next, f"{topic.name}: {after[:2]} after {before[:2]}")
        values = {row.value for row in rows}
        claim(len(values) == len(rows), f"{topic.name}: a message is stored twice")
        for row in rows:
            self._model.found(topic, row)
        for message in topic.sent.values():
            if message.value in values:
                continue
            if message.state == UNKNOWN and not (message.may_come_later or message.is_idempotent):
                message.state = ABSENT
            if message.state != STORED:
                continue
            place = f"{topic.name} @{message.offset} of partition {message.partition}"
            claim(topic.has_retention, f"lost: {place} {message}")
            if message.offset is None:
                continue
            claim(message.offset < earliest[message.partition], f"lost: {place} {message}")
            for name, group in topic.groups.items():
                story = group.story(message.offset)
                claim(story.may_be_finished, f"{place} was trimmed before {name} had it: {story}")

    # -- dead letters ---------------------------------------------------------------------------

    def _check_letters(self, topic: Topic) -> None:
        """One for each message and group, of a message that may die, and not acked for certain.
        Messages that are out of attempts die a few at a time, so a look may come too soon."""
        eventually(lambda: self._look_at_letters(topic), lambda overdue: not overdue, DYING_S)

    def _look_at_letters(self, topic: Topic) -> list[str]:
        """Those that should have died and have not."""
        found = self._broker.client.get(f"/v1/topics/{topic.dead_letters}/offsets")
        letters: list[dict[str, Any]] = []
        if found.status_code == 404:
            self._model.claim(not topic.letters, f"{topic.dead_letters} is gone")
        else:
            for end in found.json()["partitions"]:
                letters += self._paths.lines(topic.dead_letters, end["partition"])
        seen: set[tuple[str, str]] = set()
        for letter in letters:
            self._check_letter(topic, letter, seen)
        self._model.claim(topic.letters <= seen, f"{topic.name}: dead letters are lost")
        self._model.counts["dead letters"] += len(seen - topic.letters)
        topic.letters = seen
        return [
            f"{topic.name}/{name} @{offset}"
            for name, group in topic.groups.items()
            for offset, story in group.stories.items()
            if (message := topic.sent.get(topic.values.get(offset, ""))) is not None
            and (story.is_given_up or message.max_attempts in story.nacked)
            and not (story.is_dead or story.may_be_done)
        ]

    def _check_letter(
        self, topic: Topic, letter: dict[str, Any], seen: set[tuple[str, str]]
    ) -> None:
        claim = self._model.claim
        group, offset = letter["dlq_group"], letter["dlq_original_offset"]
        claim((letter["value"], group) not in seen, f"{topic.name}: two dead letters: {letter}")
        seen.add((letter["value"], group))
        message = topic.sent.get(letter["value"])
        if message is None or group not in topic.groups:
            claim(False, f"{topic.name}: a dead letter of nothing: {letter}")
            return
        story = topic.groups[group].story(offset)
        claim(message.offset in (None, offset), f"{message} died elsewhere: {letter}")
        is_due = message.max_attempts == letter["dlq_attempts"] or story.may_be_given_up
        claim(is_due, f"{message} died early: {letter}")
        claim(not story.is_firm, f"{message} was acked by {group} and died: {letter}")
        reason = None if story.may_be_given_up else story.nacked.get(message.max_attempts)
        claim(reason in (None, letter["dlq_last_error"]), f"nacked for {reason}: {letter}")
        story.is_dead = True
