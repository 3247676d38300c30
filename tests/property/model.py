"""What an outside observer knows of a broker: a plain model, kept beside the real one.

It remembers what was answered and what was delivered, and says of every new delivery and every
look at the broker whether it can be. It knows no records, no cursors and no pages. Where a crash
came before an answer, both outcomes are allowed (`maybe`), and the broker is asked which it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.core.effects import effect_key
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.item import Item
from penstock.model.progress import Reached
from penstock.model.records import Message

DEFAULT_BACKOFF_MS, MAX_DEFAULT_BACKOFF_MS = 250, 30_000
NEVER_MS = 2**60


@dataclass
class Seen:
    """What became of one message in one group, as far as it was seen."""

    attempts: int = 0
    owner: str = ""
    lease_until: int = 0
    not_before: int = 0
    errors: set[str] = field(default_factory=lambda: {""})
    delivery_id: str = ""
    is_nacked: bool = False
    is_condemned: bool = False
    """Somebody asked for it to be dead-lettered."""
    before: Seen | None = None
    """As it was before the last delivery, which a release undoes."""
    was_uncertain: bool = False

    def is_leased(self, now_ms: int) -> bool:
        return not self.is_nacked and self.lease_until > now_ms


@dataclass
class GroupModel:
    owed: set[int]
    done: set[int] = field(default_factory=set)
    seen: dict[int, Seen] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Came back unwritten: may be delivered first after later ones were."""
    settling: set[int] = field(default_factory=set)
    """Acked in a batch whose answer waits for its other items."""
    maybe_done: set[int] = field(default_factory=set)
    """Acked before a crash, without an answer."""
    delivery_ids: dict[int, set[str]] = field(default_factory=dict)
    uncertain: set[int] = field(default_factory=set)
    """In flight at a crash, seen or not: may have been counted without having been seen."""

    def of(self, offset: int) -> Seen:
        """Of a message that was delivered at least once."""
        return self.seen[offset]


@dataclass
class TopicModel:
    name: str
    partitions: int
    messages: dict[int, Message] = field(default_factory=dict)
    groups: dict[str, GroupModel] = field(default_factory=dict)
    keys: dict[tuple[str, str], int] = field(default_factory=dict)
    committed: dict[tuple[str, str], int] = field(default_factory=dict)
    """Groups and effect keys committed at some time, and until when they are so for certain."""
    trimmed: set[int] = field(default_factory=set)
    has_retention: bool = False
    max_attempts: set[int] = field(default_factory=lambda: {0})
    """All that were ever set: a failure before the last change was judged by an earlier one."""
    backoff_ms: int = 0

    @property
    def is_dead_letter(self) -> bool:
        return self.name.startswith("dlq.")

    def add(self, message: Message, ttl_ms: int) -> None:
        assert message.offset not in self.messages, "an offset was given twice"
        expected = max([-1, *self.messages, *self.trimmed]) + 1
        if self.has_retention:
            # Stored before a crash, never answered, and trimmed before anyone saw it.
            self.trimmed |= set(range(expected, message.offset))
        else:
            assert message.offset == expected, "offsets have a gap"
        self.messages[message.offset] = message
        for group in self.groups.values():
            group.owed.add(message.offset)
        envelope = message.envelope
        if envelope is not None and envelope.idempotency_key and envelope.dlq is None:
            key = (envelope.tenant_id, envelope.idempotency_key)
            assert self.keys.get(key, 0) <= message.ts, f"{key} was stored twice within its TTL"
            self.keys[key] = message.ts + ttl_ms

    def below(self, reached: Reached) -> set[int]:
        """What progress that is published says is done."""
        return {
            offset
            for offset, message in self.messages.items()
            if message.partition == reached.partition and offset < reached.next
        }

    def group(self, name: str) -> GroupModel:
        if name not in self.groups:
            self.groups[name] = GroupModel(owed=set(self.messages))
        return self.groups[name]


def policy_of(message: Message) -> RetryPolicy | None:
    return message.envelope.retry_policy if message.envelope is not None else None


