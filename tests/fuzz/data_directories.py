"""Damaged data directories: each is refused with file and place, or gives the right rows.

Small real directories are built once (log only, sealed, with journal, caches, staged pieces, a
durable stream, transactions, tokens and rules; stopped in order or killed). Each case damages a
copy in one way: a flipped bit, a cut at any byte or at a frame, zeros, a file that is missing,
swapped, copied, or an older version of itself. Then `wal verify` and a start must agree, and
everything that is read must be what was stored. A refusal is a StorageError, or for a single read
a PenstockError; any other exception, a hang (the engine's harness notices one) or a wrong row is a
failure. After a kill the end of the log may be missing, since damage there cannot be told from an
interrupted write.

By hand: python -m tests.fuzz.data_directories --seconds 3600 --seed 7
A failure prints its seed; `--seed N --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import pyarrow as pa

from penstock.api.messages import Settle
from penstock.api.transactions import Operation, TransactionCommand
from penstock.engine.batch_storing import BatchStoring
from penstock.model.access import AccessRule
from penstock.model.caching import Put
from penstock.model.errors import PenstockError
from penstock.model.journal import JournalRequest
from penstock.model.limits import KIB, Limits
from penstock.model.ranges import RangeRequest
from penstock.model.scopes import is_stream_log, stream_log_name
from penstock.model.streams import Publish, Start, SubscribeNamed
from penstock.model.tenancy import Entry, Path, StreamConfig
from penstock.model.tokens import Token
from penstock.model.transactions import OperationResult
from penstock.storage.errors import StorageError
from penstock.storage.frames import POSITION_BITS
from penstock.storage.log import WalOptions
from penstock.storage.offline import verify
from penstock.storage.segments import SEGMENT_HEADER_BYTES, decode_header, walk_frames
from tests.engine.cache_harness import CacheBroker
from tests.engine.durable_stream_harness import EventReader
from tests.engine.harness import DIRECTORY, LONG_MS, Reader
from tests.engine.inline_sealing import PATCHES
from tests.engine.write_harness import WriteBroker, numbered
from tests.storage.faulty_vfs import FaultyVfs

OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=4 * KIB)
LIMITS = Limits(memory_bytes=8 * KIB, lease_ms=LONG_MS)
CACHE = ("t", "n", "c")
KEYS = [f"key {n}" for n in range(6)]
STAGED_TOPIC = "written"
STREAM: Path = ("t", "n", "events")
ROUNDS = 4

Files = dict[str, bytes]
Rows = list[tuple[int, str, str | bytes]]


class Broker(WriteBroker, CacheBroker):
    """A broker with every kind of data."""


class Seen(msgspec.Struct):
    """All that can be read of a directory. None: that read was refused. The journal is without the
    rows of the run that reads it; `refused` are the producers whose commits were refused.
    `repeated` is the answer to a transaction that was sent before; None if it was refused."""

    topics: dict[str, Rows | None] = {}
    consumed: dict[str, Rows] = {}
    cache: dict[str, bytes | None] = {}
    journal: list[dict[str, Any]] | None = None
    refused: set[str] = set()
    tokens: list[str] = []
    rules: list[str] = []
    repeated: list[OperationResult] | None = None


class Built(msgspec.Struct):
    """A directory, what can be read of it, and earlier versions of its files."""

    name: str
    files: Files
    older: list[Files]
    is_stopped: bool
    cached: dict[str, set[bytes]]
    seen: Seen = msgspec.field(default_factory=Seen)


# Building


@contextmanager
def nothing_is_stored() -> Iterator[None]:
    """Committed batches wait for the next start."""
    turn = BatchStoring.turn
    BatchStoring.turn = lambda self: None  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        BatchStoring.turn = turn  # type: ignore[method-assign]


def build(name: str, *, seals: bool, is_stopped: bool) -> Built:
    broker = Broker(FaultyVfs(), options=OPTIONS, limits=LIMITS)
    broker.topic("t", 2)
    broker.topic(STAGED_TOPIC)
    broker.cache("c", durable=True)
    config = StreamConfig(durable=True, delivery="exactly_once")
    broker.must(broker.engine.registry.create, entry_of(STREAM, config))
    cached: dict[str, set[bytes]] = {key: set() for key in KEYS}
    older: list[Files] = []
    for turn in range(ROUNDS):
        for n in range(12):
            broker.produce("t", f"value {turn}.{n} ".ljust(60 + 17 * n, "."), key=f"k{n}")
            broker.clock.advance(10)
        for n, key in enumerate(KEYS[turn % 2 :: 2]):
            value = b"%d of turn %d" % (n, turn)
            broker.write(CACHE, key, value)
            cached[key].add(value)
        reader = broker.consume("t", "g")
        for item in reader.take()[:5]:
            broker.ack(reader, item)
        reader.live.close()
        broker.settle()
        administer(broker, turn)
        stream_events(broker, turn)
        broker.must(broker.engine.transactions.commit, transaction(turn))
        if turn == 0:
            broker.write_batch(numbered(9, "stored"), producer="p", topic=STAGED_TOPIC)
        if seals:
            broker.seal()
        older.append(files_of(broker.disk))
    broker.stage(numbered(30, "open"), producer="q", topic=STAGED_TOPIC)
    broker.stage(numbered(5, "other"), producer="r", topic=STAGED_TOPIC)
    broker.stage(numbered(7, "committed"), producer="s", topic=STAGED_TOPIC)
    with nothing_is_stored():
        broker.ask_commit(7, producer="s")
        broker.settle()
        if is_stopped:
            broker.close()
            files = files_of(broker.disk)
        else:
            files = files_of(broker.disk.crash("everything"))
            broker.abandon()
    built = Built(name, files, older, is_stopped, cached)
    found, error, _ = look(built.files)
    if found is None:
        raise AssertionError(f"{name} does not start before it is damaged: {error}")
    built.seen = found
    return built


def administer(broker: Broker, turn: int) -> None:
    """Makes a token and a rule; with the third turn, the first ones go."""
    digest = hashlib.sha256(b"%d" % turn).digest()
    token = Token(f"token {turn}", "p", None, None, ("reader",), False, 0, 0, digest)
    broker.must(broker.engine.tokens.create, token)
    rule = AccessRule(tenant_id="t", principal="p", permissions=("read",), resource=f"topic:{turn}")
    granted, _ = broker.must(broker.engine.access.grant, rule, None)
    if turn == 2:
        broker.must(broker.engine.tokens.revoke, "token 0")
        broker.must(broker.engine.access.revoke, granted.id - 1, None)


def stream_events(broker: Broker, turn: int) -> None:
    """Publishes numbered events, and acks half of what a named subscription got."""
    for n in range(8):
        command = Publish(
            path=STREAM,
            payloads=[b"event %d.%d " % (turn, n) + b"." * 50],
            producer_id="sensor",
            sequence=8 * turn + n,
        )
        broker.must(broker.engine.streams.publish, command)
    reader = subscribed(broker, "billing")
    for item in reader.items[:4]:
        settle = Settle(reader.topic, "billing", 0, item.offset, "o", item.delivery_id)
        broker.must(broker.engine.ack, settle)
    reader.live.close()
    broker.settle()


def transaction(turn: int) -> TransactionCommand:
    operations: list[Operation] = [
        Publish(path=STREAM, payloads=[b"of a transaction"], producer_id="tx", sequence=turn),
        Put(CACHE, "of a transaction", b"v"),
    ]
    return TransactionCommand(operations, f"turn {turn}", b"")


def subscribed(broker: Broker, name: str) -> EventReader:
    reader = EventReader(stream_log_name(STREAM), name, "o")
    command = SubscribeNamed(path=STREAM, name=name, owner="o", start=Start("earliest"))
    reader.consumer = broker.must(broker.engine.streams.consume, command, reader)
    broker.settle()
    return reader


def entry_of(path: Path, config: StreamConfig) -> Entry:
    tenant_id, namespace, name = path
    return Entry(kind="stream", tenant_id=tenant_id, namespace=namespace, name=name, stream=config)


def files_of(vfs: FaultyVfs) -> Files:
    return {path: vfs.content(path) for path in vfs.paths()}


def build_all() -> list[Built]:
    return [
        build(
            f"{'sealed' if seals else 'log'}, {'stopped' if is_stopped else 'killed'}",
            seals=seals,
            is_stopped=is_stopped,
        )
        for seals in (False, True)
        for is_stopped in (True, False)
    ]


# Looking


class Heard(logging.Handler):
    """Keeps what the broker logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.exc_info and not isinstance(record.exc_info[1], StorageError | OSError):
            self.tracebacks.append(logging.Formatter().format(record))


