"""History returns messages as they were stored, and only from undamaged batches."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.envelope import DeadLetter, Envelope, RetryPolicy, Routing
from penstock.model.records import Message, decode_record, encode_record
from penstock.storage.columns import PLAIN_SCHEMA, SCHEMA, complete, to_batch, to_messages
from penstock.storage.errors import CorruptLog
from penstock.storage.history import (
    BatchRef,
    HistoryFile,
    HistoryGone,
    PartitionRows,
    history_name,
    history_number,
    remove_history,
    write_history,
)
from penstock.storage.history_reader import HistoryReader
from penstock.storage.vfs import Vfs

TOPIC, PARTITION = 7, 2

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(0, 2**63 - 1)
small = st.integers(0, 1023)
policies = st.builds(RetryPolicy, numbers, numbers, numbers)
envelopes = st.builds(
    Envelope,
    run_id=text,
    step_id=text,
    parent_step_id=text,
    tenant_id=text,
    idempotency_key=text,
    target_topic=text,
    partition_override=st.none() | small,
    deadline=text,
    retry_policy=st.none() | policies,
    dlq=st.none()
    | st.builds(
        DeadLetter, text, small, numbers, text, numbers, text, numbers, st.none() | policies
    ),
)
routings = st.builds(Routing, text, st.dictionaries(text, text, max_size=3))


@st.composite
def message_lists(draw: st.DrawFn) -> list[Message]:
    offsets = sorted(draw(st.sets(st.integers(0, 2**53 - 1), min_size=1, max_size=12)))
    return [
        Message(
            TOPIC,
            PARTITION,
            offset,
            draw(st.integers(0, 2**42)),
            draw(text),
            draw(text),
            draw(st.none() | envelopes),
            draw(st.none() | routings),
        )
        for offset in offsets
    ]


def plain(count: int, *, step: int = 3) -> list[Message]:
    return [
        Message(TOPIC, PARTITION, n * step, 5_000 + n, f"k{n}", f"value-{n}") for n in range(count)
    ]


def normal(message: Message) -> Message:
    """An envelope with nothing in it is no envelope; a dead letter has no policy that acts."""
    envelope = message.envelope
    if envelope == Envelope():
        return msgspec.structs.replace(message, envelope=None)
    if envelope is not None and envelope.dlq is not None:
        envelope = msgspec.structs.replace(envelope, retry_policy=None)
        return msgspec.structs.replace(message, envelope=envelope)
    return message


def write(directory: Path, messages: list[Message], number: int = 1) -> HistoryFile:
    return write_history(
        Vfs(), str(directory), number, [PartitionRows(TOPIC, PARTITION, to_batch(messages))]
    )


def path_of(directory: Path, number: int = 1) -> Path:
    return directory / history_name(number)


@settings(deadline=None)
@given(message_lists())
def test_every_message_comes_back_as_it_was(messages: list[Message]):
    batch = complete(to_batch(messages))
    assert batch.schema == SCHEMA
    assert to_messages(batch, TOPIC, PARTITION) == [normal(message) for message in messages]


@settings(deadline=None)
@given(message_lists(), st.integers(0, 12), st.integers(1, 12))
def test_a_slice_gives_the_messages_of_its_rows(messages: list[Message], start: int, rows: int):
    batch = to_batch(messages).slice(start, rows)
    wanted = [normal(message) for message in messages[start : start + rows]]
    assert to_messages(batch, TOPIC, PARTITION) == wanted


@pytest.mark.parametrize(
    ("envelope", "routing"),
    [
        (None, None),
        (Envelope(partition_override=0), None),
        (Envelope(retry_policy=RetryPolicy()), None),
        (Envelope(retry_policy=RetryPolicy(max_attempts=3)), None),
        (Envelope(dlq=DeadLetter("orders", 0, 0, "workers", 0, "", 0)), None),
        (Envelope(run_id="läuft\0😀"), Routing("", {"a\0": "ü", "": ""})),
        (None, Routing("label", {})),
        (None, Routing("", {})),
    ],
)
@pytest.mark.parametrize("value", ["", "\0", "größe 😀", "x" * 100_000])
def test_absent_and_empty_values_stay_distinct(
    tmp_path: Path, envelope: Envelope | None, routing: Routing | None, value: str
):
    messages = [
        Message(TOPIC, PARTITION, 0, 1, "", value, envelope, routing),
        Message(TOPIC, PARTITION, 1, 1, "\0", value),
    ]
    file = write(tmp_path, messages)
    assert HistoryReader(Vfs(), str(tmp_path)).read(file.batches[0], 0, 10) == messages


def test_a_number_that_arrow_cannot_hold_is_cut_to_the_largest_it_can():
    policy = RetryPolicy(max_attempts=2**64 - 1)
    message = Message(TOPIC, PARTITION, 0, 0, "", "v", Envelope(retry_policy=policy))
    stored = decode_record(encode_record(message))
    assert isinstance(stored, Message)
    [read] = to_messages(to_batch([stored]), TOPIC, PARTITION)
    assert read.envelope == Envelope(retry_policy=RetryPolicy(max_attempts=2**63 - 1))


def test_spark_reads_the_columns_without_conversion():
    assert SCHEMA.field("timestamp").type == pa.timestamp("us", "UTC")
    assert SCHEMA.field("value").type == pa.string()
    assert SCHEMA.field("routing_meta").type == pa.map_(pa.string(), pa.string())
    assert all(field.nullable for field in SCHEMA)
    batch = to_batch(plain(2))
    assert batch.schema == PLAIN_SCHEMA
    assert (
        batch.column("timestamp").to_pylist()[1].isoformat() == "1970-01-01T00:00:05.001000+00:00"
    )


def test_a_reference_describes_its_batch(tmp_path: Path):
    messages = plain(4)
    messages[1].ts = 1
    messages[2].ts = 9_000
    messages[3].value = "ü"
    [ref] = write(tmp_path, messages, number=5).batches
    assert (ref.file, ref.index, ref.topic_id, ref.partition) == (5, 0, TOPIC, PARTITION)
    assert (ref.first, ref.last, ref.msgs) == (0, 9, 4)
    assert (ref.first_ts, ref.last_ts) == (1, 9_000)
    assert ref.bytes == 4 * 2 + 3 * len("value-0") + 2


def test_any_arrow_reader_opens_the_file(tmp_path: Path):
    file = write_history(
        Vfs(),
        str(tmp_path),
        1,
        [
            PartitionRows(1, 0, to_batch(plain(3))),
            PartitionRows(1, 1, to_batch(plain(5))),
            PartitionRows(2, 0, to_batch(plain(1))),
        ],
    )
    with pa.ipc.open_file(str(path_of(tmp_path))) as reader:
        counts = [reader.get_batch(ref.index).num_rows for ref in file.batches]
    assert counts == [3, 5, 1]
    assert file.size == path_of(tmp_path).stat().st_size


def test_the_bytes_of_a_reference_are_one_message_of_an_arrow_stream(tmp_path: Path):
    file = write_history(
        Vfs(),
        str(tmp_path),
        1,
        [PartitionRows(1, 0, to_batch(plain(3))), PartitionRows(1, 1, to_batch(plain(5)))],
    )
    data = path_of(tmp_path).read_bytes()
    ref = file.batches[1]
    stream = SCHEMA.serialize().to_pybytes() + data[ref.start : ref.start + ref.length]
    with pa.ipc.open_stream(stream) as reader:
        assert to_messages(reader.read_next_batch(), TOPIC, PARTITION) == plain(5)


def test_columns_without_values_take_no_space_on_disk(tmp_path: Path):
    write(tmp_path, plain(60_000))
    status = os.stat(path_of(tmp_path))
    if status.st_blocks * 512 >= status.st_size:
        pytest.skip("this file system has no holes")
    assert status.st_blocks * 512 < status.st_size / 2


def test_a_read_begins_at_the_offset_and_ends_at_the_row_limit(tmp_path: Path):
    messages = plain(1000)
    reader = HistoryReader(Vfs(), str(tmp_path))
    [ref] = write(tmp_path, messages).batches
    assert reader.read(ref, 0, 2) == messages[:2]
    assert reader.read(ref, 31, 3) == messages[11:14]
    assert reader.read(ref, 30, 1) == messages[10:11]
    assert reader.read(ref, 2990, 500) == messages[997:]
    assert reader.read(ref, ref.last, 5) == messages[-1:]
    assert reader.read(ref, ref.last + 1, 5) == []
    assert reader.read(ref, 0, 0) == []


def test_a_read_stays_within_its_bytes_but_returns_at_least_one_message(tmp_path: Path):
    messages = plain(100)
    reader = HistoryReader(Vfs(), str(tmp_path))
    [ref] = write(tmp_path, messages).batches
    assert reader.read(ref, 0, 100, max_bytes=9) == messages[:1]
    assert reader.read(ref, 0, 100, max_bytes=8) == messages[:1]
    assert reader.read(ref, 0, 100, max_bytes=18) == messages[:2]
    assert reader.read(ref, 60, 100, max_bytes=33) == messages[20:23]
    assert reader.read(ref, 0, 100, max_bytes=10**6) == messages


def test_contains_is_false_for_offsets_of_other_partitions(tmp_path: Path):
    reader = HistoryReader(Vfs(), str(tmp_path))
    [ref] = write(tmp_path, plain(50)).batches
    held = {offset for offset in range(-1, 160) if reader.contains(ref, offset)}
    assert held == {message.offset for message in plain(50)}


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_a_damaged_batch_is_refused_and_its_file_named(tmp_path: Path, place: str):
    [ref] = write(tmp_path, plain(100)).batches
    path = path_of(tmp_path)
    data = bytearray(path.read_bytes())
    at = {"start": 0, "middle": ref.length // 2, "end": ref.length - 1}[place]
    data[ref.start + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match=path.name):
        HistoryReader(Vfs(), str(tmp_path)).read(ref, 0, 1)


def test_a_changed_byte_of_the_footer_is_refused_or_changes_nothing(tmp_path: Path):
    """driftq-48: no checksum covers the file's foot."""
    messages = plain(20)
    [ref] = write(tmp_path, messages).batches
    path = path_of(tmp_path)
    whole = path.read_bytes()
    refused = 0
    for byte in range(ref.start + ref.length, len(whole)):
        data = bytearray(whole)
        data[byte] ^= 1 << byte % 8
        path.write_bytes(data)
        try:
            assert HistoryReader(Vfs(), str(tmp_path)).read(ref, 0, 100) == messages
        except CorruptLog:
            refused += 1
    assert refused


