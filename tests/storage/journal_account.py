"""What the journal should say of a log, told by simple bookkeeping that shares no code with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from penstock.model.records import (
    Delivered,
    Finished,
    GroupCreated,
    Message,
    Released,
    Returned,
    Skipped,
    TopicCreated,
    decode_record,
)
from penstock.storage.journal_files import JournalReader
from penstock.storage.manifest import load_manifest
from penstock.storage.segments import SegmentEnd, list_segments, read_segment
from penstock.storage.vfs import Vfs

Row = dict[str, Any]
COLUMNS = (
    "position", "timestamp", "kind", "topic", "partition", "offset", "group", "owner", "attempt",
    "reason", "run_id", "step_id", "parent_step_id", "tenant_id", "routing_label", "retry_at",
    "produced_at", "delivered_at", "tenant", "namespace", "resource_kind",
)  # fmt: skip


def instant(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


class Hold(NamedTuple):
    """An attempt that was not returned: whose, and since when."""

    owner: str
    ts: int


class Account:
    """Tells rows from records, one after the other."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._topics: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        self._ids: dict[tuple[int, int], Row] = {}
        self._held: dict[tuple[int, int, int], list[Hold]] = {}
        self._why: dict[tuple[str, int, int], str] = {}

    def take(self, position: int, data: bytes) -> None:
        record = decode_record(data)
        if isinstance(record, TopicCreated):
            self._topics[record.topic_id] = record.name
        elif isinstance(record, GroupCreated):
            self._groups[record.group_id] = record.name
        elif isinstance(record, Message):
            self._message(position, record)
        elif isinstance(record, Delivered):
            for n, item in enumerate(record.items):
                held = self._held.setdefault((record.group_id, record.partition, item.offset), [])
                held.append(Hold(record.owner, record.ts))
                self._tell(position + n, record, item.offset, "delivered", held)
        elif isinstance(record, Returned):
            for n, offset in enumerate(record.offsets):
                held = self._held[record.group_id, record.partition, offset]
                self._tell(position + n, record, offset, "returned", held)
                held.pop()
        elif isinstance(record, Skipped):
            self._tell(position, record, record.offset, "skipped", None)
        elif isinstance(record, Released):
            held = self._held[record.group_id, record.partition, record.offset]
            self._why[self._topics[record.topic_id], record.group_id, record.offset] = record.reason
            self._tell(
                position,
                record,
                record.offset,
                "timed_out" if record.reason == "ack_timeout" else "nacked",
                held,
                reason=record.reason,
                retry_at=None if record.retry_at < 0 else instant(record.retry_at),
            )
        elif isinstance(record, Finished):
            held = self._held.pop((record.group_id, record.partition, record.offset))
            kind = ["acked", "dead_lettered", "skipped"][record.how]
            why = self._why.get((self._topics[record.topic_id], record.group_id, record.offset))
            reason = why if kind == "dead_lettered" else None
            self._tell(position, record, record.offset, kind, held, reason=reason)

    def _message(self, position: int, message: Message) -> None:
        ids: Row = {"produced_at": instant(message.ts)}
        if message.envelope is not None:
            for name in ("run_id", "step_id", "parent_step_id", "tenant_id"):
                ids[name] = getattr(message.envelope, name) or None
        if message.routing is not None:
            ids["routing_label"] = message.routing.label or None
        self._ids[message.topic_id, message.offset] = ids
        self._tell(position, message, message.offset, "produced", None)

    def _tell(
        self,
        position: int,
        record: Any,
        offset: int,
        kind: str,
        held: list[Hold] | None,
        **more: Any,
    ) -> None:
        """`held` is None where no delivery has to do with it."""
        row = dict.fromkeys(COLUMNS)
        row |= self._ids[record.topic_id, offset]
        row |= {
            "position": position,
            "timestamp": instant(record.ts),
            "kind": kind,
            **_named(self._topics[record.topic_id]),
            "partition": record.partition,
            "offset": offset,
            "group": None if kind == "produced" else self._groups[record.group_id],
            "owner": held[-1].owner if held else None,
            "attempt": None if held is None else len(held),
            "delivered_at": instant(held[-1].ts) if held else None,
        }
        self.rows.append(row | more)


def _named(full: str) -> Row:
    """Topics outside of the default namespace have three names in one."""
    kind = "stream" if full.startswith("\x1e") else "topic"
    *scope, topic = full.removeprefix("\x1e").split("\x1f")
    tenant, namespace = scope or (None, None)
    return {"topic": topic, "tenant": tenant, "namespace": namespace, "resource_kind": kind}


def account_of(vfs: Vfs, directory: str) -> list[Row]:
    """Of all segments in the directory."""
    account = Account()
    for _, path in list_segments(vfs, directory):
        for position, data in read_segment(vfs, path, SegmentEnd()):
            account.take(position, data)
    return account.rows


def journal_of(vfs: Vfs, directory: str) -> list[Row]:
    """What the journal of the manifest says."""
    manifest = load_manifest(vfs, directory)
    if manifest is None:
        return []
    reader = JournalReader(vfs, directory)
    rows: list[Row] = []
    for file in manifest.journal.files:
        for ref in file.batches:
            batch = reader.batch(ref)
            found = batch.to_pylist()
            assert [found[0]["position"], found[-1]["position"]] == [ref.first, ref.last]
            assert len(found) == ref.rows
            rows += found
    return rows