def look(files: Files) -> tuple[Seen | None, StorageError | None, Heard]:
    """Starts a broker there and reads everything in every way, or says why it does not start."""
    vfs = FaultyVfs()
    for path, data in files.items():
        vfs.plant(path, data)
    heard = Heard()
    logger = logging.getLogger("penstock")
    logger.addHandler(heard)
    try:
        try:
            broker = Broker(vfs, options=OPTIONS, limits=LIMITS)
        except StorageError as error:
            if vfs.open_files:
                raise AssertionError("a refused start left files open") from error
            if files_of(vfs) != files:
                changed = sorted(files.items() ^ files_of(vfs).items())
                raise AssertionError(f"a refused start changed {changed[0][0]}") from error
            return None, error, heard
        seen = read_all(broker)
        broker.close()
        return seen, None, heard
    finally:
        logger.removeHandler(heard)


def read_all(broker: Broker) -> Seen:
    own = broker.log._opened_seq << POSITION_BITS
    seen = Seen({}, {}, {}, None, set())
    for name, rows in (("q", 30), ("r", 5)):
        outcomes = broker.ask_commit(rows, producer=name)
        broker.settle()
        if not outcomes:
            broker.pass_ms(1000)
        if outcomes and isinstance(outcomes[0], PenstockError):
            seen.refused.add(name)
    seen.topics = ranges_of(broker)
    for topic in sorted(broker.state.topics):
        if is_stream_log(topic):
            events = [(item.offset, "", item.value) for item in subscribed(broker, "later").items]
            seen.consumed[f"{topic}/0"] = events
            continue
        reader = Reader(topic, "later", "o")
        broker.must(broker.engine.open_consumer, topic, "later", "o", LONG_MS, 0, reader)
        broker.settle()
        for item in reader.items:
            seen.consumed.setdefault(f"{topic}/{item.partition}", []).append(
                (item.offset, item.key, item.value)
            )
    for key in KEYS:
        outcome = broker.call(broker.engine.caches.get, CACHE, key)
        if not isinstance(outcome, PenstockError):
            seen.cache[key] = None if outcome is None else outcome.value
    broker.log.roll()
    broker.settle()
    sealed = ranges_of(broker)
    for place, found in seen.topics.items():
        if sealed[place] is not None and found is not None and sealed[place] != found:
            raise AssertionError(f"{place} is not the same after sealing")
    seen.tokens = sorted(token.id for token in broker.must(broker.engine.tokens.list))
    seen.rules = sorted(rule.resource for rule in broker.state.access.rules.values())
    table = table_of(broker, broker.engine.journal.open, JournalRequest())
    if table is not None:
        seen.journal = [row for row in table.to_pylist() if row["position"] < own]
    seen.repeated = repeated(broker)
    return seen


