"""Subscribers in processes of their own, which SIGKILL themselves around an effect and its ack.

Started as `python -m tests.crash.event_subscriber`. It loads the SDK once, and forks a subscriber
for each line on its standard input, a JSON array of the arguments of `run`. It prints the pid of
each. A line with a pid waits for this one, and prints the signal that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.client import Client, PositionFile, StreamEvent
from penstock.client.positions import HandledEvents
from penstock.model.errors import FailedPrecondition, PenstockError

STREAM, NAME = "transactions", "ledger"
LEASE_MS = 500

POINTS = {
    "before the effect": ("file", "database"),
    "in the effect": ("database",),
    "after the effect": ("file", "database"),
    "before the ack": ("file", "database"),
    "after the ack": ("file", "database"),
}
"""The points in their order, and the positions that have them. "before the ack": the position is
stored, also in the file."""

Reached = Callable[[str], None]


class KillPoint:
    """Kills this process when it gets to the point for the given time."""

    def __init__(self, point: str, times: int) -> None:
        self._point = point
        self._left = times

    def reached(self, point: str) -> None:
        self._left -= point == self._point
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class FileLedger(PositionFile):
    """The position in a file, the effects in another."""

    def __init__(self, directory: Path, reached: Reached) -> None:
        super().__init__(directory / "position")
        self._effects = directory / "effects"
        self._reached = reached

    def apply(self, event: StreamEvent) -> None:
        with self._effects.open("ab", buffering=0) as file:
            file.write(event.payload + b"\n")

    def add(self, offset: int) -> None:
        super().add(offset)
        self._reached("before the ack")


class DatabaseLedger:
    """The position and the effects in one database, as docs/delivery.md recommends."""

    def __init__(self, directory: Path, reached: Reached) -> None:
        self._db = open_database(directory)
        self._reached = reached
        self._stream_id = 0

    def begin(self, stream: tuple[str, str, str], stream_id: int) -> None:
        self._stream_id = stream_id

    def has(self, offset: int) -> bool:
        query = "SELECT 1 FROM handled WHERE stream_id = ? AND offset = ?"
        return self._db.execute(query, (self._stream_id, offset)).fetchone() is not None

    def apply(self, event: StreamEvent) -> None:
        note = (self._stream_id, event.offset)
        # Refused if another subscriber has handled it meanwhile, because a lease has ended.
        with suppress(sqlite3.IntegrityError), self._db:
            self._db.execute("INSERT INTO effects VALUES (?)", (event.payload,))
            self._reached("in the effect")
            self._db.execute("INSERT INTO handled VALUES (?, ?)", note)

    def add(self, offset: int) -> None:
        with self._db:
            note = (self._stream_id, offset)
            self._db.execute("INSERT OR IGNORE INTO handled VALUES (?, ?)", note)
        self._reached("before the ack")


def open_database(directory: Path) -> sqlite3.Connection:
    db = sqlite3.connect(directory / "ledger.db", timeout=120)
    db.execute("CREATE TABLE IF NOT EXISTS effects (payload)")
    db.execute("CREATE TABLE IF NOT EXISTS handled (stream_id, offset, UNIQUE (stream_id, offset))")
    return db


def effects(directory: Path, kind: str) -> list[bytes]:
    """Returns the payloads of all effects."""
    if kind == "file":
        path = directory / "effects"
        return path.read_bytes().splitlines() if path.exists() else []
    db = open_database(directory)
    try:
        return [payload for (payload,) in db.execute("SELECT payload FROM effects")]
    finally:
        db.close()


def run(url: str, directory: str, kind: str, point: str, times: int) -> None:
    """Handles events until it is killed."""
    kill_point = KillPoint(point, times)
    make = FileLedger if kind == "file" else DatabaseLedger
    ledger = make(Path(directory), kill_point.reached)
    while True:
        try:
            handle_all(url, ledger, ledger.apply, kill_point.reached)
        except FailedPrecondition:
            continue  # the lease has ended, and the event was delivered again
        except PenstockError as error:
            if not error.retryable:
                raise
            time.sleep(0.05)


def handle_all(
    url: str, once: HandledEvents, apply: Callable[[StreamEvent], None], reached: Reached
) -> None:
    with (
        Client(url) as client,
        client.stream(STREAM).subscribe(
            name=NAME, start="earliest", lease_ms=LEASE_MS, prefetch=4, once=once
        ) as events,
    ):
        for event in events:
            reached("before the effect")
            apply(event)
            reached("after the effect")
            event.ack()
            reached("after the ack")


def main() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        if isinstance(wanted, int):
            _, status = os.waitpid(wanted, 0)
            print(-os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                run(*wanted)
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
