"""Arrow IPC streams as a client may send them to be written: of every type, and damaged.

Everything comes from the `Random` that is given, so a seed repeats a run.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa

_NOW = datetime(2030, 1, 1, tzinfo=UTC)
_META = pa.map_(pa.string(), pa.string())
_EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**40, 0x7FFFFFF0)


def stream(random: Random, *, is_cache: bool = False) -> bytes:
    """A stream that Arrow itself has written; the rows may be wrong."""
    rows = random.choice([0, 1, 1, 2, 5, 40])
    names = ["key", "value"] if is_cache else ["value"]
    others = ["ttl_ms"] if is_cache else list(_TOPIC_KINDS)
    names += random.sample(others, random.randrange(min(4, len(others) + 1)))
    columns = {name: _column(random, name, rows, is_cache=is_cache) for name in names}
    table = pa.table(columns)
    if random.random() < 0.2:
        table = table.replace_schema_metadata({"a": "b" * random.randrange(300)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=random.choice([1, 3, 100]))
    return bytes(sink.getvalue())


def damaged(random: Random, data: bytes) -> bytes:
    """Bytes changed, integers replaced by extreme ones, pieces left out, doubled or swapped."""
    mutant = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 1, 1, 2, 4])):
        if len(mutant) < 16:
            break
        at = random.randrange(4, len(mutant))
        way = random.randrange(7)
        if way < 3:
            mutant[at] = random.randrange(256)
        elif way == 3:
            mutant[at] ^= 1 << random.randrange(8)
        elif way == 4:
            at -= at % 8
            mutant[at : at + 8] = struct.pack("<q", random.choice(_EXTREMES))
        elif way == 5:
            at -= at % 4
            mutant[at : at + 4] = struct.pack("<i", random.choice(_EXTREMES[:5]))
        else:
            piece = mutant[at : at + random.choice([1, 4, 8, 64])]
            if random.random() < 0.5:
                del mutant[at : at + len(piece)]
            else:
                mutant[at:at] = piece
    return bytes(mutant)


def _column(random: Random, name: str, rows: int, *, is_cache: bool) -> pa.Array:
    if random.random() < 0.08:
        return _wrong(random, rows)
    if name == "value" and is_cache:
        return pa.array([random.choice([b"v", b"", None]) for _ in range(rows)], pa.binary())
    kind = _TOPIC_KINDS.get(name, "text" if name in ("key", "value") else "number")
    if kind == "number":
        numbers = pa.array([random.choice([0, 1, 5, None]) for _ in range(rows)], pa.int64())
        return numbers.cast(random.choice([pa.int8(), pa.int32(), pa.int64(), pa.uint64()]))
    if kind == "meta":
        return pa.array([random.choice([None, [("a", "b")], []]) for _ in range(rows)], _META)
    if kind == "deadline" and random.random() < 0.7:
        return _times(random, rows)
    texts = [random.choice(["t", "other", "", "é", "a" * 50, None]) for _ in range(rows)]
    if name == "value":
        texts = [text or "v" for text in texts]
    if kind == "deadline":
        texts = [random.choice(["2031-01-01T00:00:00Z", "", None, "soon"]) for _ in range(rows)]
    column = pa.array(texts, pa.string())
    form = random.choice(["string", "large", "binary", "dictionary", "view"])
    if form == "dictionary":
        return column.dictionary_encode()
    if form == "view":
        return column.cast(pa.string_view())
    forms = {"string": pa.string(), "large": pa.large_string(), "binary": pa.binary()}
    return column.cast(forms[form])


def _times(random: Random, rows: int) -> pa.Array:
    unit = random.choice(["s", "ms", "us", "ns"])
    zone = random.choice(["UTC", "Europe/Berlin", "+05:30", "Mars/Phobos", "\u00e9", None])
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    now = int(_NOW.timestamp()) * per_second
    ticks = [random.choice([now, 2**62, -(2**62), 2**63 - 1, 0, None]) for _ in range(rows)]
    return pa.array(ticks, pa.int64()).cast(pa.timestamp(unit, zone))


def _wrong(random: Random, rows: int) -> pa.Array:
    """A column of a type that is none of those that are taken."""
    ones: list[Any] = [1] * rows
    ways = [
        lambda: pa.nulls(rows),
        lambda: pa.array([1.5] * rows),
        lambda: pa.array([True] * rows),
        lambda: pa.array([[1]] * rows, pa.list_(pa.int64())),
        lambda: pa.array([{"a": 1}] * rows, pa.struct([("a", pa.int64())])),
        lambda: pa.array([b"abcd"] * rows, pa.binary(4)),
        lambda: pa.array(ones, pa.date32()),
        lambda: pa.array(ones, pa.duration("s")),
        lambda: pa.array(ones, pa.int64()).dictionary_encode(),
        lambda: pa.array([None] * rows, pa.decimal128(5)),
        lambda: pa.array([[("a", "b")]] * rows, _META),
        lambda: pa.array(ones, pa.timestamp("ns")),
        lambda: pa.RunEndEncodedArray.from_arrays(
            pa.array([rows] if rows else [], pa.int32()), pa.array(["v"] if rows else [])
        ),
    ]
    return random.choice(ways)()


_TOPIC_KINDS = {
    "key": "text",
    "topic": "text",
    "target_topic": "text",
    "run_id": "text",
    "step_id": "text",
    "parent_step_id": "text",
    "tenant_id": "text",
    "idempotency_key": "text",
    "routing_label": "text",
    "routing_meta": "meta",
    "deadline": "deadline",
    "partition_override": "number",
    "retry_max_attempts": "number",
    "retry_backoff_ms": "number",
    "retry_max_backoff_ms": "number",
}