def repeated(broker: Broker) -> list[OperationResult] | None:
    """Sends the last transaction again. Its answer has the offsets of the first time."""
    outcome = broker.call(broker.engine.transactions.commit, transaction(ROUNDS - 1))
    return None if isinstance(outcome, PenstockError) else outcome


def ranges_of(broker: Broker) -> dict[str, Rows | None]:
    found: dict[str, Rows | None] = {}
    for topic in sorted(broker.state.topics):
        for partition in range(len(broker.state.topics[topic].partitions)):
            request = RangeRequest(topic=topic, partition=partition)
            table = table_of(broker, broker.engine.ranges.open, request)
            found[f"{topic}/{partition}"] = None if table is None else columns_of(table)
    return found


def columns_of(table: pa.Table) -> Rows:
    names = ("offset", "key", "value", "payload")
    columns = [table.column(name).to_pylist() for name in names]
    return [
        (offset, key or "", value if payload is None else payload)
        for offset, key, value, payload in zip(*columns, strict=True)
    ]


def table_of(broker: Broker, ask: Callable[..., None], request: Any) -> pa.Table | None:
    """None if the read is refused."""
    found = broker.call(ask, request)
    if isinstance(found, PenstockError):
        return None
    pieces = [found.head]
    while (piece := broker.call(found.next)) is not None:
        if isinstance(piece, PenstockError):
            return None
        pieces.append(piece)
    return pa.ipc.open_stream(b"".join([*pieces, found.tail])).read_all()


# Damaging


