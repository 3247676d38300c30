"""Rows that come to be written: which are taken, in what form, and what is said of the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.api.rows import CheckedRows
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import KIB, MAX_TARGETS, MIB
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.writes import RowTarget
from penstock.server import row_checks
from penstock.server.arrow_bodies import STREAM_MARK, read_table
from penstock.server.line_bodies import STEP_LINES, cache_table, produce_table
from penstock.server.routes.messages import ProduceBody, produce_of
from penstock.server.row_checks import check_cache_rows, check_topic_rows
from penstock.storage.staged_rows import RowSlice
from penstock.storage.staging import pack

MAX_BYTES = 1000
NOW_MS = 1_800_000_000_000


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=3)
    return bytes(sink.getvalue())


def checked(columns: dict[str, Any] | pa.Table, topic: str = "t") -> CheckedRows:
    """As it comes in a body."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    return check_topic_rows(read_table(stream(table), MIB), DEFAULT_SCOPE, topic, MAX_BYTES, NOW_MS)


def refusal(columns: dict[str, Any] | pa.Table, topic: str = "t") -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        checked(columns, topic)
    return caught.value


def messages(rows: CheckedRows) -> list[tuple[Any, ...]]:
    """Each row as it will be stored."""
    packed = pack(rows.table, "t", [])
    found: list[tuple[Any, ...]] = []
    for buffer in packed.buffers:
        part = RowSlice(buffer, packed.content, 0)
        taken = part.take(0, part.rows)
        topics = taken.topics or [taken.topic] * part.rows
        envelopes = taken.envelopes or [None] * part.rows
        routings = taken.routings or [None] * part.rows
        found += zip(topics, taken.keys, taken.values, envelopes, routings, strict=True)
    return found


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str
)
@pytest.mark.parametrize("encode", [False, True], ids=["plain", "dictionary"])
def test_text_is_taken_in_every_form(kind: Any, encode: bool):
    def column(values: list[str | None]) -> pa.Array:
        array = pa.array(values, pa.string()).cast(kind)
        return array.dictionary_encode() if encode else array

    table = {
        "value": column(["ä", "b", "c" * 100, "b"]),
        "key": column(["ключ", None, "", "k"]),
        "run_id": column([None, "r", "", None]),
    }
    found = messages(checked(table))
    assert [row[:3] for row in found] == [
        ("t", "ключ", "ä"),
        ("t", "", "b"),
        ("t", "", "c" * 100),
        ("t", "k", "b"),
    ]
    assert [row[3] and row[3].run_id for row in found] == [None, "r", None, None]


def test_bytes_under_a_null_are_not_taken_for_text():
    """Arrow allows them."""
    data = pa.py_buffer(b"secretopen")
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 6, 10)))
    key = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x02"), offsets, data])
    assert key.to_pylist() == [None, "open"]
    assert [row[1] for row in messages(checked({"value": ["a", "b"], "key": key}))] == ["", "open"]