def identity(envelope: Envelope) -> tuple[str, ...]:
    """What a dead letter keeps."""
    return envelope.run_id, envelope.tenant_id, envelope.idempotency_key


def wait_ms(message: Message, attempts: int) -> int:
    """From the end of a delivery to the next one."""
    policy = policy_of(message)
    if policy is None:
        return 0
    wait: int = policy.backoff_ms * 2 ** (attempts - 1)
    return min(wait, policy.max_backoff_ms) if policy.max_backoff_ms else wait


def effect_key_of(message: Message) -> str:
    envelope = message.envelope
    if envelope is None or not envelope.idempotency_key:
        return ""
    return effect_key(envelope.tenant_id, envelope.idempotency_key)


class Model:
    """Every method raises AssertionError when the broker did what it must not."""

    def __init__(self, ttl_ms: int, max_in_flight: int) -> None:
        self.ttl_ms = ttl_ms
        self.max_in_flight = max_in_flight
        self.topics: dict[str, TopicModel] = {}
        self.buried: set[tuple[int, str, int]] = set()

    # -- deliveries ---------------------------------------------------------------------------

    def delivered(
        self, topic_name: str, group_name: str, owner: str, lease_ms: int, item: Item, now_ms: int
    ) -> None:
        topic = self.topics[topic_name]
        group = topic.groups[group_name]
        message = topic.messages.get(item.offset)
        assert message is not None, f"{item.offset} was never stored, or is trimmed"
        self._is_as_sent(item, message)
        assert item.offset not in group.done, f"{item.offset} is done, and was delivered again"
        assert item.offset in group.owed
        seen = group.seen.get(item.offset) or Seen()
        assert not seen.is_leased(now_ms), f"{item.offset} is leased to {seen.owner!r}"
        assert now_ms >= seen.not_before, f"{item.offset} came before its backoff ended"
        self._counts(topic, group, seen, item)
        until = topic.committed.get((group_name, effect_key_of(message)), 0)
        assert now_ms >= until, f"the effect of {item.offset} is committed"
        known_ids = group.delivery_ids.setdefault(item.offset, set())
        assert item.delivery_id not in known_ids, f"{item.delivery_id} names two deliveries"
        known_ids.add(item.delivery_id)
        group.seen[item.offset] = seen
        seen.before = replace(seen)
        seen.was_uncertain = item.offset in group.uncertain
        seen.delivery_id = item.delivery_id
        seen.attempts = item.attempts
        seen.owner = owner
        seen.lease_until = now_ms + lease_ms
        seen.is_nacked = False
        seen.errors = {"ack_timeout"}
        wait = wait_ms(message, item.attempts)
        seen.not_before = seen.lease_until + wait
        group.uncertain.discard(item.offset)
        leased = sum(
            group.of(offset).is_leased(now_ms)
            for offset, other in topic.messages.items()
            if offset in group.seen
            and other.partition == item.partition
            and offset not in group.done | group.settling
        )
        assert leased <= self.max_in_flight, f"{leased} in flight"

    def _is_as_sent(self, item: Item, message: Message) -> None:
        assert (item.key, item.value, item.partition) == (
            message.key,
            message.value,
            message.partition,
        )
        assert (item.envelope or None) == message.envelope

    def _counts(self, topic: TopicModel, group: GroupModel, seen: Seen, item: Item) -> None:
        is_uncertain = item.offset in group.uncertain
        assert item.attempts > seen.attempts, "fewer attempts than deliveries"
        if not is_uncertain:
            assert item.attempts == seen.attempts + 1, "a delivery was counted that never was"
        allowed = seen.errors | ({"ack_timeout"} if is_uncertain else set())
        assert item.last_error in allowed, f"last_error {item.last_error!r} is not {allowed}"
        policy = policy_of(topic.messages[item.offset])
        if policy is not None and policy.max_attempts and not topic.is_dead_letter:
            assert item.attempts <= policy.max_attempts, "one attempt too many"
        elif 0 not in topic.max_attempts and not topic.is_dead_letter:
            assert item.attempts <= max(topic.max_attempts), "more than the topic allows"

    def in_order(self, topic_name: str, group_name: str, unwritten: set[int]) -> None:
        """Nothing was delivered for the first time while something before it was not."""
        topic = self.topics[topic_name]
        group = topic.groups[group_name]
        excused = group.done | group.late | group.uncertain | unwritten
        last: dict[int, int] = {}
        for offset, message in sorted(topic.messages.items(), reverse=True):
            if offset in group.seen:
                last.setdefault(message.partition, offset)
            elif message.partition in last and offset not in excused:
                later = last[message.partition]
                raise AssertionError(f"{offset} was passed over by the first delivery of {later}")

    # -- settling -----------------------------------------------------------------------------

    def acked(self, topic: str, group: str, offset: int, now_ms: int) -> None:
        model = self.topics[topic].groups[group]
        model.done.add(offset)
        self._keep_effect(topic, group, offset, now_ms)

    def progressed(self, topic: str, group: str, reached: Reached, now_ms: int) -> None:
        model = self.topics[topic].groups[group]
        for offset in self.topics[topic].below(reached) - model.done:
            model.done.add(offset)
            if offset in model.seen:
                self._keep_effect(topic, group, offset, now_ms)

    def condemned(self, topic: str, group: str, offset: int) -> None:
        """It is about to be said dead: the copy may be seen before the answer."""
        self.topics[topic].groups[group].of(offset).is_condemned = True

    def nacked(
        self,
        topic_name: str,
        group: str,
        offset: int,
        reason: str,
        now_ms: int,
        *,
        delay_ms: int | None = None,
        dead: bool = False,
    ) -> None:
        topic = self.topics[topic_name]
        seen = topic.groups[group].of(offset)
        message = topic.messages[offset]
        if seen.is_leased(now_ms):
            wait = wait_ms(message, seen.attempts)
            if delay_ms is not None:
                wait = delay_ms
            elif policy_of(message) is None:
                first = topic.backoff_ms or DEFAULT_BACKOFF_MS
                wait = min(first * 2 ** (seen.attempts - 1), MAX_DEFAULT_BACKOFF_MS)
            seen.not_before = now_ms + wait
        if dead:
            seen.not_before = NEVER_MS
        seen.is_nacked = True
        seen.errors = {reason}

    def released(self, topic: str, group: str, offset: int, now_ms: int) -> None:
        """The last delivery is as if it had never been, but for its delivery_id."""
        known = self.topics[topic].groups[group]
        seen = known.of(offset)
        assert seen.is_leased(now_ms), "a delivery was released whose lease had ended"
        before = seen.before or Seen()
        if seen.was_uncertain:
            known.uncertain.add(offset)
        seen.attempts -= 1
        seen.owner = before.owner
        seen.errors = before.errors
        seen.delivery_id = before.delivery_id
        seen.not_before = now_ms
        seen.is_nacked = True

    def extended(self, topic_name: str, group: str, offset: int, lease_ms: int, now: int) -> None:
        topic = self.topics[topic_name]
        seen = topic.groups[group].of(offset)
        wait = wait_ms(topic.messages[offset], seen.attempts)
        seen.lease_until = now + lease_ms
        seen.not_before = seen.lease_until + wait

    def restarted(self, now_ms: int, *, is_crash: bool) -> None:
        """Leases end; what was in flight may have been counted, sent or not."""
        for topic in self.topics.values():
            for group in topic.groups.values():
                if is_crash:
                    group.uncertain |= set(topic.messages) - group.done
                for offset, seen in group.seen.items():
                    if offset not in group.done and seen.is_leased(now_ms):
                        wait = wait_ms(topic.messages[offset], seen.attempts)
                        seen.lease_until = now_ms
                        seen.not_before = now_ms + wait

    def last_due(self, now_ms: int) -> int:
        """By when everything seen may be delivered again."""
        due = [
            seen.not_before
            for topic in self.topics.values()
            for group in topic.groups.values()
            for offset, seen in group.seen.items()
            if offset not in group.done and seen.not_before != NEVER_MS
        ]
        return max([now_ms, *due])

    def _keep_effect(self, topic_name: str, group: str, offset: int, now_ms: int) -> None:
        """The entry's last TTL begins with the end of its message."""
        topic = self.topics[topic_name]
        message = topic.messages.get(offset)
        if message is not None:
            key = (group, effect_key_of(message))
            if topic.committed.get(key, 0) > now_ms:
                topic.committed[key] = now_ms + self.ttl_ms

    # -- looking at the broker ----------------------------------------------------------------

    def finished(self, topic_name: str, group_name: str, offsets: set[int], held: set[int]) -> None:
        """Of the messages held, the broker says these are done for the group: each for a reason,
        and none is missing."""
        topic = self.topics[topic_name]
        group = topic.groups[group_name]
        lost = (group.done & held) - offsets
        assert not lost, f"{topic_name}/{group_name}: {lost} are done and came back"
        for offset in offsets - group.done:
            is_skipped = self._is_skipped(topic, group_name, offset)
            has_reason = is_skipped or offset in group.maybe_done
            assert has_reason, f"{topic_name}/{group_name}: {offset} was forgotten"
            group.done.add(offset)

    def _is_skipped(self, topic: TopicModel, group: str, offset: int) -> bool:
        return (group, effect_key_of(topic.messages[offset])) in topic.committed

    def appeared(self, topic_name: str, found: dict[int, Message], maybe: set[str]) -> None:
        """The broker holds these messages: as they were stored, and none came from nowhere."""
        topic = self.topics[topic_name]
        for offset, message in sorted(found.items()):
            if offset in topic.messages:
                assert message == topic.messages[offset], f"{offset} has changed"
                continue
            if topic.is_dead_letter and message.envelope and message.envelope.dlq:
                self._buried(message, message.envelope)
            else:
                assert message.value in maybe, f"{message.value!r} was never answered"
                for group in topic.groups.values():
                    group.uncertain.add(offset)
            topic.add(message, self.ttl_ms)

    def vanished(self, topic_name: str, found: dict[int, Message]) -> None:
        """What the broker does not hold was finished by every group, and retention asked for."""
        topic = self.topics[topic_name]
        for offset in set(topic.messages) - set(found):
            assert topic.has_retention, f"{topic_name}: {offset} is lost"
            late = [
                name
                for name, group in topic.groups.items()
                if offset in group.owed - group.done - group.maybe_done
                and not self._is_skipped(topic, name, offset)
            ]
            assert not late, f"{topic_name}: {offset} was trimmed before {late} had it"
            del topic.messages[offset]
            topic.trimmed.add(offset)

    def maybe_buried(self, copy: Message) -> None:
        story = copy.envelope.dlq if copy.envelope is not None else None
        assert story is not None
        source = self.topics.get(story.original_topic)
        if source is not None and story.group in source.groups:
            source.groups[story.group].maybe_done.add(story.original_offset)

    def _buried(self, copy: Message, envelope: Envelope) -> None:
        story = envelope.dlq
        assert story is not None
        source = self.topics.get(story.original_topic)
        group = source.groups.get(story.group) if source is not None else None
        if source is None or group is None:
            return
        assert not source.is_dead_letter, "a dead letter died"
        offset = story.original_offset
        message = source.messages[offset]
        assert offset not in group.done, f"{offset} was done, or is buried twice"
        policy = policy_of(message)
        own = policy.max_attempts if policy is not None else 0
        limits = {own} if own else source.max_attempts - {0}
        seen = group.seen.get(offset) or Seen()
        is_due = any(0 < limit <= story.attempts for limit in limits)
        assert is_due or seen.is_condemned, "it had attempts left, and nobody said it was dead"
        assert story.retry_policy == policy, "the policy is not kept"
        assert (copy.key, copy.value) == (message.key, message.value)
        assert story.original_partition == message.partition
        assert identity(envelope) == identity(message.envelope or Envelope())
        if offset not in group.uncertain:
            assert group.of(offset).attempts == story.attempts
            assert story.last_error in group.of(offset).errors
        group.done.add(offset)
        self._keep_effect(source.name, story.group, offset, copy.ts)
