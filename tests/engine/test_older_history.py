"""History files of before durable streams, without the column for payloads, stay readable."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.model.ranges import RangeRequest, Selection
from penstock.storage import columns, history
from tests.engine.durable_stream_harness import EARLIEST, Streams

RECORDS = 20


@pytest.fixture
def sealed_before(monkeypatch):
    """A broker whose topic was sealed by an older version."""
    broker = Streams()
    broker.topic("t")
    broker.put("t", *[f"old {n}" for n in range(RECORDS)])
    text_bytes = history._text_bytes
    with monkeypatch.context() as patch:
        patch.setattr(history, "SCHEMA", columns.MESSAGE_SCHEMA)
        patch.setattr(
            history, "complete", lambda batch: columns.complete(batch, columns.MESSAGE_SCHEMA)
        )
        patch.setattr(
            history,
            "_text_bytes",
            lambda batch, name: 0 if name == "payload" else text_bytes(batch, name),
        )
        broker.seal()
    return broker


def test_an_older_file_is_read_and_joined_with_newer_ones(sealed_before):
    broker = sealed_before
    broker.crash()
    assert [m.value for m in broker.stored("t")] == [f"old {n}" for n in range(RECORDS)]
    broker.put("t", "new")
    broker.publish(b"\xff")
    broker.seal_and_crash()
    assert [m.value for m in broker.stored("t")][-1] == "new"
    assert broker.listen(EARLIEST).events == [b"\xff"]


def test_a_range_of_older_and_newer_files_is_one_stream(sealed_before):
    """With all columns, whole batches are sent as they are on disk, if they have all of them."""
    broker = sealed_before
    broker.put("t", "new")
    broker.seal()
    request = RangeRequest(topic="t", partition=0, selection=Selection(), format="arrow")
    read = broker.must(broker.engine.ranges.open, request)
    data = [read.head]
    while not read.is_over():
        pieces: list[bytes] = []
        read.next(pieces.append)
        broker.settle()
        data.append(bytes(pieces[0]))
    table = pa.ipc.open_stream(b"".join([*data, read.tail])).read_all()
    assert table.schema.names == columns.SCHEMA.names
    assert table.column("value").to_pylist() == [*[f"old {n}" for n in range(RECORDS)], "new"]
    assert table.column("payload").null_count == RECORDS + 1
