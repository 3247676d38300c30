"""Reads bodies that are Arrow IPC streams, without trusting them.

Invariant: whatever a body claims, the table that is returned cannot crash its reader, and takes no
more memory than is allowed. Compressed streams are refused before anything is unpacked, every array
is checked completely, and a dictionary is expanded only when its expanded size is known. Runs on a
thread. Must not know what the columns mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.errors import InvalidArgument, TooLarge

STREAM_MARK = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream. No text begins with them, so no content type is needed."""

_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3

UNREADABLE = (
    pa.ArrowException,
    ArithmeticError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that Arrow and Python raise for wrong values."""

_MAX_REASON_CHARS = 300
_END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_table(body: bytes, max_bytes: int) -> pa.Table:
    """`max_bytes` limits the size of the columns after dictionaries are expanded."""
    try:
        for message in _messages(body):
            _refuse_compression(message)
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        table.validate(full=True)
        if len(set(table.column_names)) < table.num_columns:
            raise InvalidArgument("a column is there twice")
        return _plain(table, max_bytes)
    except UNREADABLE as error:
        raise InvalidArgument(f"not an Arrow IPC stream: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The text of an exception, shortened, in valid UTF-8."""
    return str(error)[:_MAX_REASON_CHARS].encode(errors="replace").decode()


def _messages(body: bytes) -> Iterator[pa.ipc.Message]:
    """Yields every message of the stream. Raises if the stream was cut off or something follows it:
    otherwise rows would be lost without notice."""
    source = pa.BufferReader(body)
    reader = pa.ipc.MessageReader.open_stream(source)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            break
    end = source.tell()
    if body[end - len(_END_MARK) : end] != _END_MARK:
        raise InvalidArgument("not an Arrow IPC stream: it has no end mark, so it may be cut off")
    if end != len(body):
        raise InvalidArgument(
            f"not an Arrow IPC stream: {len(body) - end} bytes follow its end mark"
        )


def _refuse_compression(message: pa.ipc.Message) -> None:
    """Reads the message's head, a flatbuffer, since Arrow cannot say before it unpacks whether a
    message is compressed. A few bytes can unpack into any number of bytes."""
    data = memoryview(message.metadata).cast("B")
    root = _follow(data, 0)
    kind = _field(data, root, 1)
    header = _field(data, root, 2)
    if not kind or not header:
        raise InvalidArgument("not an Arrow IPC stream: a message without a header")
    table = _follow(data, header)
    if data[kind] == _DICTIONARY_BATCH:
        inner = _field(data, table, 1)
        if not inner:
            raise InvalidArgument("not an Arrow IPC stream: a dictionary without values")
        table = _follow(data, inner)
    elif data[kind] != _RECORD_BATCH:
        return
    if _field(data, table, 3):
        raise InvalidArgument("compressed Arrow streams are not taken; send it uncompressed")


def _follow(data: memoryview, at: int) -> int:
    """The position of the table that the offset here refers to."""
    offset: int = struct.unpack_from("<I", data, at)[0]
    return at + offset


def _field(data: memoryview, table: int, index: int) -> int:
    """The position of a field of a table; 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * index
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else 0


def _plain(table: pa.Table, max_bytes: int) -> pa.Table:
    """Expands dictionaries; refuses those of other values than text."""
    left = max_bytes - table.nbytes
    for index, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        kind = field.type.value_type
        if not is_text(kind):
            raise InvalidArgument(f"column {field.name!r} is a dictionary of {kind}, not of text")
        chunks = table.column(index).chunks
        left -= sum(map(_written_out_bytes, chunks))
        if left < 0:
            raise TooLarge(f"the rows take more than {max_bytes} bytes, with {field.name!r}")
        plain = pa.chunked_array([chunk.dictionary_decode() for chunk in chunks], kind)
        table = table.set_column(index, field.name, plain)
    return table


def is_text(kind: pa.DataType) -> bool:
    """Whether the type is strings, or bytes that may be UTF-8."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _written_out_bytes(chunk: pa.DictionaryArray) -> int:
    lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
    return int(pc.sum(lengths).as_py() or 0) + 8 * len(chunk)
