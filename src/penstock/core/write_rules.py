"""Rules of batch writes: staging, committing and storing. Returns records or messages, or refuses.

A batch is decided once, by its commit. Its rows were checked before, and the room of their
partitions is checked once more. After the commit nothing is refused: one batch may exceed limits,
and rows whose topic is gone are left out. Must not know files, nor how rows are staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, repeat

import msgspec

from penstock.core.cache_rules import find_cache
from penstock.core.idempotency import produce_identity
from penstock.core.partitioning import partition_of_key
from penstock.core.produce import check_keys, check_room, choose_partition, find_topic, reserved
from penstock.core.state import BrokerState
from penstock.core.tenancy import find
from penstock.core.topics import Topic
from penstock.core.writers import Writer
from penstock.model.envelope import Envelope, Routing
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
)
from penstock.model.limits import MAX_COMMIT_PIECES, MAX_PRODUCERS, MAX_STORING_BATCHES
from penstock.model.records import Message, StagedRows, StoredEvent, WriteCommitted
from penstock.model.scopes import DEFAULT_SCOPE, Scope, plain_name
from penstock.model.tenancy import Path
from penstock.model.writes import CommitBatch, PieceName, RowTarget, WriterReport

NamedPartition = tuple[str, int]
"""A topic's name and a partition index."""

PieceKey = tuple[int, str, int]
"""Part, attempt and piece of a batch."""


class StagedPiece(msgspec.Struct, frozen=True):
    """Describes a piece on disk. `places` are the partitions that its rows go to. `is_keyed` is
    True if some rows have an idempotency key. `content_bytes` are those of keys and values; 0 in
    pieces of older brokers, which do not name their `cache` either."""

    name: PieceName
    number: int
    rows: int
    bytes: int
    staged_ms: int
    places: list[NamedPartition]
    is_keyed: bool
    content_bytes: int = 0
    cache: Path | None = None


class AlreadyCommitted(msgspec.Struct, frozen=True):
    """`rows` is 0 if the batch is not the producer's last: its rows are not remembered."""

    rows: int
    is_storing: bool


class RowColumns(msgspec.Struct):
    """Rows of a piece, by column. None means the default for every row: the topic `topic`, no
    envelope, no routing."""

    topic: str
    topics: list[str] | None
    keys: list[str]
    values: list[str]
    sizes: list[int]
    envelopes: list[Envelope | None] | None
    routings: list[Routing | None] | None


class DecidedRows(msgspec.Struct):
    """Messages with their sizes. The topic or partition of `skipped` rows is gone. `duplicates`
    were stored before, by their idempotency keys."""

    messages: list[Message]
    sizes: list[int]
    skipped: int = 0
    duplicates: int = 0


# Staging


def check_stage(state: BrokerState, name: PieceName, now_ms: int) -> None:
    """Raises if the piece could not be committed."""
    check_uncommitted(state, name, now_ms)
    if state.writers.get(name.producer, now_ms) is None:
        _check_producers(state, now_ms)


def check_namespace(state: BrokerState, scope: Scope) -> None:
    """Raises unless the namespace exists. The default one needs no entry in the registry."""
    if scope != DEFAULT_SCOPE:
        find(state.registry, "namespace", (*scope, ""))


def check_uncommitted(state: BrokerState, name: PieceName, now_ms: int) -> None:
    """Raises if the piece's batch, or a later one, is committed."""
    writer = state.writers.get(name.producer, now_ms)
    if writer is not None and name.batch <= writer.last_batch:
        raise FailedPrecondition(
            f"batch {name.batch} of producer {plain_name(name.producer)!r} is already committed"
        )


def decide_places(state: BrokerState, targets: Iterable[RowTarget]) -> list[NamedPartition]:
    """Returns the partitions of these targets. Raises if a topic or partition does not exist."""
    places: set[NamedPartition] = set()
    for target in targets:
        try:
            topic = find_topic(state, target.topic)
            if topic.is_reserved:
                raise reserved(topic.name)
            indexes = _partitions(topic, target)
        except (InvalidArgument, NotFound, PermissionDenied) as error:
            raise type(error)(f"row {target.row}: {error.message}") from None
        places.update((topic.name, index) for index in indexes)
    return sorted(places)


def _partitions(topic: Topic, target: RowTarget) -> Iterable[int]:
    if target.key is None and target.partition_override is None:
        return range(len(topic.partitions))
    envelope = Envelope(partition_override=target.partition_override)
    return [choose_partition(topic, target.key or "", envelope)]


def check_cache(state: BrokerState, path: Path) -> None:
    find_cache(state, path)


# Committing


def decide_commit(
    state: BrokerState,
    command: CommitBatch,
    staged: Mapping[PieceKey, StagedPiece],
    now_ms: int,
) -> WriteCommitted | AlreadyCommitted:
    """Decides a commit. `staged` has the batch's pieces of all attempts."""
    writer = state.writers.get(command.producer, now_ms)
    if writer is not None and command.batch <= writer.last_batch:
        return _already(writer, command.batch)
    if writer is None:
        _check_producers(state, now_ms)
    elif len(writer.storing) >= MAX_STORING_BATCHES:
        raise ResourceExhausted(
            f"producer {plain_name(command.producer)!r} has {len(writer.storing)} batches that are "
            "still being stored; commit again when one is finished",
            limit="storing_batches",
        )
    pieces = _find_pieces(command, staged)
    _check_room_for(state, pieces, now_ms)
    return WriteCommitted(
        now_ms,
        command.producer,
        command.batch,
        sum(piece.rows for piece in pieces),
        [StagedRows(piece.number, piece.rows) for piece in pieces if piece.rows],
        command.once,
    )


