"""A range is given in pieces of a bounded size, whatever its rows look like and where they are."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.engine import ranges as ranges_module
from penstock.engine import window as window_module
from penstock.model.envelope import Envelope
from penstock.model.limits import KIB, Limits
from penstock.model.ranges import RangeRequest, Selection
from penstock.storage import row_stream
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, on_disk

PIECE = 8 * KIB
SEGMENTS = WalOptions(segment_bytes=256 * KIB, reserve_bytes=0)
ROW = 3 * KIB


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranges_module, row_stream):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(row_stream, "RAW_BYTES", PIECE)


def filled(rng: random.Random, count: int = 400) -> tuple[Broker, list[str]]:
    """Small rows and runs of large ones, some of them sealed."""
    broker = on_disk(limits=Limits(tail_bytes=rng.choice([0, 16 * KIB])), options=SEGMENTS)
    broker.topic()
    values = []
    for n in range(count):
        size = ROW if n % 50 > 40 else rng.randrange(60)
        value = f"{n} ".ljust(size, "x")
        broker.produce("t", value, envelope=Envelope(run_id=f"run-{n % 7}"))
        values.append(value)
        if rng.random() < 0.01:
            broker.seal()
    return broker, values


def pieces(broker: Broker, request: RangeRequest, rng: random.Random | None = None) -> list[bytes]:
    found = broker.must(broker.engine.ranges.open, request)
    read = [found.head]
    while (piece := broker.must(found.next)) is not None:
        read.append(bytes(piece))
        if rng is not None and rng.random() < 0.05:
            broker.seal()
    assert found.is_over()
    return [*read, found.tail]


def rows(read: list[bytes], form: str) -> list[dict[str, Any]]:
    data = b"".join(read)
    if form == "arrow":
        found: list[dict[str, Any]] = pa.ipc.open_stream(data).read_all().to_pylist()
        return found
    return [msgspec.json.decode(line) for line in data.splitlines()]


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_comes_once_in_pieces_that_are_not_large(seed: int, form: Any):
    rng = random.Random(seed)
    broker, values = filled(rng)
    if seed:
        broker.seal()
    read = pieces(broker, RangeRequest(topic="t", partition=0, format=form), rng)
    found = rows(read, form)
    assert [row["offset"] for row in found] == list(range(len(values)))
    assert [row["value"] for row in found] == values
    sizes = [len(piece) for piece in read]
    assert len(sizes) > 20
    # A step of rows that are small on the average may end in a run of large ones.
    assert max(sizes) < 6 * PIECE
    broker.close()


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
def test_rows_that_are_chosen_are_gathered_into_pieces(form: Any):
    """Where few rows of a batch are wanted, a piece goes on over those that are not."""
    broker, _ = filled(random.Random(7))
    broker.seal()
    selection = Selection(run_id="run-3", columns=("offset", "run_id"))
    request = RangeRequest(
        topic="t", partition=0, start=10, end=390, format=form, selection=selection
    )
    read = pieces(broker, request)
    found = rows(read, form)
    assert [row["offset"] for row in found] == [n for n in range(10, 390) if n % 7 == 3]
    assert all(row["run_id"] == "run-3" for row in found)
    broker.close()


def test_a_row_larger_than_a_piece_is_a_piece_of_its_own():
    broker = on_disk(options=SEGMENTS)
    broker.topic()
    broker.put("t", "small", "x" * 5 * PIECE, "small", "y" * 5 * PIECE)
    broker.seal()
    read = pieces(broker, RangeRequest(topic="t", partition=0, format="ndjson"))
    assert [len(row["value"]) for row in rows(read, "ndjson")] == [5, 5 * PIECE, 5, 5 * PIECE]
    assert max(map(len, read)) < 6 * PIECE
    broker.close()


@pytest.mark.parametrize("tail_bytes", [0, 10**7], ids=["read from the log", "in memory"])
def test_rows_that_are_not_sealed_come_in_pieces_too(
    tail_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 4)
    limits = Limits(tail_bytes=tail_bytes)
    broker = on_disk(limits=limits, options=WalOptions(reserve_bytes=0))
    broker.topic()
    broker.put("t", *["x" * 500 for _ in range(200)])
    broker.pass_ms(1001)
    assert bool(broker.engine.parts.window.used_bytes) == bool(tail_bytes)
    read = pieces(broker, RangeRequest(topic="t", partition=0, format="ndjson"))
    assert len(rows(read, "ndjson")) == 200
    assert max(map(len, read)) < 2 * PIECE
    broker.close()
