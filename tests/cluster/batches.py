"""Batch writes to simulated brokers: staged, committed and aborted on whichever owns the shard."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.api.rows import CheckedRows
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.writes import CommitBatch, CommitReport, PartCommit, PieceName, PieceReport
from penstock.server.row_checks import check_topic_rows
from tests.cluster.replicas import Node, ReplicaWorld

ROW_BYTES = 300
"""A dozen rows take several parts of the simulated service."""


def rows_of(name: str, count: int) -> list[str]:
    return [f"{name} {number} ".ljust(ROW_BYTES, "x") for number in range(count)]


def stage(
    world: ReplicaWorld,
    node: Node,
    rows: list[str],
    *,
    batch: int = 0,
    part: int = 0,
    attempt: str = "a",
) -> list[Any]:
    """Begins to stage a piece. The outcome will be in the list once there is one."""
    table = pa.table({"value": pa.array(rows, pa.string())})

    def check(now_ms: int) -> CheckedRows:
        return check_topic_rows(table, DEFAULT_SCOPE, "t", 1 << 20, now_ms)

    outcomes: list[Any] = []
    name = PieceName("p", batch, part, attempt, 0)
    node.engine.writes.stage(name, "t", None, table.nbytes, check, outcomes.append)
    return outcomes


def must_stage(world: ReplicaWorld, node: Node, rows: list[str], **options: Any) -> None:
    outcomes = stage(world, node, rows, **options)
    world.simulation.wait_until(lambda: bool(outcomes))
    assert isinstance(outcomes[0], PieceReport), outcomes


def commit(
    world: ReplicaWorld, node: Node, rows: dict[int, int], *, batch: int = 0, attempt: str = "a"
) -> list[Any]:
    """`rows` has how many rows each part has."""
    parts = [PartCommit(part, attempt, 1, count) for part, count in rows.items()]
    command = CommitBatch("p", batch, parts, False)
    return world.submit(node.engine.writes.commit, command)


def must_commit(world: ReplicaWorld, node: Node, rows: dict[int, int], **options: Any) -> None:
    outcomes = commit(world, node, rows, **options)
    world.simulation.wait_until(lambda: bool(outcomes))
    assert isinstance(outcomes[0], CommitReport), outcomes
    assert outcomes[0].status in ("committed", "already_committed"), outcomes