def test_columns_without_a_value_are_left_out():
    rows = checked(
        {
            "value": ["a"],
            "key": pa.nulls(1, pa.string()),
            "topic": pa.nulls(1),
            "run_id": [""],
            "partition_override": pa.nulls(1, pa.int64()),
            "retry_max_attempts": [0],
            "routing_meta": pa.nulls(1, pa.map_(pa.string(), pa.string())),
            "deadline": pa.nulls(1, pa.string()),
        }
    )
    assert rows.table.column_names == ["value"]
    assert rows.targets == [RowTarget("t", "", None, 0)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"value": ["a", None]}, "row 1: value is null"),
        ({"value": pa.nulls(2)}, "column 'value' is null, not text"),
        ({"value": ["a", "b", "", ""]}, "row 2: value is empty"),
        ({"value": [1]}, "column 'value' is int64, not text"),
        ({"value": [b"ok"] * 5 + [b"\xff"]}, "row 5: value is no string"),
        ({"key": ["a"]}, "the column 'value' is missing"),
        ({"value": ["a"], "offset": [1], "x": [2]}, "unknown columns ['offset', 'x']"),
        ({"value": ["a", "b"], "run_id": ["r", "x" * 1025]}, "row 1: run_id is longer than 1024"),
        ({"value": ["a", "b"], "topic": ["t", "a\nb"]}, "row 1: topic: topic has control"),
        ({"value": ["a"], "target_topic": ["x" * 201]}, "row 0: target_topic: envelope.target"),
        ({"value": ["a"], "partition_override": [-1]}, "row 0: partition_override is below 0"),
        ({"value": ["a"], "partition_override": [0.5]}, "is double, not a whole number"),
        ({"value": ["a"], "retry_backoff_ms": [-5]}, "row 0: retry: retry_policy.backoff_ms"),
        ({"value": ["a"], "retry_max_attempts": [-5]}, "row 0: retry: retry_policy.max_attempts"),
        ({"value": ["a"], "deadline": ["tomorrow"]}, "row 0: deadline: deadline must be RFC 3339"),
        ({"value": ["a"], "deadline": ["2001-01-01T00:00:00Z"]}, "row 0: deadline: the deadline"),
        ({"value": ["a"], "deadline": [1]}, "column 'deadline' is int64, not text or a time"),
        ({"value": ["a"], "routing_meta": ["x"]}, "column 'routing_meta' is string, not map"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_column_and_row(columns: dict[str, Any], message: str):
    error = refusal(columns)
    assert isinstance(error, InvalidArgument)
    assert message in error.message


def test_a_row_that_is_too_large_is_413():
    error = refusal({"value": ["a", "x" * 600], "key": ["k", "y" * 401]})
    assert isinstance(error, TooLarge)
    assert error.message == "row 1: key and value are 1001 bytes; max_message_bytes is 1000"
    checked({"value": ["x" * 1000]})


def test_every_row_needs_a_topic():
    assert "no topic" in refusal({"value": ["a"]}, "").message
    columns = {"value": ["a", "b"], "topic": ["u", " "], "target_topic": ["x", "x"]}
    assert "row 1: topic is required" in refusal(columns, "").message
    rows = checked({"value": ["a", "b"], "topic": [" u ", "t"], "target_topic": [None, "v"]}, "")
    assert [(row[0], row[3] and row[3].target_topic) for row in messages(rows)] == [
        ("u", None),
        ("v", "v"),
    ]


def test_a_deadline_may_be_a_time_with_a_zone():
    moment = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(days=1)
    for unit in ("s", "ms", "us", "ns"):
        times = pa.array([moment, None]).cast(pa.timestamp(unit, "Europe/Berlin"))
        [first, second] = messages(checked({"value": ["a", "b"], "deadline": times}))
        assert first[3].deadline == moment.isoformat().replace("+00:00", "Z")
        assert second[3] is None
    naive = pa.array([moment]).cast(pa.timestamp("us"))
    assert "without a zone" in refusal({"value": ["a"], "deadline": naive}).message


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("year", [10_000, 200_000, 0])
def test_a_deadline_that_no_text_can_tell_is_refused(unit: str, year: int) -> None:
    """Also one so far away that it does not fit into the unit that is kept."""
    per_second = {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    seconds = (year - 1970) * 366 * 86_400 if year else -(2**40)
    ticks = pa.array([None, seconds * per_second], pa.int64())
    column = ticks.cast(pa.timestamp(unit, "UTC"))
    error = refusal({"value": ["v", "w"], "deadline": column})
    assert (error.http_status, error.message) == (
        400,
        "row 1: deadline is not in the years 1 to 9999",
    )


def test_a_time_zone_that_is_no_text_is_refused_with_its_column() -> None:
    column = pa.array([1_900_000_000], pa.int64()).cast(pa.timestamp("s", "Europe/Paris"))
    body = stream(pa.table({"value": ["v"], "deadline": column}))
    broken = body.replace(b"Europe/Paris", b"Europe/\xff\xfe\xfd\xfc\xfb")
    assert broken != body
    with pytest.raises(InvalidArgument, match="'deadline'"):
        check_topic_rows(read_table(broken, MIB), DEFAULT_SCOPE, "t", MAX_BYTES, NOW_MS)


@pytest.mark.parametrize("error", [pa.ArrowInvalid, OverflowError, KeyError, OSError, TypeError])
def test_whatever_arrow_raises_over_a_column_is_a_refusal_that_names_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def raising(*_: object, **__: object) -> None:
        raise error("\ud800 not said in UTF-8")

    for column, values in (("run_id", ["r"]), ("partition_override", [1]), ("key", ["k"])):
        table = read_table(stream(pa.table({"value": ["v"], column: values})), MIB)
        with monkeypatch.context() as patch:
            patch.setattr(row_checks, "_one_array", _for(column, raising))
            with pytest.raises(InvalidArgument, match=f"'{column}'") as caught:
                check_topic_rows(table, DEFAULT_SCOPE, "t", MAX_BYTES, NOW_MS)
        assert caught.value.message.encode()


def _for(column: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for this column, what there is for the others."""
    usual = row_checks._one_array
    return lambda data, name: function() if name == column else usual(data, name)


def test_a_column_of_nulls_takes_no_memory_before_there_are_keys() -> None:
    """A few bytes can claim any number of nulls."""
    nulls = pa.Array.from_buffers(pa.null(), 2**40, [None])
    for columns in ({"value": nulls}, {"key": nulls, "value": nulls}):
        schema = pa.schema([(name, pa.null()) for name in columns])
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(allow_64bit=True)
        with pa.ipc.new_stream(sink, schema, options=options) as out:
            out.write_batch(pa.record_batch(columns))
        body = bytes(sink.getvalue())
        assert len(body) < KIB
        with pytest.raises(InvalidArgument, match="'key'"):
            check_cache_rows(read_table(body, MIB), MAX_BYTES)
        with pytest.raises(InvalidArgument, match="'value'"):
            check_topic_rows(read_table(body, MIB), DEFAULT_SCOPE, "t", MAX_BYTES, NOW_MS)


def test_a_routing_is_kept_with_its_meta():
    metas = pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string()))
    columns = {"value": ["a", "b", "c"], "routing_meta": metas, "routing_label": [None, "l", None]}
    found = [row[4] for row in messages(checked(columns))]
    assert [routing and (routing.label, routing.meta) for routing in found] == [
        ("", {"a": "b"}),
        ("l", {}),
        None,
    ]
    null = pa.array([[("a", None)]], pa.map_(pa.string(), pa.string()))
    assert (
        "row 0: routing_meta has a null" in refusal({"value": ["a"], "routing_meta": null}).message
    )


def test_targets_are_each_way_to_a_partition_once():
    rows = checked(
        {"value": ["a"] * 4, "key": ["k", "k", None, "l"], "topic": ["u", "u", None, "u"]}
    )
    assert sorted(rows.targets, key=lambda target: target.row) == [
        RowTarget("u", "k", None, 0),
        RowTarget("t", "", None, 2),
        RowTarget("u", "l", None, 3),
    ]
    many = checked({"value": ["a"] * 2000, "key": [f"k{n}" for n in range(2000)]})
    assert many.targets == [RowTarget("t", None, None, 0)]
    topics = {"value": ["a"] * 2000, "topic": [f"t{n}" for n in range(2000)]}
    assert f"more than {MAX_TARGETS}" in refusal(topics).message


def test_no_rows_are_rows_too():
    rows = checked(
        {"value": pa.array([], pa.string()), "retry_max_attempts": pa.array([], pa.int8())}
    )
    assert rows.table.num_rows == 0
    assert rows.targets == []


# -- as lines --------------------------------------------------------------------------------------

BODIES: list[dict[str, Any]] = [
    {"topic": "t", "value": "a"},
    {"topic": " u ", "value": "ä", "key": "k"},
    {"topic": "t", "value": "b", "envelope": {"run_id": "r", "partition_override": 0}},
    {"topic": "t", "value": "b", "envelope": {"target_topic": " v ", "tenant_id": ""}},
    {"topic": "t", "value": "c", "envelope": {"retry_policy": {"max_attempts": 2}}},
    {"topic": "t", "value": "c", "envelope": {"retry_policy": {"max_attempts": 0}}},
    {"topic": "t", "value": "d", "envelope": {"deadline": "2999-01-01t00:00:00.5+02:00"}},
    {"topic": "t", "value": "e", "envelope": {"idempotency_key": "i", "step_id": "s"}},
    {"topic": "t", "value": "", "key": "k"},
    {"topic": "t", "value": "f", "envelope": {"retry_policy": {"backoff_ms": 5}}},
    {"topic": "t", "value": "f", "envelope": {"deadline": "2999-01-01T00:00:00"}},
    {"topic": "t", "value": "f", "envelope": {"run_id": "x" * 1025}},
    {"topic": "x" * 201, "value": "f"},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_row_is_what_a_produce_of_it_would_be(body: dict[str, Any]):
    """The same rules, whichever way it comes."""
    line = msgspec.json.encode(body)
    try:
        command = produce_of(DEFAULT_SCOPE, msgspec.json.decode(line, type=ProduceBody))
    except InvalidArgument as error:
        with pytest.raises(InvalidArgument) as caught:
            check_topic_rows(produce_table(line), DEFAULT_SCOPE, "", MAX_BYTES, NOW_MS)
        said = error.message.removeprefix("envelope.").split()[0]
        assert said in caught.value.message
        return
    [row] = messages(check_topic_rows(produce_table(line), DEFAULT_SCOPE, "", MAX_BYTES, NOW_MS))
    envelope = command.envelope
    topic = (envelope.target_topic if envelope else "") or command.topic
    assert row == (topic, command.key, command.value, envelope, None)


def test_lines_are_numbered_and_blank_ones_do_not_count():
    lines = [msgspec.json.encode({"value": f"v{n}"}) for n in range(3 * STEP_LINES)]
    body = b"\n \n\n".join(lines) + b"\n\n"
    found = messages(check_topic_rows(produce_table(body), DEFAULT_SCOPE, "t", MAX_BYTES, NOW_MS))
    assert [row[2] for row in found] == [f"v{n}" for n in range(3 * STEP_LINES)]
    lines[2 * STEP_LINES + 7] = b'{"value": "x", "labels": {}}'
    with pytest.raises(InvalidArgument, match=f"^row {2 * STEP_LINES + 7}: invalid JSON"):
        produce_table(b"\n".join(lines))
    assert produce_table(b"\n \n").num_rows == 0


@pytest.mark.parametrize("of_lines", [produce_table, cache_table])
@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b'{"value": 1}', b"\xfe", b'{"ttl_ms": 1e99}'])
def test_lines_that_are_no_rows_are_refused(of_lines: Callable[[bytes], pa.Table], line: bytes):
    with pytest.raises(InvalidArgument, match="row 0"):
        of_lines(line)


def test_numbers_that_no_column_can_hold_are_refused():
    with pytest.raises(InvalidArgument, match="rows 0 to 0"):
        produce_table(b'{"value":"a","envelope":{"partition_override":99999999999999999999}}')


# -- bodies from anybody ---------------------------------------------------------------------------

TABLE = pa.table({"value": ["a" * 40] * 50, "key": pa.array(["k"] * 50).dictionary_encode()})


def test_a_stream_has_the_mark_by_which_it_is_known():
    assert stream(TABLE).startswith(STREAM_MARK)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_streams_are_refused_before_they_are_unpacked(codec: str):
    """A few bytes could be any number of them."""
    for table in (TABLE, TABLE.select(["value"])):
        with pytest.raises(InvalidArgument, match="compressed"):
            read_table(stream(table, compression=codec), MIB)


def test_a_dictionary_is_written_out_only_within_bounds():
    values = pa.array(["x" * 100_000])
    indices = pa.array([0] * 10_000, pa.int32())
    bomb = pa.table({"value": pa.DictionaryArray.from_arrays(indices, values)})
    assert len(stream(bomb)) < 2 * MIB
    with pytest.raises(TooLarge, match="with 'value'"):
        read_table(stream(bomb), 64 * MIB)
    numbers = pa.table({"value": pa.array([1, 2]).dictionary_encode()})
    with pytest.raises(InvalidArgument, match="a dictionary of int64"):
        read_table(stream(numbers), MIB)


def test_what_is_no_stream_is_refused():
    good = stream(TABLE)
    for body in (STREAM_MARK, good[:20], good[:-300], STREAM_MARK + b"\x10\0\0\0" + b"x" * 16):
        with pytest.raises(InvalidArgument):
            read_table(body, MIB)
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["value", "value"])
    with pytest.raises(InvalidArgument, match="twice"):
        read_table(stream(twice), MIB)


def test_no_damage_to_a_stream_does_more_than_refuse_it():
    """Whatever is read is checked: offsets, UTF-8, lengths, the heads of messages."""
    good = stream(TABLE)
    rng = random.Random(4)
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(4, len(damaged))] = rng.randrange(256)
        try:
            rows = check_topic_rows(
                read_table(bytes(damaged), MIB), DEFAULT_SCOPE, "t", MAX_BYTES, NOW_MS
            )
        except PenstockError:
            continue
        assert len(messages(rows)) == rows.table.num_rows


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda body: body + body, "bytes follow its end mark"),
        (lambda body: body + b"x", "1 bytes follow its end mark"),
        (lambda body: body[:-8], "no end mark"),
    ],
)
def test_a_body_is_one_whole_arrow_stream(damage: Callable[[bytes], bytes], said: str):
    """Else fewer rows than were sent would be taken for all of them."""
    body = stream(pa.table({"value": ["a", "b"]}))
    assert read_table(body, MIB).num_rows == 2
    with pytest.raises(InvalidArgument, match=said):
        read_table(damage(body), MIB)