def damage(rng: Random, built: Built) -> tuple[Files, str]:
    """The files with one thing wrong, and what that is."""
    files = dict(built.files)
    path = rng.choice(sorted(files))
    kind = rng.choice(sorted(DAMAGES))
    detail = DAMAGES[kind](rng, built, files, path)
    return files, f"{kind} {os.path.basename(path)} {detail}"


def _used(data: bytes) -> int:
    """Up to the zeros at the end, which a segment mostly consists of."""
    return max(1, len(data.rstrip(b"\0")))


def _flip(rng: Random, built: Built, files: Files, path: str) -> str:
    data = bytearray(files[path])
    if not data:
        return "(empty)"
    at = rng.randrange(_used(files[path]) if rng.random() < 0.9 else len(data))
    data[at] ^= 1 << rng.randrange(8)
    files[path] = bytes(data)
    return f"at {at}"


def _cut(rng: Random, built: Built, files: Files, path: str) -> str:
    at = rng.randrange(_used(files[path]))
    files[path] = files[path][:at]
    return f"at {at}"


def _frame_cut(rng: Random, built: Built, files: Files, path: str) -> str:
    """Of any segment: zeros, or the end of the file, from a frame's boundary on."""
    path = rng.choice([each for each in sorted(files) if each.endswith(".seg")])
    data = files[path]
    header = decode_header(data)
    ends = [SEGMENT_HEADER_BYTES]
    if header is not None:
        ends += [frame.end for frame in walk_frames(data, header)]
    at = rng.choice(ends)
    files[path] = data[:at] if rng.random() < 0.5 else data[:at].ljust(len(data), b"\0")
    return f"({os.path.basename(path)}) at {at}"


def _zero(rng: Random, built: Built, files: Files, path: str) -> str:
    data = files[path]
    start = rng.randrange(_used(data))
    length = min(len(data) - start, rng.choice([1, 8, 64, 512, 4096, len(data)]))
    files[path] = data[:start] + bytes(length) + data[start + length :]
    return f"{length} bytes from {start}"


def _remove(rng: Random, built: Built, files: Files, path: str) -> str:
    del files[path]
    return ""


def _kind(path: str) -> str:
    return re.sub(r"\d{20}", "", path)


def _swap(rng: Random, built: Built, files: Files, path: str) -> str:
    others = [each for each in sorted(files) if _kind(each) == _kind(path)]
    other = rng.choice(others)
    files[path], files[other] = files[other], files[path]
    return f"with {os.path.basename(other)}"


def _older(rng: Random, built: Built, files: Files, path: str) -> str:
    """An earlier version of the file, or an earlier file of its kind under its name."""
    earlier = rng.choice(built.older)
    same = [path] if path in earlier and rng.random() < 0.5 else []
    choices = same or [each for each in sorted(earlier) if _kind(each) == _kind(path)]
    if not choices:
        return "(none)"
    chosen = rng.choice(choices)
    files[path] = earlier[chosen]
    return f"becomes an earlier {os.path.basename(chosen)}"


def _copy(rng: Random, built: Built, files: Files, path: str) -> str:
    """The file again under another number."""
    number = rng.choice([1, 2, 3, 4, 5, 6, 7, 99])
    target = re.sub(r"\d{20}", f"{number:020d}", path)
    files[target] = files[path]
    return f"to {os.path.basename(target)}"


def _splice(rng: Random, built: Built, files: Files, path: str) -> str:
    data = files[path]
    at = rng.randrange(_used(data))
    if rng.random() < 0.5:
        files[path] = data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
        return f"inserts at {at}"
    files[path] = data[:at] + data[at + rng.randrange(1, 40) :]
    return f"drops at {at}"


DAMAGES: dict[str, Callable[[Random, Built, Files, str], str]] = {
    "flip": _flip,
    "cut": _cut,
    "frame-cut": _frame_cut,
    "zero": _zero,
    "remove": _remove,
    "swap": _swap,
    "older": _older,
    "copy": _copy,
    "splice": _splice,
}


# Judging


def run_case(seed: int, directories: list[Built]) -> str:
    """What became of it: refused, or read. AssertionError if that is wrong."""
    rng = Random(seed)
    built = rng.choice(directories)
    files, what = damage(rng, built)
    try:
        return judge(built, files)
    except Exception as error:
        raise AssertionError(f"seed {seed} ({built.name}: {what}): {error!r}") from error


