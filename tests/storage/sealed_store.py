"""A data directory that is sealed segment by segment, with a plain dict of what must be in it.

`read_paths` opens an engine on the directory, as a start does, and reads every partition through
each path that serves sealed rows: pages for consumers, ranges as Arrow, records as JSON lines,
splits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pyarrow as pa
import pytest

from penstock.core.state import BrokerState, apply
from penstock.engine.window import PartitionLog
from penstock.model.limits import KIB, Limits
from penstock.model.ranges import RangeRequest
from penstock.model.records import (
    Message,
    Record,
    TopicCreated,
    TopicDeleted,
    Trimmed,
    encode_record,
)
from penstock.model.splits import SplitRequest
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import WalOptions
from penstock.storage.manifest import Manifest, load_manifest
from penstock.storage.seal import Sealed, SealJob, seal
from penstock.storage.segments import segment_name
from penstock.storage.vfs import remove_if_there
from tests.engine.harness import Broker
from tests.engine.inline_sealing import PATCHES
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.random_broker import write_segment

DIRECTORY = "/data"
LIMITS = Limits(max_partition_msgs=10**6, journal_retention_ms=0)
OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
PAGE_ROWS = 7

Rows = dict[tuple[int, int, int], str]
"""Value by topic id, partition and offset."""


def patch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing and mapping as a disk in memory needs them."""
    for module, name, replacement in PATCHES:
        monkeypatch.setattr(module, name, replacement)


class SealedStore:
    """Records are gathered until `seal`, which makes them a segment and seals it."""

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.state = BrokerState(LIMITS)
        self.rows: Rows = {}
        self.sealed: list[Sealed] = []
        self._pending: list[bytes] = []
        self._segment = 1
        self._seq = 1
        self._ts = 1_000

    def topic(self, name: str, partitions: int = 1) -> int:
        topic_id = self.state.next_id
        self._record(TopicCreated(topic_id, self._ts, name, partitions))
        return topic_id

    def produce(self, topic_id: int, count: int, value: str = "v", partition: int = 0) -> None:
        topic = self.state.topics_by_id[topic_id]
        for _ in range(count):
            offset = topic.next_offset
            text = f"{value}-{offset}"
            self._record(Message(topic_id, partition, offset, self._ts, f"k{offset % 5}", text))
            self.rows[topic_id, partition, offset] = text

    def trim(self, topic_id: int, partition: int, before: int, uncounted: int = 0) -> None:
        """As retention does. An older release did not count what one batch hid in another."""
        gone = [
            place for place in self.rows if place[:2] == (topic_id, partition) and place[2] < before
        ]
        size = sum(len(f"k{offset % 5}{self.rows[t, p, offset]}") for t, p, offset in gone)
        if gone:
            self._record(
                Trimmed(topic_id, partition, self._ts, before, len(gone) - uncounted, size)
            )
        for place in gone:
            del self.rows[place]

    def delete(self, topic_id: int) -> None:
        self._record(TopicDeleted(topic_id, self._ts))
        self.rows = {place: value for place, value in self.rows.items() if place[0] != topic_id}

    def _record(self, record: Record) -> None:
        self._ts += 1
        self._pending.append(encode_record(record))
        apply(self.state, record)

    def seal(self) -> Sealed:
        number = self._segment
        self._seq = write_segment(self.vfs, DIRECTORY, number, self._seq, self._pending)
        self._pending = []
        self._segment += 1
        known = [file.number for file in self.manifest.history]
        job = SealJob(directory=DIRECTORY, up_to_segment=number, limits=LIMITS, known_files=known)
        sealed = seal(self.vfs, job)
        self.sealed.append(sealed)
        # The log goes on with a segment in which there is nothing yet.
        write_segment(self.vfs, DIRECTORY, number + 1, self._seq, [])
        remove_if_there(self.vfs, os.path.join(DIRECTORY, segment_name(number)))
        self.vfs.fsync_dir(DIRECTORY)
        return sealed

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.vfs, DIRECTORY) or Manifest()

    def check(self) -> None:
        """Every live row is found, and nothing else, through each way to read."""
        for name, found in read_paths(self.vfs).items():
            missing = sorted(set(self.rows) - set(found))
            assert not missing, f"{name}: {len(missing)} rows are not found, first {missing[:5]}"
            assert found == self.rows, name


def read_paths(vfs: FaultyVfs, only: str = "") -> dict[str, Rows]:
    """All rows that a broker on this disk finds, by the way they were read."""
    broker = Broker(vfs.restarted(), limits=LIMITS, options=OPTIONS, directory=DIRECTORY)
    ways: dict[str, Callable[[Broker, str, PartitionLog], list[tuple[int, str]]]] = {
        "pages": _pages,
        "range": _range,
        "records": _records,
        "splits": _splits,
    }
    if only:
        ways = {only: ways[only]}
    found: dict[str, Rows] = {way: {} for way in ways}
    for topic in broker.state.topics.values():
        for partition in topic.partitions:
            log = broker.engine.parts.window.log(topic.id, partition.index)
            for way, read in ways.items():
                rows = read(broker, topic.name, log)
                offsets = [offset for offset, _ in rows]
                assert offsets == sorted(set(offsets)), f"{way}: rows twice or out of order"
                found[way] |= {(topic.id, partition.index, at): value for at, value in rows}
    broker.close()
    broker.scheduler.close()
    return found


def _pages(broker: Broker, topic: str, log: PartitionLog) -> list[tuple[int, str]]:
    """As consumers are served: page after page, each from where the last one ended."""
    assert broker.engine.parts.sealed is not None
    history: HistoryReader = broker.engine.parts.sealed.history
    rows: list[tuple[int, str]] = []
    at = log.first_offset
    while (ref := log.ref_at(at)) is not None:
        page = history.read(ref, at, PAGE_ROWS)
        assert page, f"batch {ref} has no row at {at} or behind it"
        rows += [(message.offset, str(message.value)) for message in page]
        at = page[-1].offset + 1
    return rows


def _range(broker: Broker, topic: str, log: PartitionLog) -> list[tuple[int, str]]:
    data = _bytes(broker, RangeRequest(topic=topic, partition=log.partition))
    table = pa.ipc.open_stream(data).read_all()
    return list(
        zip(table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True)
    )


def _records(broker: Broker, topic: str, log: PartitionLog) -> list[tuple[int, str]]:
    request = RangeRequest(topic=topic, partition=log.partition, format="ndjson")
    rows = map(json.loads, _bytes(broker, request).splitlines())
    return [(row["offset"], row["value"]) for row in rows]


def _splits(broker: Broker, topic: str, log: PartitionLog) -> list[tuple[int, str]]:
    request = SplitRequest(topic=topic, partition=log.partition, rows=11)
    found = broker.must(broker.engine.ranges.splits, request)
    rows: list[tuple[int, str]] = []
    for part in found.splits:
        wanted = RangeRequest(topic=topic, partition=log.partition, start=part.start, end=part.end)
        table = pa.ipc.open_stream(_bytes(broker, wanted)).read_all()
        assert table.num_rows == part.rows, "a split counts other rows than a range reads"
        rows += zip(
            table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True
        )
    return rows


def _bytes(broker: Broker, request: RangeRequest) -> bytes:
    found = broker.must(broker.engine.ranges.open, request)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(piece)
    return b"".join([*pieces, found.tail])
