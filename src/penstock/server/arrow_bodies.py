"""Bodies that are Arrow IPC streams, from anybody: read without trust, and within bounds.

Invariant: no table is returned that could make a reader crash or that takes more memory than the
body may, whatever a body claims: compressed ones are refused before anything is unpacked, each
array is checked whole, and a dictionary is written out only when what it comes to is known. Runs
on a thread. Must not know what the columns mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.errors import InvalidArgument, TooLarge

STREAM_MARK = b"\xff\xff\xff\xff"
"""What an Arrow stream begins with, and no text: a content type is not needed."""

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
"""Whatever Arrow and Python raise over values that should not be there."""

_MAX_REASON_CHARS = 300
_END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_table(body: bytes, max_bytes: int) -> pa.Table:
    """`max_bytes` is what its columns may take once dictionaries are written out."""
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
    """What an exception says, short and as text that can be sent."""
    return str(error)[:_MAX_REASON_CHARS].encode(errors="replace").decode()


def _messages(body: bytes) -> Iterator[pa.ipc.Message]:
    """Every message of the stream. The body must be one whole stream: one that was cut off, or a
    second one behind it, would be taken for fewer rows than were sent."""
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
    """Looks into the message's head, a flatbuffer: Arrow has no way to ask before it unpacks, and
    a few bytes can be unpacked into any number of them."""
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
    """Where the table is that is referred to here."""
    offset: int = struct.unpack_from("<I", data, at)[0]
    return at + offset


def _field(data: memoryview, table: int, index: int) -> int:
    """Where a field of a table is; 0 when it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * index
    if vtable < 0 or entry >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else 0


def _plain(table: pa.Table, max_bytes: int) -> pa.Table:
    """Without dictionaries, of which only those of text are taken."""
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
    """Strings, or bytes that may be UTF-8."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _written_out_bytes(chunk: pa.DictionaryArray) -> int:
    lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
    return int(pc.sum(lengths).as_py() or 0) + 8 * len(chunk)
