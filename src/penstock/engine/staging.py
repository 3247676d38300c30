"""Stages pieces of batches: checks and writes them, and keeps them until their batch is committed
or dropped.

Invariant: a piece is known once it is on disk, and a commit finds what is known; of several with
the same name the newest counts. Staged bytes stay within `max_staged_bytes`, bytes being checked
within MAX_CHECKING_BYTES. Checking and writing are off the loop. Must not know how a batch is
stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from penstock.api.outcomes import Done
from penstock.api.rows import CheckedRows
from penstock.core.state import BrokerState
from penstock.core.write_rules import (
    NamedPartition,
    PieceKey,
    StagedPiece,
    check_cache,
    check_namespace,
    check_stage,
    check_uncommitted,
    decide_places,
)
from penstock.engine.ledger import Ledger
from penstock.engine.scheduler import Scheduler, Turn
from penstock.engine.write_quotas import WriteQuotas
from penstock.model.errors import Internal, PenstockError, ResourceExhausted, Unavailable
from penstock.model.limits import MAX_STAGED_PIECES, MIB
from penstock.model.scopes import Scope, quoted, split_name
from penstock.model.tenancy import Path
from penstock.model.writes import PieceName, PieceReport, RowTarget
from penstock.storage.errors import StorageError
from penstock.storage.staging import PackedPiece, PieceStore, pack

MAX_CHECKING_BYTES = 128 * MIB
"""The bytes of bodies that may be held for checking; a single one may be larger."""
FORGOTTEN_MS = 24 * 3600 * 1000
"""Pieces that were staged so long ago are dropped."""

LOOK_MS = 60_000

Check = Callable[[int], CheckedRows]
"""Checks a body, given the time, and returns its rows. Runs on a thread. Raises a PenstockError."""

Approve = Callable[[list[RowTarget]], None]
"""Raises if rows must not go to one of these targets. Runs on the loop."""

_log = logging.getLogger("penstock.engine")


class PieceStaging:
    """`bytes` also counts pieces that are committed and not yet removed."""

    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        scheduler: Scheduler,
        piece_store: PieceStore,
        quotas: WriteQuotas,
        limit: int,
    ) -> None:
        self.bytes = 0
        self.pieces = 0
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._piece_store = piece_store
        self._quotas = quotas
        self._limit_bytes = limit
        self._checking_bytes = 0
        self._next_number = 1
        self._next_look_ms = 0
        self._batches: dict[str, dict[int, dict[PieceKey, StagedPiece]]] = {}
        self._by_number: dict[int, StagedPiece] = {}

    def start(self, committed: Iterable[int]) -> None:
        """Finds the pieces on disk. Those with `committed` numbers stay, damaged or not. The rows
        of the others are checked in the background."""
        kept = set(committed)
        found = self._piece_store.found
        first = self._piece_store.first_number
        self._next_number = max([first - 1, *found, *kept]) + 1
        for number, piece in sorted(found.items()):
            if isinstance(piece, StagedPiece):
                self._count(piece)
                if number not in kept:
                    self._load(piece)
            elif number in kept:
                _log.error("a staged piece of a committed batch cannot be read: %s", piece)
            else:
                self._drop_damaged(number, piece)
        self._check_next(sorted(self._by_number.keys() - kept, reverse=True))

    def _check_next(self, numbers: list[int]) -> None:
        """Checks the rows of the last of these pieces on a thread, then the others."""
        if not numbers:
            return
        *others, number = numbers

        def check() -> None:
            damage: StorageError | None = None
            try:
                opened = self._piece_store.open(number)
                for part in opened.content.slices:
                    opened.read(part)
            except StorageError as error:
                damage = error
            except (OSError, Unavailable) as error:
                _log.warning("staged piece %d cannot be checked: %s", number, error)
            self._scheduler.post(partial(self._checked, number, damage, others))

        self._scheduler.in_background(check)

    def _checked(self, number: int, damage: StorageError | None, others: list[int]) -> None:
        piece = self._uncommitted(number) if damage is not None else None
        if damage is not None and piece is not None:
            name = piece.name
            pieces = self._batches[name.producer][name.batch]
            pieces.pop((name.part, name.attempt, name.piece))
            if not pieces:
                self._forget(name.producer, name.batch)
            self._drop_damaged(number, damage)
        self._check_next(others)

    def _uncommitted(self, number: int) -> StagedPiece | None:
        """Returns the piece of this number, unless its batch was committed or dropped."""
        for batches in self._batches.values():
            for pieces in batches.values():
                for piece in pieces.values():
                    if piece.number == number:
                        return piece
        return None

    def _drop_damaged(self, number: int, damage: StorageError) -> None:
        """Drops a damaged piece. The commit of its batch is told that the piece is missing, and the
        client stages it again."""
        _log.warning("a staged piece cannot be read and is dropped: %s", damage)
        self.remove([number])

    def _load(self, piece: StagedPiece) -> None:
        try:
            check_uncommitted(self._state, piece.name, self._ledger.now_ms())
            check_namespace(self._state, split_name(piece.name.producer)[0])
        except PenstockError:
            self.remove([piece.number])
        else:
            self._know(piece)

    # -- staging -------------------------------------------------------------------------------

    def stage(
        self,
        name: PieceName,
        topic: str,
        cache: Path | None,
        nbytes: int,
        check: Check,
        done: Done[PieceReport],
        *,
        approve: Approve | None = None,
    ) -> None:
        now_ms, wall_ms = self._ledger.now_ms(), self._ledger.wall_ms()
        try:
            if self._ledger.failure is not None:
                raise self._ledger.failure
            check_stage(self._state, name, now_ms)
            if cache is not None:
                check_cache(self._state, cache)
            self._check_room(nbytes)
            scope = split_name(name.producer)[0]
            self._quotas.check_piece(scope, nbytes)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        self._checking_bytes += nbytes
        self._quotas.staged.add(scope, nbytes)

        def finish(outcome: PieceReport | PenstockError) -> None:
            self._checking_bytes -= nbytes
            self._quotas.staged.add(scope, -nbytes)
            self._ledger.answer(done, outcome)

        def checked() -> Turn:
            rows = check(wall_ms)
            packed = pack(rows.table, topic, list(cache or ()))
            more = packed.nbytes - nbytes
            return partial(self._place, name, rows, packed, more, now_ms, approve, finish)

        self._work(checked, finish)

    def _check_room(self, nbytes: int) -> None:
        if self.bytes + self._checking_bytes + nbytes > self._limit_bytes:
            raise ResourceExhausted(
                f"{self.bytes} bytes are staged; max_staged_bytes is {self._limit_bytes}",
                limit="staged_bytes",
            )
        if self.pieces >= MAX_STAGED_PIECES:
            raise ResourceExhausted(f"{self.pieces} pieces are staged", limit="staged_pieces")
        if self._checking_bytes and self._checking_bytes + nbytes > MAX_CHECKING_BYTES:
            raise ResourceExhausted(
                "too many pieces are sent at once; send fewer in parallel", limit="checking_bytes"
            )
        # A piece is not one frame, whose size is limited in a cluster.
        if not self._ledger.can_store(min(nbytes, self._ledger.log.max_frame_bytes // 2)):
            raise self._ledger.no_room("pieces are staged when there is room")

    def _place(
        self,
        name: PieceName,
        rows: CheckedRows,
        packed: PackedPiece,
        more: int,
        now_ms: int,
        approve: Approve | None,
        finish: Done[PieceReport],
    ) -> None:
        try:
            if approve is not None:
                approve(rows.targets)
            places = decide_places(self._state, rows.targets)
            # The file may be larger than the body was.
            self._quotas.check_piece(split_name(name.producer)[0], more)
        except PenstockError as error:
            finish(error)
            return
        piece = self._piece(name, packed, places, rows.is_keyed, now_ms)

        def written() -> Turn:
            self._piece_store.write(piece, packed)
            return partial(self._written, piece, finish)

        self._work(written, finish)

    def _piece(
        self,
        name: PieceName,
        packed: PackedPiece,
        places: list[NamedPartition],
        is_keyed: bool,
        now_ms: int,
    ) -> StagedPiece:
        number = self._next_number
        self._next_number += 1
        cache = packed.content.cache
        return StagedPiece(
            name,
            number,
            packed.rows,
            packed.nbytes,
            now_ms,
            places,
            is_keyed,
            packed.content_bytes,
            (cache[0], cache[1], cache[2]) if cache else None,
        )

    def _written(self, piece: StagedPiece, finish: Done[PieceReport]) -> None:
        self._count(piece)
        try:
            # Its batch may have been committed without it meanwhile, or its namespace deleted.
            check_uncommitted(self._state, piece.name, self._ledger.now_ms())
            check_namespace(self._state, split_name(piece.name.producer)[0])
        except PenstockError as error:
            self.remove([piece.number])
            finish(error)
            return
        self._know(piece)
        finish(PieceReport(piece.rows, piece.bytes))

    def _work(self, work: Callable[[], Turn], finish: Done[PieceReport]) -> None:
        """Does the work on a thread, then calls its result on the loop."""

        def run() -> None:
            self._scheduler.post(_outcome_of(work, finish))

        self._scheduler.in_background(run)

    # -- what is staged ------------------------------------------------------------------------

    def of(self, producer: str, batch: int) -> Mapping[PieceKey, StagedPiece]:
        return self._batches.get(producer, {}).get(batch, {})

    def numbered(self, numbers: Iterable[int]) -> list[StagedPiece]:
        """Returns the pieces of these numbers, as far as they are there."""
        return [self._by_number[number] for number in numbers if number in self._by_number]

    def committed(self, producer: str, batch: int, numbers: Iterable[int]) -> list[int]:
        """Forgets the pieces of a committed batch, and all pieces of earlier batches. Returns the
        numbers of those that are not in the batch: they can be removed once the commit is durable.
        """
        kept, others = set(numbers), []
        for earlier in [each for each in self._batches.get(producer, ()) if each <= batch]:
            others += self._forget(producer, earlier)
        return [number for number in others if number not in kept]

    def drop(self, producer: str, batch: int) -> None:
        self.remove(self._forget(producer, batch))

    def forget_within(self, scope: Scope) -> list[int]:
        """Forgets all pieces of a deleted namespace. Returns their numbers: they can be removed
        once the deletion is durable."""
        return [
            number
            for producer, batches in list(self._batches.items())
            if split_name(producer)[0] == scope
            for batch in list(batches)
            for number in self._forget(producer, batch)
        ]

    def housekeep(self, now_ms: int) -> None:
        """Drops batches that got no piece for long."""
        if now_ms < self._next_look_ms:
            return
        self._next_look_ms = now_ms + LOOK_MS
        for producer, batches in list(self._batches.items()):
            for batch, pieces in list(batches.items()):
                last_ms = max(piece.staged_ms for piece in pieces.values())
                if last_ms + FORGOTTEN_MS <= now_ms:
                    _log.info(
                        "batch %d of %s was not committed: its pieces are dropped",
                        batch,
                        quoted(producer),
                    )
                    self.drop(producer, batch)

    def _forget(self, producer: str, batch: int) -> list[int]:
        batches = self._batches.get(producer, {})
        pieces = batches.pop(batch, {}).values()
        if not batches:
            self._batches.pop(producer, None)
        return [piece.number for piece in pieces]

    def _know(self, piece: StagedPiece) -> None:
        name = piece.name
        pieces = self._batches.setdefault(name.producer, {}).setdefault(name.batch, {})
        key = (name.part, name.attempt, name.piece)
        old = pieces.get(key)
        pieces[key] = piece
        if old is not None:
            self.remove([old.number])

    def _count(self, piece: StagedPiece) -> None:
        self._by_number[piece.number] = piece
        self._count_bytes(piece, piece.bytes)
        self.pieces += 1

    def _count_bytes(self, piece: StagedPiece, nbytes: int) -> None:
        self.bytes += nbytes
        self._quotas.staged.add(split_name(piece.name.producer)[0], nbytes)

    def remove(self, numbers: list[int]) -> None:
        """Removes these pieces, in the background. From a store that others share, only once it is
        certain that no other broker had taken over when this was decided."""
        for number in numbers:
            piece = self._by_number.pop(number, None)
            if piece is not None:
                self._count_bytes(piece, -piece.bytes)
                self.pieces -= 1
        piece_store = self._piece_store

        def remove() -> None:
            for number in numbers:
                try:
                    piece_store.remove(number)
                except OSError as error:
                    _log.warning("staged piece %d cannot be removed: %s", number, error)

        def confirmed(failure: PenstockError | None) -> None:
            if failure is None:
                self._scheduler.in_background(remove)

        if not numbers:
            return
        if self._ledger.log.is_shared:
            self._scheduler.soon(partial(self._ledger.when_durable, confirmed))
        else:
            self._scheduler.in_background(remove)


def _outcome_of(work: Callable[[], Turn], finish: Done[PieceReport]) -> Turn:
    """Does the work on a thread and returns what is to be done next, on the loop."""
    try:
        return work()
    except PenstockError as error:
        return partial(finish, error)
    except OSError as error:
        _log.error("a piece cannot be staged: %s", error)
        return partial(finish, Unavailable(f"the piece cannot be written: {error.strerror}"))
    except Exception:  # noqa: BLE001 - whoever sent it is answered, whatever it was
        _log.exception("a piece cannot be staged")
        return partial(finish, Internal("the piece cannot be staged; the broker's log says more"))
