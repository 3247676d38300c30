"""Staged pieces on disk: whole, and checked when they are read."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.core.write_rules import StagedPiece
from penstock.model.errors import Unavailable
from penstock.model.limits import KIB, MIB
from penstock.model.writes import PieceName
from penstock.storage.errors import CorruptStaged
from penstock.storage.staged_rows import RowSlice
from penstock.storage.staging import (
    SLICE_BYTES,
    SLICE_ROWS,
    PackedPiece,
    StagedInMemory,
    StagedPieceFiles,
    pack,
    piece_name,
)
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

PATH = f"/data/staged/{piece_name(7)}"


def piece(packed: PackedPiece, number: int = 7) -> StagedPiece:
    name = PieceName("p", 3, 2, "a", 1)
    return StagedPiece(name, number, packed.rows, packed.nbytes, 5, [("t", 0)], False)


def packed_values(values: list[str]) -> PackedPiece:
    return pack(pa.table({"value": values}), "t", [])


def read_back(shelf: StagedPieceFiles | StagedInMemory, number: int = 7) -> list[str]:
    opened = shelf.open(number)
    values: list[str] = []
    row = 0
    for part in opened.content.slices:
        found = RowSlice(opened.read(part), opened.content, row)
        taken = found.take(0, found.rows)
        values += taken.values
        assert taken.sizes == [len(value.encode()) for value in taken.values]
        row += part.rows
    return values


def shelf_on(vfs: FaultyVfs, reserve_bytes: int = 0) -> StagedPieceFiles:
    shelf = StagedPieceFiles(vfs, "/data", reserve_bytes)
    shelf.load()
    return shelf


VALUES = {
    "few": ["a", "b"],
    "many": [f"value {n}" for n in range(2 * SLICE_ROWS + 1)],
    "not ascii": [f"välue {n} ключ" for n in range(3000)],
    "mixed": ["ä" if n % 300 == 0 else "a" * (n % 50 + 1) for n in range(5000)],
    "large": ["x" * (SLICE_BYTES // 2 + 1)] * 5,
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_piece_is_read_as_it_was_written(values: list[str]):
    vfs = FaultyVfs()
    for shelf in (shelf_on(vfs), StagedInMemory()):
        packed = packed_values(values)
        shelf.write(piece(packed), packed)
        assert read_back(shelf) == values
    assert read_back(shelf_on(vfs.crash("nothing"))) == values
    assert vfs.open_files == 0


def test_a_slice_is_taken_some_rows_at_a_time():
    packed = packed_values(["x" * 100] * 50)
    part = RowSlice(packed.buffers[0], packed.content, 0)
    assert part.rows_within(0, 10, MIB) == 10
    assert part.rows_within(45, 10, MIB) == 5
    assert part.rows_within(3, 10, 250) == 2
    assert part.rows_within(3, 10, 1) == 1
    assert part.take(45, 5).values == ["x" * 100] * 5


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_while_a_piece_is_written_leaves_it_whole_or_not_at_all(flavour: str):
    values = VALUES["not ascii"]
    calls = _calls_of_a_write()
    for number in range(1, calls + 1):
        vfs = FaultyVfs()
        shelf = shelf_on(vfs)
        packed = packed_values(values)
        vfs.fail_call(number, 5)
        try:
            shelf.write(piece(packed), packed)
        except OSError:
            is_written = False
        else:
            is_written = True
        found = shelf_on(vfs.crash(flavour, number))
        assert not is_written or list(found.found) == [7]
        for each in found.found:
            assert read_back(found, each) == values
        assert not any(path.endswith(".tmp") for path in found._vfs.paths())  # type: ignore[attr-defined]


def _calls_of_a_write() -> int:
    vfs = FaultyVfs()
    shelf = shelf_on(vfs)
    before = len(vfs.calls)
    packed = packed_values(["a"])
    shelf.write(piece(packed), packed)
    return len(vfs.calls) - before


def test_a_flipped_bit_is_found():
    vfs = FaultyVfs()
    packed = packed_values([f"value {n}" for n in range(50)])
    shelf_on(vfs).write(piece(packed), packed)
    sound = vfs.content(PATH)
    for at in range(len(sound)):
        vfs.plant(PATH, sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        with pytest.raises(CorruptStaged):
            read_back(shelf_on(vfs))


def test_a_piece_that_is_cut_short_or_missing_is_found():
    vfs = FaultyVfs()
    packed = packed_values(["a"] * 50)
    shelf = shelf_on(vfs)
    shelf.write(piece(packed), packed)
    sound = vfs.content(PATH)
    for length in range(0, len(sound), 7):
        vfs.plant(PATH, sound[:length])
        with pytest.raises(CorruptStaged):
            read_back(shelf)
    shelf.remove(7)
    with pytest.raises(CorruptStaged, match="missing"):
        read_back(shelf)
    shelf.remove(7)


def test_pieces_do_not_use_the_reserve():
    vfs = FaultyVfs(capacity_bytes=100 * KIB)
    shelf = shelf_on(vfs, reserve_bytes=64 * KIB)
    packed = packed_values(["x" * 40 * KIB])
    with pytest.raises(Unavailable):
        shelf.write(piece(packed), packed)
    assert vfs.paths() == []
    small = packed_values(["x" * 20 * KIB])
    shelf.write(piece(small), small)


def test_a_start_finds_all_pieces_and_leaves_other_files_alone():
    vfs = FaultyVfs()
    packed = packed_values(["a"])
    shelf_on(vfs).write(piece(packed), packed)
    vfs.plant("/data/staged/piece-1.rows", b"no name of ours")
    vfs.plant("/data/staged/piece-00000000000000000009.rows.tmp", b"a leftover")
    shelf = shelf_on(vfs)
    assert shelf.found == {7: piece(packed)}
    assert vfs.paths() == [
        "/data/staged/piece-00000000000000000007.rows",
        "/data/staged/piece-1.rows",
    ]