def describe_writer(state: BrokerState, producer: str, now_ms: int) -> WriterReport:
    writer = state.writers.get(producer, now_ms)
    if writer is None:
        raise NotFound(f"producer {plain_name(producer)!r} has no commit that is remembered")
    return WriterReport(
        plain_name(producer),
        writer.last_batch,
        writer.rows,
        writer.committed_ms,
        bool(writer.storing),
    )


def _already(writer: Writer, batch: int) -> AlreadyCommitted:
    storing = writer.storing.get(batch)
    if storing is not None:
        return AlreadyCommitted(storing.rows, is_storing=True)
    return AlreadyCommitted(writer.rows if batch == writer.last_batch else 0, is_storing=False)


def _check_producers(state: BrokerState, now_ms: int) -> None:
    if state.writers.count(now_ms) >= MAX_PRODUCERS:
        raise ResourceExhausted(
            f"{MAX_PRODUCERS} producers are remembered; try again when one is forgotten",
            limit="producers",
        )


def _find_pieces(command: CommitBatch, staged: Mapping[PieceKey, StagedPiece]) -> list[StagedPiece]:
    """Returns the pieces in the order of the parts. Raises if they are not all staged."""
    if sum(part.pieces for part in command.parts) > MAX_COMMIT_PIECES:
        raise TooLarge(f"a batch has at most {MAX_COMMIT_PIECES} pieces")
    if len({part.part for part in command.parts}) < len(command.parts):
        raise InvalidArgument("a part is named twice")
    found: list[StagedPiece] = []
    for part in command.parts:
        rows = 0
        for index in range(part.pieces):
            piece = staged.get((part.part, part.attempt, index))
            if piece is None:
                raise FailedPrecondition(
                    f"piece {index} of part {part.part}, attempt {part.attempt!r}, is not staged"
                )
            rows += piece.rows
            found.append(piece)
        if rows != part.rows:
            raise FailedPrecondition(
                f"part {part.part}, attempt {part.attempt!r}, has {rows} rows staged; "
                f"the commit says {part.rows}"
            )
    return found


def _check_room_for(state: BrokerState, pieces: Sequence[StagedPiece], now_ms: int) -> None:
    """Raises unless every partition has room for one more message. Skips topics that are gone."""
    if any(piece.is_keyed for piece in pieces):
        check_keys(state, now_ms)
    for name, index in {place for piece in pieces for place in piece.places}:
        topic = state.topics.get(name)
        if topic is not None and index < len(topic.partitions):
            check_room(state, topic.partitions[index], 1)


# Storing


def decide_rows(state: BrokerState, rows: RowColumns, now_ms: int) -> DecidedRows:
    """Converts rows to messages, in order. Does not repeat the checks of staging."""
    if rows.topics is None and rows.envelopes is None and rows.routings is None:
        return _decide_plain(state, rows, now_ms)
    return _decide_each(state, rows, now_ms)


def decide_events(
    state: BrokerState, log: str, payloads: list[bytes], now_ms: int
) -> list[StoredEvent]:
    """Converts rows to events of a stream, in order; to none if the stream is gone. They have no
    numbers of a producer, also on an exactly_once stream: the batch itself is stored once."""
    topic = state.topics.get(log)
    if topic is None:
        return []
    offsets = count(topic.next_offset)
    return list(map(StoredEvent, repeat(topic.id), repeat(0), offsets, repeat(now_ms), payloads))


def _decide_plain(state: BrokerState, rows: RowColumns, now_ms: int) -> DecidedRows:
    """Does the same as `_decide_each` for rows of one topic with only keys and values. Works by
    column, since there may be millions of rows."""
    topic = state.topics.get(rows.topic)
    if topic is None:
        return DecidedRows([], [], skipped=len(rows.values))
    partitions = len(topic.partitions)
    indexes: Iterable[int] = repeat(0)
    if partitions > 1:
        indexes = [partition_of_key(key, partitions) for key in rows.keys]
    offsets = count(topic.next_offset)
    ids, times = repeat(topic.id), repeat(now_ms)
    messages = list(map(Message, ids, indexes, offsets, times, rows.keys, rows.values))
    return DecidedRows(messages, rows.sizes)


def _decide_each(state: BrokerState, rows: RowColumns, now_ms: int) -> DecidedRows:
    decided = DecidedRows([], [])
    next_offsets: dict[int, int] = {}
    seen: set[str] = set()
    for name, key, value, size, envelope, routing in zip(
        rows.topics or repeat(rows.topic, len(rows.values)),
        rows.keys,
        rows.values,
        rows.sizes,
        rows.envelopes or repeat(None),
        rows.routings or repeat(None),
        strict=False,
    ):
        topic = state.topics.get(name)
        index = None if topic is None else _partition(topic, key, envelope)
        if topic is None or index is None:
            decided.skipped += 1
            continue
        if envelope is not None and envelope.idempotency_key:
            identity = produce_identity(envelope.tenant_id, topic.id, envelope.idempotency_key)
            if identity in seen or state.produced.is_committed(identity, now_ms):
                decided.duplicates += 1
                continue
            seen.add(identity)
        offset = next_offsets.get(topic.id, topic.next_offset)
        next_offsets[topic.id] = offset + 1
        decided.messages.append(
            Message(topic.id, index, offset, now_ms, key, value, envelope, routing)
        )
        decided.sizes.append(size)
    return decided


def _partition(topic: Topic, key: str, envelope: Envelope | None) -> int | None:
    """Returns None if the requested partition does not exist, because the topic was created again
    with fewer."""
    override = None if envelope is None else envelope.partition_override
    if override is None:
        return partition_of_key(key, len(topic.partitions))
    return override if override < len(topic.partitions) else None
