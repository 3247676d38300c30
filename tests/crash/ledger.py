"""What was sent to the broker and what was seen of it, written down outside of it.

Owns the sentences that hold whenever the broker is killed; each one it finds broken is a line in
`violations`. It knows no sockets and no processes: `load` tells it what happened, in the order it
was seen. A round is one life of the broker.

Two streams are read in any order, so a delivery may be seen after a later one of the same round.
Nothing of an earlier round is seen in a later one: streams are read to their end in between.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TOPIC = "work"
PARTITIONS = 3

Item = dict[str, Any]


@dataclass(slots=True, eq=False)
class Sent:
    """One message, however often it was sent: only one with an idempotency key is repeated."""

    value: str = field(repr=False)
    key: str
    partition: int
    envelope: dict[str, Any]
    writer: str
    number: int
    is_answered: bool = False

    @property
    def is_idempotent(self) -> bool:
        return "idempotency_key" in self.envelope

    @property
    def max_attempts(self) -> int:
        """0: it is never given up."""
        return int(self.envelope.get("retry_policy", {}).get("max_attempts", 0))

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"topic": TOPIC, "key": self.key, "value": self.value}
        return body | {"envelope": self.envelope} if self.envelope else body


@dataclass(slots=True, eq=False)
class History:
    """One message in one group: its deliveries, and what was said of them."""

    round: int = 0
    attempts: set[int] = field(default_factory=set)
    earlier: int = 0
    """The highest `attempts` of the rounds before this one."""
    ack_sent: int = 0
    """The latest delivery an ack was sent for, whatever became of it."""
    acked_in: int | None = None
    is_firm: bool = False
    """It was acked while its lease ran, so it cannot have been given up before."""
    nacked: dict[int, str] = field(default_factory=dict)


class Ledger:
    def __init__(self) -> None:
        self.round = 0
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.sent: dict[str, Sent] = {}
        self.unanswered: list[Sent] = []
        """Idempotent, with no answer: to be repeated."""
        self.unknown_acks: list[tuple[str, str, Item]] = []
        """By group and owner, with no answer: an ack may always be repeated."""
        self.places: dict[str, int] = {}
        self.values: dict[int, str] = {}
        self.histories: dict[str, dict[int, History]] = defaultdict(dict)

    def claim(self, is_true: object, text: str) -> None:
        if not is_true:
            self.violations.append(f"round {self.round}: {text}")

    # -- producing ----------------------------------------------------------------------------

    def answered(self, message: Sent) -> None:
        self.counts["produced"] += not message.is_answered
        message.is_answered = True

    def stored(self, message: Sent, result: dict[str, Any]) -> None:
        """An item of a batch's answer. driftq-57: a key is stored once."""
        if result.get("duplicate"):
            self.claim(message.is_idempotent, f"a duplicate without a key: {message}")
            self.counts["duplicates"] += 1
        elif "offset" not in result:
            self.claim(False, f"a produce was refused: {result}")
            return
        else:
            self.claim(not message.is_answered, f"a key was stored again: {message} {result}")
            self.claim(result["partition"] == message.partition, f"elsewhere: {result} {message}")
            self._place(result["offset"], message.value)
        self.answered(message)

    def _place(self, offset: int, value: str) -> None:
        """One offset has one message for ever, and the other way round."""
        there, at = self.values.setdefault(offset, value), self.places.setdefault(value, offset)
        self.claim(there == value, f"offset {offset} had {there[:40]!r}, has {value[:40]!r}")
        self.claim(at == offset, f"{value[:40]!r} was at {at}, is at {offset}")

    # -- consuming ----------------------------------------------------------------------------

    def history(self, group: str, offset: int) -> History:
        return self.histories[group].setdefault(offset, History())

    def delivered(self, group: str, item: Item) -> Sent | None:
        """The message this is a delivery of; None for one that was never sent."""
        message = self.sent.get(item["value"])
        self.claim(message is not None, f"never sent: {item}")
        if message is None:
            return None
        as_sent = message.key, message.partition, message.envelope
        came = item["key"], item["partition"], item.get("envelope", {})
        self.claim(as_sent == came, f"sent as {message}, came as {item}")
        self._place(item["offset"], item["value"])
        self._check_delivery(group, item, message, self.history(group, item["offset"]))
        return message

    def _check_delivery(self, group: str, item: Item, message: Sent, history: History) -> None:
        attempts, offset = item["attempts"], item["offset"]
        if history.round != self.round:
            history.round, history.earlier = self.round, max(history.attempts, default=0)
        what = f"{group} got {offset} with attempts {attempts}"
        # Never less than before and never the same twice: so never fewer than were seen.
        self.claim(attempts > history.earlier, f"{what} after {history.earlier}")
        self.claim(attempts not in history.attempts, f"{what} twice")
        history.attempts.add(attempts)
        limit = message.max_attempts
        self.claim(not limit or attempts <= limit, f"{what} of {limit}")
        self.counts["again"] += attempts > 1
        if history.acked_in is not None:
            is_later = self.round > history.acked_in
            is_beyond = not limit and attempts > history.ack_sent
            self.claim(not is_later and not is_beyond, f"{what}, acked in {history.acked_in}")
        reason = history.nacked.get(attempts - 1)
        said = item["last_error"]
        self.claim(reason in (None, said), f"{what}, nacked for {reason!r}, says {said!r}")

    def acking(self, group: str, item: Item) -> None:
        history = self.history(group, item["offset"])
        history.ack_sent = max(history.ack_sent, item["attempts"])

    def ack_answered(self, group: str, item: Item, status: int, *, is_leased: bool) -> None:
        """`is_leased`: the lease of this delivery cannot have ended."""
        history = self.history(group, item["offset"])
        if status == 204:
            self.counts["acked"] += history.acked_in is None
            history.is_firm |= is_leased
            history.acked_in = self.round if history.acked_in is None else history.acked_in
        else:
            what = f"ack of {item['offset']} by {group} is {status}"
            self.claim(status == 409 and not is_leased, what)
            # Of two answers of one round the earlier may be read later, so only other rounds tell.
            was_done = history.acked_in not in (None, self.round)
            self.claim(not was_done, f"{what}; it was acked in {history.acked_in}")

    def nack_answered(
        self, group: str, item: Item, reason: str, status: int, *, is_leased: bool
    ) -> None:
        if status == 204:
            self.counts["nacked"] += 1
            self.history(group, item["offset"]).nacked[item["attempts"]] = reason
        else:
            what = f"nack of {item['offset']} by {group} is {status}"
            self.claim(status == 409 and not is_leased, what)

    # -- at a start ---------------------------------------------------------------------------

    def check_topic(self, described: dict[str, Any], groups: Iterable[str]) -> None:
        """What the broker says of itself lies between what was answered and what was sent."""
        retained = sum(p["retained_msgs"] for p in described["partitions"])
        answered = sum(message.is_answered for message in self.sent.values())
        self.claim(
            max(answered, len(self.places)) <= retained <= len(self.sent),
            f"{answered} answered, {len(self.places)} seen, {retained} kept, {len(self.sent)} sent",
        )
        mortal = sum(message.max_attempts > 0 for message in self.sent.values())
        lags = {g["name"]: sum(p["lag"] for p in g["partitions"]) for g in described["groups"]}
        for group in groups:
            histories = self.histories[group]
            acked = sum(history.acked_in is not None for history in histories.values())
            tried = sum(
                history.ack_sent > 0 and not self.sent[self.values[offset]].max_attempts
                for offset, history in histories.items()
            )
            lag = lags.get(group, retained)
            self.claim(
                retained - tried - mortal <= lag <= retained - acked,
                f"{group} owes {lag} of {retained} after {acked} to {tried} acks, {mortal} mortal",
            )

    # -- at the end ---------------------------------------------------------------------------

    def check_stored(self, audit: list[Item]) -> None:
        """driftq-46: everything that was answered or seen is there, once, in order."""
        times = Counter(item["value"] for item in audit)
        self.claim(max(times.values(), default=0) <= 1, "a message is stored twice")
        for value, sent in self.sent.items():
            if sent.is_answered or value in self.places:
                self.claim(times[value], f"lost: {sent}")
        last: dict[int, int] = defaultdict(lambda: -1)
        numbers: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        for item in audit:
            partition, offset = item["partition"], item["offset"]
            self.claim(offset > last[partition], f"{offset} after {last[partition]}")
            last[partition] = offset
            message = self.sent.get(item["value"])
            if message is not None and not message.is_idempotent:
                writer = message.writer, partition
                self.claim(message.number > numbers[writer], f"out of the writer's order: {item}")
                numbers[writer] = message.number

    def check_finished(self, group: str, letters: list[Item]) -> None:
        """driftq-30, driftq-39: all of it was acked or dead-lettered, nothing was both or neither.

        `letters` are the dead letters of this group.
        """
        dead: dict[int, Item] = {}
        for letter in letters:
            offset = letter["envelope"]["dlq"]["original_offset"]
            self.claim(offset not in dead, f"{group} has two dead letters of {offset}")
            dead[offset] = letter
        self.claim(dead.keys() <= self.values.keys(), f"{group} has dead letters of nothing")
        for offset, value in self.values.items():
            message, history = self.sent[value], self.history(group, offset)
            if offset in dead:
                self.claim(not history.is_firm, f"{group}: {offset} was acked and dead-lettered")
                self._check_letter(group, message, history, dead[offset])
            else:
                what = f"{group}: {offset} is neither acked nor dead-lettered: {history}"
                self.claim(history.ack_sent, what)
                last = message.max_attempts
                self.claim(last not in history.nacked, f"{group}: {offset} ran out of attempts")

    def _check_letter(self, group: str, message: Sent, history: History, letter: Item) -> None:
        limit = message.max_attempts
        self.claim(limit, f"{group} gave up a message without max_attempts: {letter}")
        envelope = dict(letter["envelope"])
        dlq = envelope.pop("dlq")
        stripped = {"retry_policy", "partition_override"}
        expected = {k: v for k, v in message.envelope.items() if k not in stripped}
        copy = letter["key"], letter["value"], envelope
        self.claim(copy == (message.key, message.value, expected), f"{message} became {letter}")
        self.claim(dlq["original_topic"] == TOPIC, f"not ours: {letter}")
        self.claim(dlq["original_partition"] == message.partition, f"from elsewhere: {letter}")
        self.claim(dlq["attempts"] == limit, f"{limit} attempts allowed: {letter}")
        reason = history.nacked.get(limit)
        self.claim(reason in (None, dlq["last_error"]), f"nacked for {reason!r}: {letter}")
