"""The staged pieces of a shard, which all brokers of the cluster can read.

Invariant: a piece is there whole or not at all, since its header is stored last, and every owner
finds the pieces that the owners before it acknowledged: it lists them behind its fence. Numbers are
never given twice. Methods of `PieceStore` block and run on threads; the others run on the loop.
Must not know which pieces are committed.

An owner that was deposed may remove a piece late. So the engine removes one only after a moment at
which it certainly owned the shard: what made the piece needless was stored before that moment, and
the next owner, who reads everything after it, does not need the piece either.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pyarrow as pa

from penstock.api.outcomes import Done
from penstock.cluster.loop_calls import ThreadCalls
from penstock.cluster.piece_parts import (
    EPOCH_BITS,
    HEADER_PART,
    PartedPiece,
    cut,
    decode_header,
    encode_header,
    epoch_of,
)
from penstock.cluster.shared import (
    Found,
    Full,
    PartOutcome,
    PartsOutcome,
    SharedPieces,
    Stored,
    Unanswered,
)
from penstock.core.write_rules import StagedPiece
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.model.errors import Unavailable
from penstock.model.limits import MIB
from penstock.storage.errors import CorruptStaged
from penstock.storage.staging import PackedPiece, StagedSlice

T = TypeVar("T")

PART_BYTES = MIB
ATTEMPTS = 10
"""How often a request is sent before the client is told to try again."""
PAUSE_MS = 100
LONGEST_PAUSE_MS = 1000
READS_AT_ONCE = 64
SWEEP_MS = 600_000
"""How often leftovers are looked for. What is unknown twice in turn is removed."""

logger = logging.getLogger("penstock.cluster")


class SharedPieceStore:
    """See `PieceStore`. Call `take_over` when this broker becomes the owner, and `end` when it no
    longer is, or its copy is closed."""

    def __init__(self, pieces: SharedPieces, scheduler: Scheduler, calls: ThreadCalls) -> None:
        self.found: dict[int, StagedPiece | CorruptStaged] = {}
        self.first_number = 1
        self._pieces = pieces
        self._scheduler = scheduler
        self._calls = calls
        self._part_bytes = min(PART_BYTES, pieces.max_message_bytes)
        self._epoch = 0
        self._known: set[int] = set()
        self._unknown: set[int] = set()
        self._sweep: Cancellable | None = None
        self._has_ended = False

    def load(self) -> None:
        """A standby needs no pieces."""

    # -- on the loop -----------------------------------------------------------------------------

    def take_over(self, epoch: int, done: Done[None]) -> None:
        """Finds the pieces of earlier owners. Call it behind the fence of `epoch`."""
        self.found.clear()

        def listed(found: dict[int, StagedPiece | CorruptStaged], half_written: set[int]) -> None:
            if not self._has_ended:
                self.found = found
                self._known = set(found)
                self._unknown = half_written
                self._epoch = epoch
                self.first_number = (epoch << EPOCH_BITS) + 1
                self._sweep_later()
                done(None)

        _Listing(self._pieces, self._scheduler, listed, lambda: self._has_ended).start()

    def end(self) -> None:
        self._has_ended = True
        self._calls.end()
        if self._sweep is not None:
            self._sweep.cancel()

    def _sweep_later(self) -> None:
        self._sweep = self._scheduler.later(SWEEP_MS, lambda: self._pieces.parts(self._swept))

    def _swept(self, outcome: PartsOutcome) -> None:
        """Removes parts that nobody knows: of writers that crashed, or of requests that the service
        carried out late."""
        if self._has_ended:
            return
        if not isinstance(outcome, Unanswered):
            old = {number for number in outcome if epoch_of(number) <= self._epoch}
            unknown = old - self._known
            for number in unknown & self._unknown:
                logger.info("removing what is left of staged piece %d", number)
                self._pieces.remove(number, lambda failure: None)
            self._unknown = unknown
        self._sweep_later()

    # -- on threads ------------------------------------------------------------------------------

    def write(self, piece: StagedPiece, packed: PackedPiece) -> None:
        """Raises Unavailable if there is no room, or no answer for long."""
        self._known.add(piece.number)
        try:
            buffers = [memoryview(buffer) for buffer in packed.buffers]
            count = 0
            for count, data in enumerate(cut(buffers, self._part_bytes), start=1):
                self._put(piece.number, count, data)
            header = PartedPiece(piece, packed.content, self._part_bytes, count)
            encoded = encode_header(header)
            if len(encoded) > self._pieces.max_message_bytes:
                raise Unavailable("the piece has too many partitions; send it in smaller pieces")
            self._put(piece.number, HEADER_PART, encoded)
        except BaseException:
            self._scheduler.post(lambda: self._abandon(piece.number))
            raise

    def _put(self, number: int, part: int, data: bytes) -> None:
        def start(done: Callable[[Stored | Full | Unanswered], None]) -> None:
            self._pieces.put(number, part, data, done)

        outcome = self._patiently(start)
        if isinstance(outcome, Full):
            raise Unavailable(
                "the cluster's stream of staged pieces is full; pieces are staged when there is "
                "room"
            )

    def _abandon(self, number: int) -> None:
        """Removes a piece that could not be written. If that fails, the next sweep does it."""
        self._known.discard(number)
        if not self._has_ended:
            self._pieces.remove(number, lambda failure: None)

    def open(self, number: int) -> SharedPieceReader:
        data = self.part(number, HEADER_PART)
        header = None if data is None else decode_header(data)
        if header is None:
            detail = "missing" if data is None else "the header is damaged"
            raise CorruptStaged(_name(number), 0, detail)
        return SharedPieceReader(self, number, header)

    def part(self, number: int, part: int) -> bytes | None:
        def start(done: Callable[[PartOutcome], None]) -> None:
            self._pieces.get(number, part, done)

        outcome = self._patiently(start)
        return outcome.data if isinstance(outcome, Found) else None

    def remove(self, number: int) -> None:
        def start(done: Callable[[Unanswered | None], None]) -> None:
            self._pieces.remove(number, done)

        self._known.discard(number)
        try:
            self._patiently(start)
        except Unavailable:
            logger.info("staged piece %d is removed later: the service does not answer", number)

    def _patiently(self, start: Callable[[Callable[[T], None]], None]) -> T:
        """Repeats a request while it is not answered. All of them may be repeated."""
        pause_ms = PAUSE_MS
        for _ in range(ATTEMPTS - 1):
            outcome: T = self._calls.call(start)
            if not isinstance(outcome, Unanswered):
                return outcome
            self._calls.pause(pause_ms)
            pause_ms = min(2 * pause_ms, LONGEST_PAUSE_MS)
        outcome = self._calls.call(start)
        if isinstance(outcome, Unanswered):
            raise Unavailable(f"staged pieces cannot be reached: {outcome.reason}")
        return outcome


class SharedPieceReader:
    """Reads the slices of a piece, and keeps the last part: the next slice may begin in it."""

    def __init__(self, pieces: SharedPieceStore, number: int, header: PartedPiece) -> None:
        self.piece = header.piece
        self.content = header.content
        self._pieces = pieces
        self._number = number
        self._part_bytes = header.part_bytes
        self._last: tuple[int, bytes] = (0, b"")

    def read(self, part: StagedSlice) -> pa.Buffer:
        end = part.start + part.length
        found: list[bytes] = []
        at = part.start
        while at < end:
            index, offset = divmod(at, self._part_bytes)
            data = self._part(index + 1)[offset : offset + end - at]
            if not data:
                raise CorruptStaged(_name(self._number), at, "its part is too short")
            found.append(data)
            at += len(data)
        data = b"".join(found)
        if zlib.crc32(data) != part.crc:
            raise CorruptStaged(_name(self._number), part.start, "the checksum does not match")
        return pa.py_buffer(data)

    def _part(self, number: int) -> bytes:
        if self._last[0] != number:
            data = self._pieces.part(self._number, number)
            if data is None:
                raise CorruptStaged(_name(self._number), 0, f"part {number} is missing")
            self._last = number, data
        return self._last[1]


class _Listing:
    """Reads the headers of all pieces, some at once. Repeats what is not answered. Pieces without a
    header are told apart: their writers crashed."""

    def __init__(
        self,
        pieces: SharedPieces,
        scheduler: Scheduler,
        done: Callable[[dict[int, StagedPiece | CorruptStaged], set[int]], None],
        has_ended: Callable[[], bool],
    ) -> None:
        self._pieces = pieces
        self._scheduler = scheduler
        self._done = done
        self._has_ended = has_ended
        self._parts: dict[int, set[int]] = {}
        self._wanted: deque[int] = deque()
        self._under_way = 0
        self._found: dict[int, StagedPiece | CorruptStaged] = {}
        self._half_written: set[int] = set()

    def start(self) -> None:
        if not self._has_ended():
            self._pieces.parts(self._listed)

    def _listed(self, outcome: PartsOutcome) -> None:
        if self._has_ended():
            return
        if isinstance(outcome, Unanswered):
            self._scheduler.later(PAUSE_MS, self.start)
            return
        self._parts = outcome
        self._wanted = deque(sorted(outcome))
        self._read_some()

    def _read_some(self) -> None:
        while self._wanted and self._under_way < READS_AT_ONCE:
            number = self._wanted.popleft()
            if HEADER_PART not in self._parts[number]:
                self._half_written.add(number)
                continue
            self._under_way += 1
            self._pieces.get(number, HEADER_PART, partial(self._got, number))
        if not self._wanted and not self._under_way:
            self._done(self._found, self._half_written)

    def _got(self, number: int, outcome: PartOutcome) -> None:
        self._under_way -= 1
        if self._has_ended():
            return
        if isinstance(outcome, Unanswered):
            self._wanted.append(number)
            self._scheduler.later(PAUSE_MS, self._read_some)
            return
        if outcome is not None:
            self._found[number] = _judge(number, self._parts[number], outcome.data)
        self._read_some()


def _judge(number: int, parts: set[int], data: bytes) -> StagedPiece | CorruptStaged:
    header = decode_header(data)
    if header is None or header.piece.number != number:
        return CorruptStaged(_name(number), 0, "the header is damaged")
    missing = set(range(1, header.part_count + 1)) - parts
    if missing:
        return CorruptStaged(_name(number), 0, f"part {min(missing)} is missing")
    return header.piece


def _name(number: int) -> str:
    return f"staged piece {epoch_of(number)}-{number & (1 << EPOCH_BITS) - 1} of the cluster"