@pytest.mark.parametrize("keep", [0, 5, 1000])
def test_a_shortened_file_is_refused_and_named(tmp_path: Path, keep: int):
    [ref] = write(tmp_path, plain(100)).batches
    path = path_of(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptLog, match=path.name):
        HistoryReader(Vfs(), str(tmp_path)).read(ref, 0, 1)


def test_a_removed_file_is_gone_for_new_reads_and_stays_for_reads_in_progress(tmp_path: Path):
    vfs = Vfs()
    [ref] = write(tmp_path, plain(100)).batches
    reader = HistoryReader(vfs, str(tmp_path))
    batch = reader.batch(ref)
    reader.forget(1)
    remove_history(vfs, str(tmp_path), [1])
    remove_history(vfs, str(tmp_path), [1])
    assert to_messages(batch, TOPIC, PARTITION) == plain(100)
    with pytest.raises(HistoryGone, match=history_name(1)):
        reader.read(ref, 0, 1)


def test_more_files_than_may_be_open_are_read_from_many_threads(tmp_path: Path):
    refs = [write(tmp_path, plain(40 + n), number=n).batches[0] for n in range(1, 9)]
    reader = HistoryReader(Vfs(), str(tmp_path), open_files=2)
    wrong: list[BatchRef] = []

    def read_all() -> None:
        for _ in range(20):
            wrong.extend(ref for ref in refs if reader.read(ref, 0, 100) != plain(40 + ref.file))

    threads = [threading.Thread(target=read_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_batch_leaves_no_file(tmp_path: Path):
    assert write_history(Vfs(), str(tmp_path), 1, []).batches == []
    assert list(tmp_path.iterdir()) == []


def test_only_whole_names_are_history_files():
    assert history_number(history_name(12)) == 12
    assert history_number(history_name(12) + ".tmp") is None
    assert history_number("history-1.arrow") is None
