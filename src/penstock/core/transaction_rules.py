"""Rules of transactions: decides all operations against one state, or refuses all for one of them.

Deciding changes nothing. A draft counts what the operations before would change, so that the next
one is decided with them in view: offsets, room in partitions, idempotency keys, settled deliveries
and caches. Room that the transaction's own acks will make does not count. Must not know which
records become durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.api.messages import Produce, Settle, check_deadline
from penstock.api.transactions import (
    AckOperation,
    EffectOperation,
    EventAckOperation,
    EventNackOperation,
    NackOperation,
    Operation,
    TransactionCommand,
)
from penstock.core.cache_rules import Decision, decide_op, find_cache
from penstock.core.effect_rules import check_results, decide_commit
from penstock.core.groups import Unfinished
from penstock.core.idempotency import produce_identity
from penstock.core.produce import check_keys, check_room, decide_produce
from penstock.core.publish_rules import Repeat, check_numbers, decide_publish
from penstock.core.settle import decide_ack, decide_nack
from penstock.core.state import BrokerState
from penstock.core.stream_logs import find_log
from penstock.core.stream_rules import check_publish
from penstock.core.tenancy import find
from penstock.core.topics import Topic
from penstock.model.caching import Delete, Increment, Put
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    TooLarge,
)
from penstock.model.limits import MAX_TXN_OPS
from penstock.model.records import (
    CacheStored,
    Finished,
    Record,
    Released,
    TransactionCommitted,
)
from penstock.model.scopes import split_name
from penstock.model.streams import Publish
from penstock.model.tenancy import StreamConfig
from penstock.model.transactions import (
    CacheResult,
    DuplicateResult,
    OperationResult,
    SettledResult,
    StoredResult,
    decode_results,
    encode_results,
)

ALREADY_DONE = "this offset is already done, by an earlier ack; nothing of the transaction happens"


class TransactionDraft:
    """A transaction as decided so far.

    `records` are all but those of caches, each with its size, which counts for messages only.
    `partitions` are those that get messages, by topic. `settled` are the deliveries that end.
    `caches` has the records of caches, None if there is no operation on one. `published` are the
    publishes that store events, each with the offset of its first.
    """

    __slots__ = (
        "_effect_bytes",
        "_effects",
        "_keys",
        "_now_ms",
        "_produced",
        "_publishers",
        "_state",
        "_wall_ms",
        "caches",
        "partitions",
        "published",
        "records",
        "results",
        "settled",
    )

    def __init__(self, state: BrokerState, now_ms: int, wall_ms: int) -> None:
        self.records: list[tuple[Record, int]] = []
        self.results: list[OperationResult] = []
        self.partitions: dict[tuple[int, int], tuple[int, int]] = {}
        self.settled: dict[Unfinished, None] = {}
        self.caches: Decision[None] | None = None
        self.published: list[tuple[Publish, int]] = []
        self._publishers: set[tuple[int, str]] = set()
        self._state = state
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._produced: dict[int, int] = {}
        self._keys: set[str] = set()
        self._effects: set[tuple[int, str, str]] = set()
        self._effect_bytes = 0

    def add(self, operation: Operation) -> None:
        self.results.append(_STEPS[type(operation)](self, operation))

    @property
    def new_keys(self) -> int:
        """The number of messages that will be stored with an idempotency key."""
        return len(self._keys)

    def is_all_settling(self) -> bool:
        """Says whether it stores nothing new, in a topic or in a cache."""
        if self.partitions:
            return False
        records = self.caches.records if self.caches is not None else ()
        return not any(isinstance(record, CacheStored) for record in records)

    # -- messages ------------------------------------------------------------------------------

    def _produce(self, command: Produce) -> OperationResult:
        if command.deadline_ms:
            check_deadline(command.deadline_ms, self._wall_ms)
        decided = decide_produce(self._state, command, self._now_ms)
        if decided is None:
            return DuplicateResult()
        message, size = decided
        envelope = command.envelope
        if envelope is not None and envelope.idempotency_key:
            key = envelope.idempotency_key
            identity = produce_identity(envelope.tenant_id, message.topic_id, key)
            if identity in self._keys:
                return DuplicateResult()
            if self._keys:
                check_keys(self._state, self._now_ms, len(self._keys))
            self._keys.add(identity)
        topic = self._state.topics_by_id[message.topic_id]
        message.offset += self._reserve(topic, message.partition, 1, size)
        self.records.append((message, size))
        return StoredResult(message.partition, message.offset)

    def _reserve(self, topic: Topic, partition: int, count: int, size: int) -> int:
        """Counts messages that will be stored in a partition, or raises if there is no room.
        Returns how many the transaction has stored in the topic before."""
        where = (topic.id, partition)
        pending = self.partitions.get(where)
        if pending is not None:
            check_room(self._state, topic.partitions[partition], size, pending, count)
        msgs, nbytes = pending or (0, 0)
        self.partitions[where] = (msgs + count, nbytes + size)
        earlier = self._produced.get(topic.id, 0)
        self._produced[topic.id] = earlier + count
        return earlier

    def _publish(self, command: Publish) -> OperationResult:
        topic = find_log(self._state, command.path)
        nbytes = check_publish(command, self._state.limits)
        config = find(self._state.registry, "stream", command.path).stream or StreamConfig()
        producer_id, sequence = command.producer_id, command.sequence
        check_numbers(config, producer_id, sequence)
        if sequence is not None:
            if (topic.id, producer_id) in self._publishers:
                raise InvalidArgument(
                    "a producer numbers one publish to a stream in a transaction; publish all "
                    "events in one operation"
                )
            self._publishers.add((topic.id, producer_id))
        decided = decide_publish(
            self._state, topic, command.payloads, nbytes, producer_id, sequence, self._now_ms
        )
        if isinstance(decided, Repeat):
            return DuplicateResult() if decided.offset is None else DuplicateResult(decided.offset)
        earlier = self._reserve(topic, 0, len(decided.events), nbytes)
        for event in decided.events:
            event.offset += earlier
            self.records.append((event, len(event.value)))
        if decided.published is not None:
            decided.published.offset += earlier
            self.records.append((decided.published, 0))
        first = decided.events[0].offset
        self.published.append((command, first))
        return StoredResult(0, first)

    # -- deliveries ----------------------------------------------------------------------------

    def _ack(self, operation: AckOperation) -> OperationResult:
        decided = decide_ack(self._state, operation.delivery, self._now_ms)
        if not isinstance(decided, Finished):
            # An earlier ack is no success here: whoever sent it has produced the results too.
            raise FailedPrecondition(ALREADY_DONE)
        return self._settle(operation.delivery, decided)

    def _nack(self, operation: NackOperation) -> OperationResult:
        decided = decide_nack(
            self._state,
            operation.delivery,
            operation.reason,
            self._now_ms,
            delay_ms=operation.delay_ms,
            dead=operation.dead,
        )
        return self._settle(operation.delivery, decided)

    def _ack_event(self, operation: EventAckOperation) -> OperationResult:
        return self._ack(AckOperation(self._event(operation)))

    def _nack_event(self, operation: EventNackOperation) -> OperationResult:
        delivery = self._event(operation)
        return self._nack(NackOperation(delivery, operation.reason, operation.delay_ms))

    def _event(self, operation: EventAckOperation) -> Settle:
        """Returns the delivery in the log of the stream, whose groups are its subscriptions."""
        log = find_log(self._state, operation.path).name
        return Settle(
            log, operation.name, 0, operation.offset, operation.owner, operation.delivery_id
        )

    def _settle(self, delivery: Settle, record: Finished | Released) -> OperationResult:
        group = self._state.groups[record.group_id]
        entry = group.progress[record.partition].unfinished[delivery.offset]
        if entry in self.settled:
            raise FailedPrecondition("this delivery is settled twice in the transaction")
        self.settled[entry] = None
        self.records.append((record, 0))
        return SettledResult()

    def _commit_effect(self, operation: EffectOperation) -> OperationResult:
        record = decide_commit(self._state, operation.effect, operation.result, self._now_ms)
        if record is None:
            raise FailedPrecondition("the effect is committed already")
        identity = (record.topic_id, record.group, record.effect_key)
        if identity in self._effects:
            raise FailedPrecondition("this effect is committed twice in the transaction")
        self._effects.add(identity)
        self._effect_bytes += len(operation.result)
        check_results(self._state, self._effect_bytes)
        self.records.append((record, 0))
        return SettledResult()

    # -- caches --------------------------------------------------------------------------------

    def _change_cache(self, operation: Put | Delete | Increment) -> OperationResult:
        if not find_cache(self._state, operation.path).is_durable:
            name = "/".join(operation.path)
            raise FailedPrecondition(
                f"cache {name!r} is not durable; a transaction takes durable caches only"
            )
        if self.caches is None:
            self.caches = Decision(self._state, self._now_ms)
        written = decide_op(self._state, self.caches, operation)
        return CacheResult(written.version, written.deleted, written.number)


_STEPS: dict[type[Any], Callable[[TransactionDraft, Any], OperationResult]] = {
    Produce: TransactionDraft._produce,
    Publish: TransactionDraft._publish,
    AckOperation: TransactionDraft._ack,
    NackOperation: TransactionDraft._nack,
    EventAckOperation: TransactionDraft._ack_event,
    EventNackOperation: TransactionDraft._nack_event,
    EffectOperation: TransactionDraft._commit_effect,
    Put: TransactionDraft._change_cache,
    Delete: TransactionDraft._change_cache,
    Increment: TransactionDraft._change_cache,
}


def decide_transaction(
    state: BrokerState,
    command: TransactionCommand,
    operations: list[Operation],
    now_ms: int,
    wall_ms: int,
) -> TransactionDraft:
    """Decides a transaction. `operations` are those of the command, as the router left them.
    `wall_ms` is the machine's time, for deadlines."""
    _check_shape(operations)
    draft = TransactionDraft(state, now_ms, wall_ms)
    index = 0
    try:
        for operation in operations:
            draft.add(operation)
            index += 1
        if draft.caches is not None:
            index = max(i for i, each in enumerate(operations) if isinstance(each, _CACHE_KINDS))
            draft.caches.finish()
    except PenstockError as error:
        raise error.at_operation(index) from None
    if command.transaction_id:
        answer = encode_results(draft.results)
        _check_ids(state, len(answer), now_ms)
        record = TransactionCommitted(now_ms, command.transaction_id, command.fingerprint, answer)
        draft.records.append((record, 0))
    return draft


