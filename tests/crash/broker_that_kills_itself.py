"""The broker's command, with a SIGKILL at a named point inside one transaction.

Started as `python -m tests.crash.broker_that_kills_itself serve …`. KILL_POINT names one of POINTS,
KILL_TRANSACTION the id of the transaction. It wraps the real objects, and the broker knows nothing
of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import penstock.engine.transactions
from penstock.api.transactions import TransactionCommand
from penstock.core.transaction_rules import decide_transaction
from penstock.engine.ledger import Ledger
from penstock.engine.transactions import TransactionCommands
from penstock.storage.vfs import Vfs

POINTS = {
    "before deciding": False,
    "decided": False,
    "appended": False,
    "applied": False,
    "half written": False,
    "written": True,
    "synced": True,
    "before the answer": True,
    "answered": True,
}
"""The points in their order, and whether the transaction has happened there. What a killed process
has written stays in the kernel's cache, so it happened once its frame is written."""


class KillPoint:
    """Kills this process at the point. `is_inside`: the transaction has begun. `is_applied`: its
    frame is the next one that is written."""

    def __init__(self, point: str, transaction_id: str) -> None:
        if point not in POINTS:
            raise ValueError(f"no point is called {point!r}")
        self.point = point
        self.transaction_id = transaction_id
        self.is_inside = False
        self.is_applied = False

    def reach(self, point: str) -> None:
        if self.is_inside and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def place_kill(kill: KillPoint) -> None:
    """Wraps the steps of a transaction, from the command to the answer."""
    _wrap_engine(kill)
    _wrap_ledger(kill)
    _wrap_disk(kill)


def _wrap_engine(kill: KillPoint) -> None:
    commit = TransactionCommands.commit

    def commit_and_kill(
        self: TransactionCommands, command: TransactionCommand, done: Callable[[Any], None]
    ) -> None:
        if command.transaction_id != kill.transaction_id:
            commit(self, command, done)
            return
        kill.is_inside = True
        loop = asyncio.get_running_loop()

        def answer(outcome: Any) -> None:
            kill.reach("before the answer")
            done(outcome)
            # The loop sends what is queued before it runs a timer.
            loop.call_later(0.01, kill.reach, "answered")

        commit(self, command, answer)

    def decide_and_kill(*arguments: Any) -> Any:
        kill.reach("before deciding")
        draft = decide_transaction(*arguments)
        kill.reach("decided")
        return draft

    TransactionCommands.commit = commit_and_kill  # type: ignore[method-assign]
    # By its name: the module does not export what it imports.
    vars(penstock.engine.transactions)["decide_transaction"] = decide_and_kill


def _wrap_ledger(kill: KillPoint) -> None:
    append, store_together = Ledger.append, Ledger.store_together

    def append_and_kill(self: Ledger, encoded: Sequence[bytes]) -> int:
        position = append(self, encoded)
        kill.reach("appended")
        return position

    def store_and_kill(self: Ledger, *arguments: Any, **options: Any) -> bool:
        is_stored = store_together(self, *arguments, **options)
        kill.reach("applied")
        kill.is_applied = kill.is_inside
        return is_stored

    Ledger.append = append_and_kill  # type: ignore[method-assign]
    Ledger.store_together = store_and_kill  # type: ignore[method-assign]


def _wrap_disk(kill: KillPoint) -> None:
    write = Vfs.write_at_durable

    def write_and_kill(
        self: Vfs, fd: int, buffers: Sequence[bytes | memoryview], offset: int
    ) -> None:
        if not kill.is_applied:
            write(self, fd, buffers, offset)
            return
        data = b"".join(buffers)
        if kill.point == "half written":
            os.pwrite(fd, data[: len(data) // 2], offset)
            kill.reach("half written")
        if kill.point == "written":
            os.pwrite(fd, data, offset)
            kill.reach("written")
        write(self, fd, buffers, offset)
        kill.reach("synced")

    Vfs.write_at_durable = write_and_kill  # type: ignore[method-assign]


if __name__ == "__main__":
    from penstock.cli.main import main

    place_kill(KillPoint(os.environ["KILL_POINT"], os.environ["KILL_TRANSACTION"]))
    main()
