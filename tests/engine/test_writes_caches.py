"""Batches that are put into a cache."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.image import take_image
from penstock.engine import batch_storing
from penstock.model.errors import InvalidArgument, NotFound
from penstock.model.tenancy import Path
from penstock.model.writes import CommitReport
from penstock.storage import staging
from tests.engine.cache_harness import CacheBroker
from tests.engine.write_harness import (
    EVERY_APPEND_A_FRAME,
    ROOMY,
    Photographer,
    WriteBroker,
)
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs


class Both(CacheBroker, WriteBroker):
    """A broker with words for caches and for batches."""


def broker_with(**config: Any) -> tuple[Both, Path]:
    broker = Both(FaultyVfs(), options=ROOMY)
    return broker, broker.cache("c", **config)


def entries(count: int, prefix: str = "v") -> pa.Table:
    return pa.table(
        {"key": [f"k{n}" for n in range(count)], "value": [f"{prefix}{n}" for n in range(count)]}
    )


def put(broker: Both, path: Path, table: pa.Table, batch: int = 0) -> CommitReport:
    broker.stage(table, cache=path, batch=batch)
    return broker.commit_batch(table.num_rows, batch=batch)


@pytest.mark.parametrize("durable", [True, False])
def test_rows_are_put_in_order_and_a_null_deletes(durable: bool):
    broker, path = broker_with(durable=durable)
    broker.write(path, "old", b"is deleted")
    keys = ["a", "b", "a", "old", "never there"]
    values = pa.array([b"1", b"\xff\x00", b"2", None, None], pa.binary())
    assert put(broker, path, pa.table({"key": keys, "value": values})).rows == 5
    assert broker.keys(path) == {"a", "b"}
    assert broker.read(path, "a") == b"2"
    assert broker.read(path, "b") == b"\xff\x00"
    image = take_image(broker.state)
    broker.crash()
    assert take_image(broker.state) == image
    assert broker.keys(path) == ({"a", "b"} if durable else set())
    assert broker.commit_batch(5) == CommitReport("already_committed", 5)
    broker.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_ttl_runs_from_when_it_is_stored(durable: bool):
    broker, path = broker_with(durable=durable)
    table = entries(3).append_column("ttl_ms", pa.array([100, None, 0], pa.int32()))
    put(broker, path, table)
    assert broker.read(path, "k0") == b"v0"
    assert broker.read(path, "k2") is None
    broker.pass_ms(101)
    assert [broker.read(path, f"k{n}") for n in range(3)] == [None, b"v1", None]
    broker.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_durable_cache_has_all_of_a_batch_after_any_crash(
    flavour: str, monkeypatch: pytest.MonkeyPatch
):
    """Each burst is one frame with how far the batch is; what was put once is not put again."""
    monkeypatch.setattr(batch_storing, "BURST_ROWS", 3)
    monkeypatch.setattr(staging, "SLICE_ROWS", 5)
    vfs = Photographer(flavour)
    broker = Both(vfs, options=EVERY_APPEND_A_FRAME)
    path = broker.cache("c", durable=True)
    before = broker.inside(path).version
    vfs.is_watching = True
    broker.stage(pa.concat_tables([entries(8, "old"), entries(8, "new")]), cache=path)
    vfs.answered = broker.ask_commit(16)
    broker.settle()
    assert vfs.answered == [CommitReport("committed", 16)]
    vfs.is_watching = False
    broker.close()
    whole = {f"k{n}": f"new{n}".encode() for n in range(8)}
    for number, (survivor, is_answered) in enumerate(vfs.photographs):
        broker = Both(survivor, options=EVERY_APPEND_A_FRAME)
        broker.settle()
        found = {key: broker.read(path, key) for key in broker.keys(path)}
        assert found in ({}, whole), number
        assert found or not is_answered, number
        assert broker.inside(path).version == before + (16 if found else 0), number
        broker.close()


def test_a_cache_that_is_too_small_for_a_burst_keeps_the_last_rows():
    broker, path = broker_with(durable=True, max_entries=10)
    assert put(broker, path, entries(300)).rows == 300
    assert broker.keys(path) == {f"k{n}" for n in range(290, 300)}
    broker.close()


def test_a_row_that_cannot_fit_is_left_out_and_the_others_are_put(
    caplog: pytest.LogCaptureFixture,
):
    broker, path = broker_with(max_bytes=2000)
    table = pa.table({"key": ["a", "b", "c"], "value": ["1", "x" * 5000, "3"]})
    with caplog.at_level(logging.WARNING):
        put(broker, path, table)
    assert broker.keys(path) == {"a", "c"}
    assert broker.engine.writes.batches.skipped == 1
    assert "1 rows were left out" in caplog.text
    broker.close()


def test_a_cache_that_is_deleted_meanwhile_gets_nothing():
    broker, path = broker_with()
    broker.stage(entries(5), cache=path)
    broker.drop(path)
    assert broker.commit_batch(5) == CommitReport("committed", 5)
    assert broker.engine.writes.batches.skipped == 5
    assert isinstance(broker.stage_in_vain(entries(5), cache=path, batch=1), NotFound)
    broker.close()


def test_a_watch_sees_every_row_of_a_batch():
    broker, path = broker_with(durable=True)
    watcher = broker.watch(path)
    put(broker, path, entries(3))
    assert watcher.seen() == [("put", f"k{n}", f"v{n}".encode()) for n in range(3)]
    broker.close()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"key": ["a"]}), "has the columns 'key' and 'value'"),
        (pa.table({"key": ["a", None], "value": ["1", "2"]}), "row 1: key is null"),
        (pa.table({"key": ["a", ""], "value": ["1", "2"]}), "row 1: key: key is required"),
        (pa.table({"key": ["a", "b\x07"], "value": ["1", "2"]}), "row 1: key: key has control"),
        (pa.table({"key": ["a", "\x85"], "value": ["1", "2"]}), "row 1: key: key has control"),
        (pa.table({"key": ["x" * 1025], "value": ["1"]}), "row 0: key: key is longer than 1024"),
        (
            pa.table({"key": ["a"], "value": ["1"], "ttl_ms": [-1]}),
            "row 0: ttl_ms must be a whole number, at least 0",
        ),
        (pa.table({"key": ["a"], "value": ["1"], "topic": ["t"]}), "unknown columns ['topic']"),
    ],
)
def test_rows_that_a_cache_cannot_have_are_refused(table: pa.Table, message: str):
    broker, path = broker_with()
    error = broker.stage_in_vain(table, cache=path)
    assert isinstance(error, InvalidArgument)
    assert message in error.message
    broker.close()