def find_committed(
    state: BrokerState, command: TransactionCommand, now_ms: int
) -> list[OperationResult] | None:
    """Returns the answer to the transaction that this one repeats, if there is one."""
    known = state.transactions.get(command.transaction_id, now_ms)
    if known is None:
        return None
    if known.fingerprint != command.fingerprint:
        raise FailedPrecondition(
            "another transaction was committed with this transaction_id; use a new id for each"
        )
    return decode_results(known.answer)


_CACHE_KINDS = (Put, Delete, Increment)


def _check_shape(operations: list[Operation]) -> None:
    if not operations:
        raise InvalidArgument("a transaction needs at least one operation")
    if len(operations) > MAX_TXN_OPS:
        raise TooLarge(f"a transaction has at most {MAX_TXN_OPS} operations")
    if len({_SCOPES[type(operation)](operation) for operation in operations}) > 1:
        raise InvalidArgument("all operations of a transaction must be in one namespace")


def _scope_of_path(
    operation: Publish | EventAckOperation | Put | Delete | Increment,
) -> tuple[str, ...]:
    return operation.path[:2]


def _scope_of_delivery(operation: AckOperation | NackOperation) -> tuple[str, ...]:
    return split_name(operation.delivery.topic)[0]


_SCOPES: dict[type[Any], Callable[[Any], tuple[str, ...]]] = {
    Produce: lambda operation: split_name(operation.topic)[0],
    Publish: _scope_of_path,
    AckOperation: _scope_of_delivery,
    NackOperation: _scope_of_delivery,
    EventAckOperation: _scope_of_path,
    EventNackOperation: _scope_of_path,
    EffectOperation: lambda operation: split_name(operation.effect.topic)[0],
    Put: _scope_of_path,
    Delete: _scope_of_path,
    Increment: _scope_of_path,
}


def _check_ids(state: BrokerState, answer_bytes: int, now_ms: int) -> None:
    """Raises if the id cannot be remembered: none is forgotten before its time."""
    known, limits = state.transactions, state.limits
    has_room = len(known) < limits.max_idempotency_keys
    if not has_room or known.answer_bytes + answer_bytes > limits.memory_bytes // 4:
        known.forget_expired(now_ms)
        if len(known) >= limits.max_idempotency_keys:
            raise ResourceExhausted(
                f"{len(known)} transactions are remembered; none is forgotten before its time",
                limit="idempotency_keys",
            )
        if known.answer_bytes + answer_bytes > limits.memory_bytes // 4:
            raise ResourceExhausted(
                "the answers to transactions fill their memory", limit="memory_bytes"
            )
