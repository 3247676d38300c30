"""Staged pieces survive takeovers: what one owner staged or committed, the next one stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cluster.piece_parts import cut, decode_header, epoch_of
from penstock.cluster.pieces import SWEEP_MS
from penstock.engine import batch_storing
from penstock.engine.staging import FORGOTTEN_MS
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.writes import CommitReport, PieceReport
from penstock.storage import staging
from tests.cluster.batches import commit, must_commit, must_stage, rows_of, stage
from tests.cluster.replicas import Node, ReplicaWorld
from tests.cluster.simulated_service import Fate


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are several slices and many frames."""
    monkeypatch.setattr(batch_storing, "BURST_ROWS", 4)
    monkeypatch.setattr(batch_storing, "SHARED_ROWS", 3)
    monkeypatch.setattr(staging, "SLICE_ROWS", 6)


@pytest.fixture
def world() -> Iterator[ReplicaWorld]:
    world = ReplicaWorld()
    yield world
    world.close()


@pytest.fixture
def a(world: ReplicaWorld) -> Node:
    node = world.must_promote("a")
    world.must(node.engine.create_topic, "t", 1)
    return node


@pytest.fixture
def b(world: ReplicaWorld) -> Node:
    return world["b"]


def test_a_piece_that_was_staged_on_one_owner_is_committed_on_the_next(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    rows = rows_of("row", 20)
    must_stage(world, a, rows)
    assert len(world.pieces.stored) > 5, "the piece is cut into parts"
    a.kill()
    world.must_promote("b")
    must_commit(world, b, {0: 20})
    assert world.values(b) == rows


@pytest.mark.parametrize("after_ms", range(0, 60, 3))
def test_a_batch_that_was_committed_on_one_owner_is_stored_by_the_next(
    world: ReplicaWorld, a: Node, b: Node, after_ms: int
) -> None:
    """The owner is killed at some moment while it stores the rows."""
    rows = rows_of("row", 20)
    must_stage(world, a, rows)
    outcomes = commit(world, a, {0: 20})
    world.simulation.wait_until(
        lambda: any(w.storing for w in b.state.writers) or bool(outcomes), 1000
    )
    world.simulation.pass_ms(after_ms)
    a.kill()
    world.must_promote("b")
    must_commit(world, b, {0: 20})
    assert world.values(b) == rows
    world.simulation.pass_ms(1000)
    assert world.pieces.numbers() == set(), "what is stored is removed"


def test_an_owner_that_dies_at_any_step_of_a_write_leaves_no_half_piece(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    rows = rows_of("row", 12)
    must_stage(world, a, rows, batch=1)
    requests = world.pieces.requests["put"]
    steps = whole = 0
    for steps in range(1, 100):
        owner, other = (a, b) if steps % 2 else (b, a)
        before = world.pieces.requests["put"]
        outcomes = stage(world, owner, rows, batch=2, attempt=f"n{steps}")
        world.simulation.wait_until(
            lambda: world.pieces.requests["put"] >= before + steps or bool(outcomes)  # noqa: B023
        )
        if outcomes:
            break
        owner.restart()
        world.must_promote(other.name)
        world.simulation.pass_ms(100)
        whole += len(other.engine.writes.staging.of("p", 2)) > whole
    assert steps > requests
    assert whole == 1, "only the write whose header was on its way became a piece"
    assert isinstance(outcomes[0], PieceReport)
    world.simulation.pass_ms(SWEEP_MS + 1000)
    assert len(world.pieces.numbers()) == 3, "what is left of the others is removed"
    must_commit(world, owner, {0: 12}, batch=2, attempt=f"n{steps}")
    assert world.values(owner) == rows


def test_numbers_of_pieces_have_the_epoch_of_their_owner(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    must_stage(world, a, ["one"], part=0)
    must_stage(world, a, ["two"], part=1)
    first = sorted(world.pieces.numbers())
    world.must_promote("b")
    must_stage(world, b, ["three"], part=2)
    numbers = sorted(world.pieces.numbers())
    assert numbers[:2] == first
    assert [epoch_of(number) for number in numbers] == [1, 1, 2]


@pytest.mark.parametrize("kind", ["abort", "replace"])
def test_a_deposed_owner_removes_no_piece_that_the_new_one_needs(
    world: ReplicaWorld, a: Node, b: Node, kind: str
) -> None:
    """It is asked to abort the batch, or to replace the piece, after another has taken over."""
    rows = rows_of("row", 10)
    must_stage(world, a, rows)
    world.must_promote("b")
    a.is_current = False
    if kind == "abort":
        refused = world.submit(a.engine.writes.abort, "p", 0)
    else:
        refused = stage(world, a, ["another"])
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], PenstockError)
    world.simulation.pass_ms(1000)
    must_commit(world, b, {0: 10})
    assert world.values(b) == rows


def test_a_removal_that_arrives_after_a_takeover_does_no_harm(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    """The piece was replaced before; the next owner has the new one."""
    must_stage(world, a, rows_of("old", 5))
    world.pieces.plan(Fate.LATE, "remove")
    must_stage(world, a, rows_of("new", 5))
    world.must_promote("b")
    world.simulation.pass_ms(5000)
    must_commit(world, b, {0: 5})
    assert world.values(b) == rows_of("new", 5)


def test_requests_that_are_not_answered_are_repeated(world: ReplicaWorld, a: Node) -> None:
    for fate in (Fate.LOST_REQUEST, Fate.LOST_ANSWER, Fate.LATE, Fate.DUPLICATED):
        world.pieces.plan(fate, "put")
        world.pieces.plan(fate, "get")
    rows = rows_of("row", 10)
    must_stage(world, a, rows)
    must_commit(world, a, {0: 10})
    assert world.values(a) == rows


def test_a_service_that_stays_away_is_reported_and_leaves_nothing_behind(
    world: ReplicaWorld, a: Node
) -> None:
    world.pieces.leave()
    refused = stage(world, a, rows_of("row", 10))
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], Unavailable)
    assert "cannot be reached" in str(refused[0])
    world.pieces.come_back()
    must_stage(world, a, rows_of("row", 10))
    must_commit(world, a, {0: 10})