def judge(built: Built, files: Files) -> str:
    said = verdict(files)
    seen, refusal, heard = look(files)
    if heard.tracebacks:
        raise AssertionError(f"a traceback in the log: {heard.tracebacks[0]}")
    if (refusal is not None) != (said is not None):
        raise AssertionError(f"verify says {said!r}, the start {refusal!r}")
    if seen is None:
        if not re.search(r"\S+ is damaged at byte \d+: \S", str(refusal)):
            raise AssertionError(f"a refusal without file and place: {refusal}")
        return "refused"
    compare(built, seen, heard)
    return "read"


def verdict(files: Files) -> str | None:
    """Why a start would be refused, as verify says; it must change nothing."""
    vfs = FaultyVfs()
    for path, data in files.items():
        vfs.plant(path, data)
    try:
        found = verify(vfs, DIRECTORY).damage
    except FileNotFoundError as error:
        if "no data directory" not in str(error):
            raise
        return None
    if files_of(vfs) != files:
        raise AssertionError("verify changed something")
    return None if found is None else found.detail


def compare(built: Built, seen: Seen, heard: Heard) -> None:
    for place, rows in built.seen.topics.items():
        got = seen.topics.get(place, [] if not built.is_stopped else None)
        for found in (got, seen.consumed.get(place, [])):
            if found is not None:
                is_told = bool(seen.refused) or _is_told(heard)
                _compare_rows(built, place, rows or [], found, is_told, is_whole=found is got)
    for name in ("tokens", "rules", "repeated"):
        wanted, got = getattr(built.seen, name), getattr(seen, name)
        if built.is_stopped and got != wanted:
            raise AssertionError(f"{name}: {got!r}, not {wanted!r}")
    for key, value in built.seen.cache.items():
        got_value = seen.cache.get(key)
        is_fine = got_value == value
        if not built.is_stopped:
            is_fine = got_value is None or got_value in built.cached[key]
        if not is_fine:
            raise AssertionError(f"{key} of the cache is {got_value!r}, not {value!r}")
    if seen.journal is not None:
        told = built.seen.journal or []
        wrong = [row for row in seen.journal if row not in told]
        if wrong or (built.is_stopped and len(seen.journal) != len(told)):
            raise AssertionError(f"the journal has {len(seen.journal)} rows, of them {wrong[:1]}")


def _is_told(heard: Heard) -> bool:
    return any("staged piece" in line or "cannot be stored" in line for line in heard.lines)


def _compare_rows(
    built: Built, place: str, wanted: Rows, found: Rows, is_told: bool, *, is_whole: bool
) -> None:
    if place.startswith(STAGED_TOPIC):
        # Rows of a damaged piece are not stored, and the log or the answer to the commit says so;
        # the others move up.
        values = {value for _, _, value in wanted}
        wrong = [row for row in found if row[2] not in values]
        if wrong or (is_whole and built.is_stopped and len(found) < len(wanted) and not is_told):
            raise AssertionError(f"{place}: {len(found)} of {len(wanted)} rows, wrong: {wrong[:1]}")
        return
    by_offset = {row[0]: row for row in wanted}
    wrong = [row for row in found if by_offset.get(row[0]) != row]
    if wrong:
        raise AssertionError(f"{place}: {wrong[0]} was never stored there")
    if is_whole and built.is_stopped and found != wanted:
        raise AssertionError(f"{place}: {len(found)} rows of {len(wanted)}, and nothing is said")
    if is_whole and found != wanted[: len(found)]:
        raise AssertionError(f"{place}: rows are missing in the middle")


# Running


@contextmanager
def sealing_inline() -> Iterator[None]:
    """Sealing without a process, as the engine's tests have it."""
    before = [(module, name, getattr(module, name)) for module, name, _ in PATCHES]
    for module, name, replacement in PATCHES:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; each adds 1")
    parser.add_argument("--cases", type=int, default=10**9)
    options = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.WARNING)
    logging.getLogger("penstock").propagate = False
    counts = {"refused": 0, "read": 0, "failed": 0}
    with sealing_inline():
        directories = build_all()
        until = time.monotonic() + options.seconds
        for seed in range(options.seed, options.seed + options.cases):
            if time.monotonic() > until:
                break
            try:
                counts[run_case(seed, directories)] += 1
            except AssertionError as error:
                counts["failed"] += 1
                print(error, flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
