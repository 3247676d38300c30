"""The broker's internal thresholds, lowered so far that maintenance runs all the time.

A threshold says when the broker seals, joins, rewrites, evicts, pages in or yields. With the
values of production a test of a few seconds reaches none of them, so what they start is never
tested beside other things. `SMALL` names each with a value that a few dozen messages reach.

Thresholds are constants of their modules. `lower` replaces them in the module that owns them and
in every module that imported them by name, before or after; a name that no longer exists is an
error, so a renamed constant cannot silently keep its large value. Settings of the operator
(segment_bytes, memory_bytes and so on) are not here: tests pass them as settings.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

KIB = 1024


class Threshold(NamedTuple):
    """`function` is set where the constant is the default of a parameter of this name."""

    module: str
    name: str
    value: int
    function: str = ""
    parameter: str = ""


STORAGE = (
    # Batches and files of history: a few rows each, three small files become one.
    Threshold("storage.history", "MAX_BATCH_ROWS", 8),
    Threshold("storage.history", "MAX_BATCH_BYTES", 16 * KIB),
    Threshold("storage.seal", "STEP_BYTES", 12 * KIB, "seal", "step_bytes"),
    Threshold("storage.seal", "_PACK_RECORDS", 4),
    Threshold("storage.seal", "_CHUNK_ROWS", 4),
    Threshold("storage.seal", "_CHUNK_BYTES", 4 * KIB),
    Threshold("storage.vacuum", "COPY_BYTES", 24 * KIB),
    Threshold("storage.vacuum", "SMALL_BYTES", 8 * KIB),
    Threshold("storage.vacuum", "MERGED_FILES", 3),
    # The journal.
    Threshold("storage.journal_step", "JOURNAL_ROWS", 8),
    Threshold("storage.journal_files", "MERGED_FILES", 3),
    # Readers.
    Threshold("storage.history_reader", "OPEN_FILES", 2, "HistoryReader.__init__", "open_files"),
    Threshold("storage.history_reader", "PAGE_BYTES", 4 * KIB, "HistoryReader.read", "max_bytes"),
    Threshold("storage.row_stream", "STEP_ROWS", 3),
    Threshold("storage.segment_files", "_GAP_BYTES", 64),
    Threshold("storage.segment_files", "_RUN_BYTES", 2 * KIB),
    # Pieces of an Arrow write.
    Threshold("storage.staging", "SLICE_ROWS", 4),
    Threshold("storage.staging", "SLICE_BYTES", 4 * KIB),
)

ENGINE = (
    Threshold("engine.window", "CHUNK_MSGS", 3),
    Threshold("engine.window", "CHUNK_BYTES", 4 * KIB),
    Threshold("engine.window", "CHUNK_SPAN", 8 * KIB),
    Threshold("engine.window", "MOST_REMOVED", 2),
    Threshold("engine.pages", "PAGE_MSGS", 3),
    Threshold("engine.ranges", "PIECE_ROWS", 5),
    Threshold("engine.retention", "RECLAIM_CHUNKS", 1),
    Threshold("engine.append_batch", "BATCH_BYTES", 2 * KIB),
    Threshold("engine.sealing", "MANY_REMOVED_BYTES", 2 * KIB),
    Threshold("engine.sealing", "IDLE_ROUNDS", 2),
    Threshold("engine.sealing", "MAX_REST_ROUNDS", 1),
    Threshold("engine.dead_letters", "BURST", 2),
    Threshold("engine.maintenance", "BURST", 3),
    Threshold("engine.batch_storing", "BURST_ROWS", 5),
    Threshold("engine.batch_storing", "SHARED_ROWS", 2),
    Threshold("engine.batch_storing", "BURST_BYTES", 4 * KIB),
    Threshold("engine.batch_storing", "MAX_UNSYNCED_BYTES", 8 * KIB),
    Threshold("engine.reading", "RELEASE_BYTES", 16 * KIB),
    Threshold("engine.streams", "TURN_OFFERS", 4),
    Threshold("engine.event_reading", "READ_EVENTS", 5),
    Threshold("engine.event_reading", "READ_BYTES", 2 * KIB),
    Threshold("engine.event_reading", "STEP_EVENTS", 2),
    Threshold("engine.caches", "_EVICTION_BURST", 4),
    Threshold("model.limits", "DISPATCH_BURST", 3),
    Threshold("model.limits", "MAX_REGISTRY_CHANGES", 20),
    Threshold("model.limits", "MAX_WATCH_EVENTS", 16),
    Threshold("model.splits", "SPLIT_ROWS", 10),
    Threshold("core.effects", "MOST_STALE", 2),
    Threshold("engine.leases", "MOST_STALE", 2),
    Threshold("core.stream_rules", "BURST_EVENTS", 4),
)

SERVER = (
    Threshold("server.http.head_cache", "MAX_HEADS", 4),
    Threshold("server.line_bodies", "STEP_LINES", 3),
    Threshold("server.http.range_stream", "WRITE_BYTES", 2 * KIB),
    Threshold("server.routes.router", "MAX_KNOWN", 4),
    Threshold("server.commands", "MAX_KNOWN_PATHS", 4),
    Threshold("server.websocket.events", "BURST_BYTES", 2 * KIB),
    Threshold("server.websocket.events", "MAX_BURST_EVENTS", 4),
    Threshold("server.websocket.channel", "FIRST_FRAME_EVENTS", 2),
    Threshold("server.websocket.channel", "MAX_WAITING", 2),
)

SPARK = (
    Threshold("spark.planning", "SMALL_ROWS", 4),
    Threshold("spark.staging", "PIECE_BYTES", 4 * KIB, "cut", "limit"),
)

_LARGER = {
    ("storage.history", "MAX_BATCH_ROWS"): 64,
    ("storage.vacuum", "COPY_BYTES"): 128 * KIB,
    ("storage.vacuum", "SMALL_BYTES"): 48 * KIB,
}
STORAGE_OF_PROCESSES = tuple(
    threshold._replace(value=_LARGER.get(threshold[:2], threshold.value)) for threshold in STORAGE
)
"""Of a broker in processes. Starting the sealing process takes as long as some hundred messages, so
its files hold more rows, and those count as small that hold no more than usual."""

SMALL = (*STORAGE, *ENGINE)
"""Of a broker without its HTTP server."""

Undo = Callable[[], None]


def lower(thresholds: tuple[Threshold, ...]) -> list[Undo]:
    """Sets them in this process; returns how to set each back."""
    return [undo for threshold in thresholds for undo in _set(threshold)]


@contextmanager
def lowered(thresholds: tuple[Threshold, ...] = SMALL) -> Iterator[None]:
    undo = lower(thresholds)
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


def _set(threshold: Threshold) -> Iterator[Undo]:
    owner = importlib.import_module(f"penstock.{threshold.module}")
    old = vars(owner).get(threshold.name)
    if not isinstance(old, int) or old <= threshold.value:
        raise LookupError(
            f"{threshold.module}.{threshold.name} is {old!r}: not a threshold to lower"
        )
    for module in [owner, *_importers(owner, threshold.name)]:
        setattr(module, threshold.name, threshold.value)
        yield _setter(module, threshold.name, old)
    if threshold.function:
        yield _set_default(owner, threshold)


def _setter(module: ModuleType, name: str, value: int) -> Undo:
    return lambda: setattr(module, name, value)


def _set_default(owner: ModuleType, threshold: Threshold) -> Undo:
    """Python reads a parameter's default once, when the function is defined."""
    found: Any = owner
    for part in threshold.function.split("."):
        found = getattr(found, part)
    function: FunctionType = found
    old = function.__defaults__ or ()
    parameters = list(inspect.signature(function).parameters)
    at = parameters.index(threshold.parameter) - len(parameters)
    new = list(old)
    new[at] = threshold.value
    function.__defaults__ = tuple(new)

    def undo() -> None:
        function.__defaults__ = old

    return undo


def _importers(owner: ModuleType, name: str) -> list[ModuleType]:
    """The loaded modules that hold a copy of the constant."""
    candidates = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("penstock.") and module is not owner and name in vars(module)
    ]
    return [module for module in candidates if _imports(module, owner.__name__, name)]


def _imports(module: ModuleType, owner: str, name: str) -> bool:
    """A name that is only spelt alike belongs to another module."""
    imports = re.findall(
        rf"^from {re.escape(owner)} import ([^(\n]+|\([^)]*\))", _text(module), re.M
    )
    return any(re.search(rf"\b{name}\b", names) for names in imports)


@functools.cache
def _text(module: ModuleType) -> str:
    return inspect.getsource(module)