def test_a_full_service_refuses_pieces_like_a_full_disk(world: ReplicaWorld, a: Node) -> None:
    must_stage(world, a, rows_of("kept", 3))
    world.pieces.max_bytes = sum(map(len, world.pieces.stored.values())) + 2000
    refused = stage(world, a, rows_of("row", 30), part=1)
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], Unavailable)
    assert "full" in str(refused[0])
    world.simulation.pass_ms(100)
    assert len(world.pieces.numbers()) == 1, "what there was room for is removed again"
    must_commit(world, a, {0: 3})
    assert world.values(a) == rows_of("kept", 3)


def test_parts_that_nobody_knows_are_removed_after_a_while(world: ReplicaWorld, a: Node) -> None:
    must_stage(world, a, rows_of("row", 3))
    known = world.pieces.numbers()
    stray = (1 << 32) + 77
    world.pieces.stored[stray, 1] = b"of a request that was carried out late"
    world.pieces.stored[(9 << 32) + 1, 1] = b"of an owner that comes later"
    world.simulation.pass_ms(SWEEP_MS + 1000)
    assert stray in world.pieces.numbers(), "it may be a piece that is being written"
    world.simulation.pass_ms(SWEEP_MS)
    assert world.pieces.numbers() == known | {(9 << 32) + 1}


def test_a_batch_that_nobody_commits_is_forgotten_by_the_next_owner_too(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    must_stage(world, a, rows_of("row", 3))
    world.must_promote("b")
    b.process.clock.advance(FORGOTTEN_MS)
    world.simulation.pass_ms(2000)
    assert world.pieces.numbers() == set()


def test_a_damaged_part_is_noticed(world: ReplicaWorld, a: Node, b: Node) -> None:
    must_stage(world, a, rows_of("row", 12))
    number = min(world.pieces.numbers())
    data = bytearray(world.pieces.stored[number, 2])
    data[100] ^= 1
    world.pieces.stored[number, 2] = bytes(data)
    world.must_promote("b")
    world.simulation.pass_ms(100)
    refused = commit(world, b, {0: 12})
    world.simulation.wait_until(lambda: bool(refused))
    assert isinstance(refused[0], PenstockError)
    assert "staged" in str(refused[0])


def test_a_piece_is_cut_wherever_its_parts_end() -> None:
    buffers = [memoryview(bytes(range(n))) for n in (3, 0, 10, 1, 4)]
    whole = b"".join(buffers)
    for part_bytes in range(1, 20):
        parts = list(cut(buffers, part_bytes))
        assert b"".join(parts) == whole
        assert all(len(part) == part_bytes for part in parts[:-1])
        assert 0 < len(parts[-1]) <= part_bytes


def test_a_header_that_is_none_is_told_apart() -> None:
    assert decode_header(b"") is None
    assert decode_header(b"PSP1 and something else") is None


@pytest.mark.parametrize("after_ms", [0, 1, 2, 3, 5, 8])
def test_a_commit_whose_owner_dies_is_repeated_at_the_next(
    world: ReplicaWorld, a: Node, b: Node, after_ms: int
) -> None:
    rows = rows_of("row", 10)
    must_stage(world, a, rows)
    outcomes = commit(world, a, {0: 10})
    world.simulation.pass_ms(after_ms)
    a.kill()
    world.must_promote("b")
    must_commit(world, b, {0: 10})
    assert world.values(b) == rows
    assert not outcomes or isinstance(outcomes[0], CommitReport)
