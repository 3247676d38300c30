"""All entries of a cache as of one moment."""

from __future__ import annotations

import errno
import json
from typing import Any

import pyarrow as pa
import pytest

from penstock.api.ranges import Range
from penstock.model.caching import Put
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.model.limits import MAX_CACHE_SNAPSHOTS, MAX_TENANT_SNAPSHOTS, MIB
from penstock.model.tenancy import Path
from penstock.storage import cache_rows
from tests.engine.cache_harness import CacheBroker
from tests.storage.faulty_vfs import FaultyVfs

ODD = b"\xff\x00"


def open_snapshot(broker: CacheBroker, path: Path, *columns: str, form: str = "arrow") -> Any:
    return broker.call(broker.engine.caches.entries, path, columns, form)


def pieces_of(broker: CacheBroker, opened: Range) -> list[bytes]:
    """Reads the snapshot to its end."""
    pieces: list[bytes] = []
    while not opened.is_over():
        got: list[Any] = []
        opened.next(got.append)
        broker.settle()
        (piece,) = got
        assert not isinstance(piece, PenstockError), piece
        if piece is not None:
            pieces.append(bytes(piece))
    return pieces


def rows(broker: CacheBroker, opened: Range) -> list[dict[str, Any]]:
    data = opened.head + b"".join(pieces_of(broker, opened)) + opened.tail
    found: list[dict[str, Any]] = pa.ipc.open_stream(data).read_all().to_pylist()
    return found


def values(broker: CacheBroker, opened: Range) -> dict[str, bytes]:
    found = rows(broker, opened)
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["value"] for row in found}


@pytest.mark.parametrize("durable", [True, False])
def test_entries_have_their_key_value_version_and_expiry(durable: bool):
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=durable)
    first = broker.write(path, "a", ODD)
    second = broker.write(path, "b", b"", ttl_ms=60_000)
    found = {row["key"]: row for row in rows(broker, open_snapshot(broker, path))}
    assert found["a"] == {"key": "a", "value": ODD, "version": first, "expires_at": None}
    assert (found["b"]["value"], found["b"]["version"]) == (b"", second)
    left_ms = found["b"]["expires_at"].timestamp() * 1000 - broker.clock.wall_ms()
    assert left_ms == pytest.approx(60_000, abs=1)
    opened = open_snapshot(broker, path, "key", form="ndjson")
    lines = b"".join(pieces_of(broker, opened)).splitlines()
    assert sorted(json.loads(line)["key"] for line in lines) == ["a", "b"]
    broker.close()


@pytest.mark.parametrize("durable", [True, False])
def test_changes_after_its_beginning_are_not_in_it(durable: bool, monkeypatch: pytest.MonkeyPatch):
    """Small pieces, and every kind of change between two of them."""
    monkeypatch.setattr(cache_rows, "PIECE_ENTRIES", 10)
    monkeypatch.setattr(cache_rows, "STEP_ROWS", 4)
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=durable)
    before = {f"k{n}": b"%d" % n for n in range(50)}
    for key, value in before.items():
        broker.write(path, key, value)
    opened = open_snapshot(broker, path)
    data = [opened.head]
    for turn in range(1000):
        if opened.is_over():
            break
        got: list[Any] = []
        opened.next(got.append)
        broker.settle()
        data.append(bytes(got[0]))
        broker.write(path, f"new {turn}", b"later")
        broker.write(path, f"k{49 - turn}", b"changed")
        broker.erase(path, f"k{40 - turn}")
    assert len(data) >= 5
    table = pa.ipc.open_stream(b"".join([*data, opened.tail])).read_all()
    found = dict(zip(*(table.column(name).to_pylist() for name in ("key", "value")), strict=True))
    assert found == before
    assert table.num_rows == 50
    broker.close()


def test_an_entry_that_expires_before_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """felix: from its expiry on, a value is never returned."""
    monkeypatch.setattr(cache_rows, "PIECE_ENTRIES", 1)
    monkeypatch.setattr(cache_rows, "STEP_ROWS", 1)
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=False)
    broker.write(path, "lasting", b"1")
    broker.write(path, "short", b"2", ttl_ms=100)
    assert values(broker, open_snapshot(broker, path)) == {"lasting": b"1", "short": b"2"}
    opened = open_snapshot(broker, path)
    broker.pass_ms(100)
    assert values(broker, opened) == {"lasting": b"1"}
    broker.close()


def test_an_empty_cache_has_no_rows_and_large_values_are_pieces_of_their_own():
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=False)
    assert rows(broker, open_snapshot(broker, path)) == []
    for n in range(5):
        broker.write(path, f"k{n}", b"x" * (3 * MIB))
    pieces = pieces_of(broker, open_snapshot(broker, path))
    assert [len(piece) // MIB for piece in pieces] == [3] * 5
    broker.close()


def test_a_read_does_not_count_as_use_of_an_entry():
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=False, eviction_policy="lru", max_entries=2)
    broker.write(path, "a", b"1")
    broker.write(path, "b", b"2")
    broker.read(path, "a")
    values(broker, open_snapshot(broker, path))
    broker.write(path, "c", b"3")
    assert broker.keys(path) == {"a", "c"}
    assert (broker.inside(path).hits, broker.inside(path).misses) == (1, 0)
    broker.close()


def test_snapshots_that_are_being_read_have_a_limit_for_each_tenant_and_for_all():
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=False)
    held = [open_snapshot(broker, path) for _ in range(MAX_TENANT_SNAPSHOTS)]
    refused = open_snapshot(broker, path)
    assert isinstance(refused, ResourceExhausted)
    assert refused.limit == "cache_snapshots"
    others = [broker.cache("c", tenant=f"t{n}", durable=False) for n in range(8)]
    for each in others:
        while len(held) < MAX_CACHE_SNAPSHOTS:
            opened = open_snapshot(broker, each)
            if isinstance(opened, ResourceExhausted):
                break
            held.append(opened)
    assert len(held) == MAX_CACHE_SNAPSHOTS
    assert isinstance(open_snapshot(broker, others[-1]), ResourceExhausted)
    held.clear()
    opened = others = None  # type: ignore[assignment]
    assert values(broker, open_snapshot(broker, path)) == {}
    broker.close()


def test_a_snapshot_of_a_durable_cache_waits_for_the_disk():
    """What it shows is durable: a put that is not is not answered before it either."""
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=True)
    broker.write(path, "a", b"1")
    broker.disk.fail_call(1, errno.EIO, only=["sync", "write"], path=broker.log.files.active.path)
    outcomes: list[Any] = []
    broker.engine.caches.put(Put(path, "b", b"2"), lambda _: None)
    broker.engine.caches.entries(path, (), "arrow", outcomes.append)
    broker.settle()
    assert [type(each) for each in outcomes] == [Unavailable]
    broker.close()


def test_an_unknown_cache_or_column_is_refused():
    broker = CacheBroker(FaultyVfs())
    path = broker.cache("c", durable=False)
    assert isinstance(open_snapshot(broker, (*path[:2], "nowhere")), NotFound)
    refused = open_snapshot(broker, path, "ttl_ms")
    assert isinstance(refused, InvalidArgument)
    assert "there are key, value, version, expires_at" in refused.message
    broker.close()
