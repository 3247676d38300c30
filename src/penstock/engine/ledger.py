"""Makes decisions durable: append, apply at once, answer when the record is on disk.

Invariant: nothing leaves the broker before the log position it was decided at is durable. After the
log has failed nothing held back is released, only refused. A callback that raises is logged and
never stops the others.

State and log never differ while the broker serves. An exception between an append and the end of
its apply, or in a turn, is a broken invariant: serving ends, and nothing more is written except
what is on its way to disk, so that a restart has what the log says.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from penstock.api.outcomes import Done
from penstock.core.state import BrokerState, apply, apply_message, apply_messages
from penstock.engine.clock import Clock
from penstock.engine.histogram import Histogram
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Added, Window
from penstock.model.errors import PenstockError, TooLarge, Unavailable
from penstock.model.limits import KIB
from penstock.model.records import STORED, OwnerChanged, Record, Stored, encode_record
from penstock.storage.frames import POSITION_BITS
from penstock.storage.log import RECORD_OVERHEAD_BYTES, Log

T = TypeVar("T")

Then = Done[None]

LOT_BYTES = 256 * KIB
"""The bytes that a lot gathers before it is appended, unless one message is larger."""

PRODUCE_LATER = "produce goes on when there is room"

_log = logging.getLogger("penstock.engine")


class LedgerListener(Protocol):
    """Takes part in the turns of a ledger, and hears what became of its log."""

    def turn(self) -> None:
        """Dispatches and does other work. Called once a turn, before the log is committed."""
        ...

    def released(self) -> None:
        """Called after a commit is durable and all that waited for it was answered."""
        ...

    def rolled(self) -> None:
        """Called when the log has closed a segment, which can be sealed."""
        ...

    def failed(self, failure: Unavailable) -> None:
        """Ends what cannot go on: nothing can be recorded any more, and all that waited was
        refused with `failure`."""
        ...


class Ledger:
    """The `LogListener` of its log."""

    def __init__(
        self, state: BrokerState, log: Log, window: Window, clock: Clock, scheduler: Scheduler
    ) -> None:
        self.log = log
        self.now_ms = clock.now_ms
        self.wall_ms = clock.wall_ms
        self.failure: Unavailable | None = None
        self.answers = 0
        self.commit_seconds = Histogram()
        self.answer_seconds = Histogram()
        self._state = state
        self._window = window
        self._scheduler = scheduler
        # The position of the last append.
        self.position = 0
        self._held: deque[tuple[int, Done[Any], Any]] = deque()
        self._is_awake = False
        self._broken = Unavailable("the broker met a defect of its own; restart it")
        self._defect: BaseException | None = None
        # The time at which the oldest answer of each commit was asked for.
        self._asked: deque[tuple[int, float]] = deque()
        self._listener: LedgerListener

    def start(self, listener: LedgerListener) -> None:
        """Takes turns from now on. Called once, before the first command."""
        self._listener = listener
        self.log.start(self)

    def record(self, record: Record) -> bool:
        """Appends and applies one record, from the reserve if need be. False without room."""
        data = encode_record(record)
        if not self.log.has_room(len(data) + RECORD_OVERHEAD_BYTES, reserve=True):
            return False
        position = -1
        try:
            position = self.log.append_one(data)
            self.position = position
            apply(self._state, record)
        except BaseException as error:
            raise self.stop_serving(error, is_appended=position >= 0) from error
        return True

    def record_together(self, records: Sequence[Record], *, reserve: bool = True) -> bool:
        """Appends and applies records of which a crash must keep all or none. Returns False without
        room for them; with `reserve` False they leave the reserve free."""
        encoded = [encode_record(record) for record in records]
        size = sum(map(len, encoded)) + len(encoded) * RECORD_OVERHEAD_BYTES
        if not self._fits(size, reserve=reserve):
            return False
        position = -1
        try:
            position = self.append(encoded)
            for record in records:
                apply(self._state, record)
        except BaseException as error:
            raise self.stop_serving(error, is_appended=position >= 0) from error
        return True

    def store(self, message: Stored, size: int, *, reserve: bool = False) -> None:
        """Appends and applies a new message: the hot path of produce."""
        data = encode_record(message)
        log = self.log
        if not log.has_room(len(data) + RECORD_OVERHEAD_BYTES, reserve=reserve):
            raise self.no_room(PRODUCE_LATER)
        position = -1
        try:
            position = log.append_one(data)
            self.position = position
            apply_message(self._state, message, size)
            self._window.add(message, size, position)
        except BaseException as error:
            raise self.stop_serving(error, is_appended=position >= 0) from error

    def lot(self) -> Lot:
        return Lot(self, self._state, self._window)

    def append(self, encoded: Sequence[bytes]) -> int:
        """Appends records for which there is room. Returns the position of the first."""
        position = self.position = self.log.append(encoded)
        return position

    def can_store(self, size: int) -> bool:
        """Says whether there is room to produce a message of `size` bytes. Its envelope is
        estimated."""
        return self.log.has_room(size + 4 * KIB)

    def store_with(self, message: Stored, size: int, also: Record) -> bool:
        """Appends and applies a message and a record as one. False without room to produce."""
        encoded = [encode_record(message), encode_record(also)]
        if not self.log.has_room(sum(map(len, encoded)) + 2 * RECORD_OVERHEAD_BYTES):
            return False
        position = -1
        try:
            position = self.append(encoded)
            apply_message(self._state, message, size)
            self._window.add(message, size, position)
            apply(self._state, also)
        except BaseException as error:
            raise self.stop_serving(error, is_appended=position >= 0) from error
        return True

    def store_all(
        self, messages: Sequence[Stored], sizes: Sequence[int], also: Record | None
    ) -> Collection[tuple[int, int]] | None:
        """Appends and applies messages, and a record if there is one, as one. Returns the
        partitions they are in, by topic; None without room to produce."""
        encoded = [encode_record(message) for message in messages]
        if also is not None:
            encoded.append(encode_record(also))
        lengths = [len(data) + RECORD_OVERHEAD_BYTES for data in encoded]
        places = list(accumulate(lengths, initial=0))
        if not self._fits(places[-1]):
            return None
        runs: defaultdict[tuple[int, int], list[Added]] = defaultdict(list)
        for message, size, place in zip(messages, sizes, places, strict=False):
            runs[message.topic_id, message.partition].append((message, size, place))
        start = -1
        try:
            start = self.append(encoded)
            apply_messages(self._state, messages, runs.values())
            for run in runs.values():
                self._window.add_run(run, start)
            if also is not None:
                apply(self._state, also)
        except BaseException as error:
            raise self.stop_serving(error, is_appended=start >= 0) from error
        return runs.keys()

    def store_together(
        self, records: Sequence[tuple[Record, int]], *, reserve: bool = False
    ) -> bool:
        """Appends and applies records in order and as one. A message has its size beside it. False
        without room, which with `reserve` includes the reserve."""
        encoded = [encode_record(record) for record, _ in records]
        nbytes = sum(map(len, encoded)) + len(encoded) * RECORD_OVERHEAD_BYTES
        if not self._fits(nbytes, reserve=reserve):
            return False
        position = -1
        try:
            position = self.append(encoded)
            for (record, size), data in zip(records, encoded, strict=True):
                if isinstance(record, STORED):
                    apply_message(self._state, record, size)
                    self._window.add(record, size, position)
                else:
                    apply(self._state, record)
                position += len(data) + RECORD_OVERHEAD_BYTES
        except BaseException as error:
            raise self.stop_serving(error, is_appended=position >= 0) from error
        return True

    def _fits(self, nbytes: int, *, reserve: bool = False) -> bool:
        """Says whether there is room for records of one frame. Raises TooLarge if no frame can
        have them."""
        if nbytes >= self.log.max_frame_bytes:
            raise TooLarge(f"{nbytes} bytes do not fit in one frame of the log")
        return self.log.has_room(nbytes, reserve=reserve)

    def no_room(self, advice: str) -> Unavailable:
        """Returns the refusal of what found no room in the log."""
        return Unavailable(f"{self.log.shortage}; {advice}")

    def attempt(self, decide: Callable[[], T]) -> T | PenstockError:
        """Runs a command. Returns its outcome, or the PenstockError that refuses it."""
        mark = self.position
        try:
            if self.failure is not None:
                raise self.failure
            return decide()
        except PenstockError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - raised again unless it is told
            return self.break_off(error, mark)

    def break_off(self, error: BaseException, mark: int) -> PenstockError:
        """Ends a command that raised `error`; `mark` is where the log ended when it began. If it
        has appended something it is half done, and serving ends. Otherwise nothing has happened."""
        if self.position == mark:
            raise error
        failure = self.stop_serving(error, is_appended=True)
        if not isinstance(failure, PenstockError):
            raise failure
        return failure

    def answer(self, done: Done[T], outcome: T | PenstockError) -> None:
        """Gives `outcome` to `done` once everything decided so far is durable. An answer that needs
        no record waits too if another broker may have taken over meanwhile."""
        self.answers += 1
        if self.failure is not None:
            if self._defect is not None:
                self._scheduler.soon(self._end_serving)
            done(self.failure)
            return
        seq, log = self.position >> POSITION_BITS, self.log
        if log.is_shared and seq < log.seq and not log.is_current():
            # Frames that are on their way were sent before this was decided.
            seq = self._confirm()
        elif seq <= log.durable_seq:
            done(outcome)
            return
        if not self._asked or self._asked[-1][0] != seq:
            self._asked.append((seq, time.perf_counter()))
        self._held.append((seq, done, outcome))
        if not self._is_awake:
            self._scheduler.soon(self._turn)
            self._is_awake = True

    def answer_unlogged(self, done: Done[T], outcome: T | PenstockError) -> None:
        """Gives an outcome that depends on nothing in the log: at once, unless another broker may
        have taken over."""
        if self.log.is_current():
            done(outcome)
        else:
            self.answer(done, outcome)

    def _confirm(self) -> int:
        """Begins to find out whether another broker has taken over, with a record that changes
        nothing. Returns the frame that becomes durable only if none has."""
        self.record(OwnerChanged(self.now_ms(), self._state.epoch, ""))
        return self.log.seq

    def when_durable(self, then: Then) -> None:
        self.answer(then, None)

    def wake(self) -> None:
        """Asks for a turn, which dispatches and commits the log."""
        if not self._is_awake:
            self._scheduler.soon(self._turn)
            self._is_awake = True

    def _turn(self) -> None:
        self._is_awake = False
        if self.failure is not None:
            self._end_serving()
            return
        try:
            self._listener.turn()
            if self.failure is None:
                self.log.commit()
        except BaseException as error:
            # Part of a turn may be done: memory can no longer be trusted.
            if error is not self.failure:
                self.stop_serving(error, is_appended=True)
                self._end_serving()
                raise

    def stop_serving(self, error: BaseException, *, is_appended: bool) -> BaseException:
        """Ends serving after a broken invariant, unless `error` only refused an append. Returns the
        error to raise. Memory can no longer be trusted, but the log can: nothing more is written,
        and a restart begins with the log."""
        is_refusal = isinstance(error, PenstockError) and not is_appended
        if is_refusal or error is self.failure:
            return error
        if self.failure is None:
            # The stack may be exhausted, so serving ends here without another call. The rest is
            # done on another stack: by the next turn or command.
            self.failure = self._broken
            self._defect = error
            try:
                self.log.stop_writing(error)
                self._scheduler.soon(self._end_serving)
            except RecursionError:
                return self._broken
        return self.failure if isinstance(error, Exception) else error

    def _end_serving(self) -> None:
        error, self._defect = self._defect, None
        if error is not None:
            self.log.stop_writing(error)
            _log.critical("the broker met a defect of its own and stops serving", exc_info=error)
            self._fail(self._broken)

    # -- what the log tells --------------------------------------------------------------------

    def durable(self, seq: int) -> None:
        self.commit_seconds.observe(self.log.last_commit_seconds)
        held = self._held
        released = len(held)
        while held and held[0][0] <= seq:
            _, done, outcome = held.popleft()
            try:
                done(outcome)
            except Exception:  # noqa: BLE001 - one departed client must not stop the others
                _log.exception("an answer could not be given; the others go on")
        self._observe(seq, released - len(held))
        self._listener.released()

    def _observe(self, seq: int, answers: int) -> None:
        now, asked = time.perf_counter(), self._asked
        while asked and asked[0][0] <= seq:
            self.answer_seconds.observe(now - asked.popleft()[1], max(1, answers))
            answers = 1

    def rolled(self) -> None:
        self._listener.rolled()

    def failed(self, error: BaseException) -> None:
        if isinstance(error, Unavailable):
            self._fail(error)
        else:
            self._fail(Unavailable(f"the log cannot be written ({error}); restart the broker"))

    def _fail(self, failure: Unavailable) -> None:
        self.failure = failure
        held, self._held = self._held, deque()
        for _, done, _ in held:
            try:
                done(self.failure)
            except Exception:  # noqa: BLE001 - one departed client must not stop the others
                _log.exception("a refusal could not be given; the others go on")
        self._listener.failed(self.failure)


class Lot:
    """New messages that are appended together; used in a `with`.

    Each gets its room in the log and is applied when it is stored, so that the next is decided with
    it in view and appending all of them at the end does not fail.
    """

    __slots__ = ("_encoded", "_ledger", "_nbytes", "_room", "_runs", "_state", "_window", "places")

    def __init__(self, ledger: Ledger, state: BrokerState, window: Window) -> None:
        self.places: set[tuple[int, int]] = set()
        self._ledger = ledger
        self._state = state
        self._window = window
        self._room = 0
        self._begin()

    def _begin(self) -> None:
        self._nbytes = 0
        self._encoded: list[bytes] = []
        self._runs: defaultdict[tuple[int, int], list[Added]] = defaultdict(list)

    def __enter__(self) -> Lot:
        return self

    def __exit__(self, *_: object) -> None:
        """Appends after an error too: what is applied must be in the log."""
        if self._ledger.failure is None:
            self._append()

    def store(self, message: Stored, size: int) -> None:
        data = encode_record(message)
        nbytes = len(data) + RECORD_OVERHEAD_BYTES
        if self._nbytes + nbytes > self._room:
            self._make_room(nbytes)
        try:
            apply_message(self._state, message, size)
            place = self._nbytes
            self._nbytes = place + nbytes
            self._encoded.append(data)
            self._runs[message.topic_id, message.partition].append((message, size, place))
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error

    def _make_room(self, nbytes: int) -> None:
        self._append()
        room = max(nbytes, LOT_BYTES)
        if not self._ledger.log.has_room(room):
            if not self._ledger.log.has_room(nbytes):
                raise self._ledger.no_room(PRODUCE_LATER)
            room = nbytes
        self._room = room

    def _append(self) -> None:
        if self._encoded:
            try:
                start = self._ledger.append(self._encoded)
                for run in self._runs.values():
                    self._window.add_run(run, start)
            except BaseException as error:
                raise self._ledger.stop_serving(error, is_appended=True) from error
            self.places.update(self._runs)
            self._begin()
        self._room = 0


def no_room() -> Unavailable:
    """Returns the refusal of what found no room in the log, not even in the reserve."""
    return Unavailable("the disk is full; nothing can be recorded until there is room")
