"""Ranges of a partition over HTTP, as an Arrow stream or as lines of JSON, and its offsets.

A piece is asked for when the connection has taken the one before it and there is memory for
another, so that a slow reader costs one piece, and all readers together no more than the budget for
answers. A read that fails after it began ends without the mark of an end:
nobody takes half a range for a whole one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.api.ranges import Range
from penstock.model.errors import InvalidArgument, MethodNotAllowed, PenstockError, Unavailable
from penstock.model.limits import KIB, MAX_OFFSET, MAX_POSITION
from penstock.model.names import clean_name
from penstock.model.ranges import PIECE_BYTES, RangeFormat, RangeRequest, RowBytes, Selection
from penstock.model.splits import MAX_SPLIT_ROWS, SPLIT_ROWS, SplitRequest
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, whole_number
from penstock.server.http.responses import NDJSON_TYPE

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

WRITE_BYTES = 256 * KIB

_NOTHING = memoryview(b"")

_FORMATS: dict[str, tuple[RangeFormat, bytes]] = {
    "arrow": ("arrow", b"content-type: application/vnd.apache.arrow.stream\r\n"),
    "ndjson": ("ndjson", NDJSON_TYPE),
}


class RangeStream:
    """Carries the pieces of a range to a connection."""

    is_answer = True

    def __init__(self, reply: Reply, content_type: bytes) -> None:
        self._reply = reply
        self._content_type = content_type
        self._lane: HttpConnection | None = None
        self._range: Range | None = None
        self._left = _NOTHING
        self._is_reading = False

    def opened(self, outcome: Range | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
        elif self._reply.is_wanted():
            self._range = outcome
            self._lane = self._reply.open_stream(self._content_type)
            self._lane.stream = self
            self._left = memoryview(outcome.head)
            self.resume()

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        """Nothing is written while the connection is full; `resume` looks by itself."""

    def resume(self) -> None:
        lane, source = self._lane, self._range
        if lane is None or source is None:
            return
        while self._left and not lane.flow.write_paused:
            lane.write_chunk(self._left[:WRITE_BYTES])
            # An empty rest would keep the whole piece in memory.
            self._left = self._left[WRITE_BYTES:] or _NOTHING
        if self._left or self._is_reading or lane.flow.write_paused:
            return
        self._is_reading = True
        if source.is_over():
            self._got(None)
        else:
            # In this order: those who have waited come before this one's next piece.
            lane.order.answers.hold(0)
            lane.order.answers.ask(PIECE_BYTES + WRITE_BYTES, partial(source.next, self._got))

    def disconnected(self) -> None:
        self._lane = None

    # -- called by the range -------------------------------------------------------------------

    def _got(self, piece: RowBytes | PenstockError | None) -> None:
        self._is_reading = False
        lane, source = self._lane, self._range
        if lane is None or source is None:
            return
        if piece is not None and not isinstance(piece, PenstockError):
            self._left = memoryview(piece)
            # The piece, and what of it was handed to the connection.
            lane.order.answers.hold(len(piece) + WRITE_BYTES)
            self.resume()
            return
        self._lane = None
        lane.order.answers.hold(0)
        if piece is None:
            if source.tail:
                lane.write_chunk(source.tail)
            lane.end_stream()
        else:
            lane.break_stream()


def read_range(
    hub: RequestDispatch, request: Request, reply: Reply, topic: str, partition: str
) -> None:
    check_readable(hub, request)
    params = request.params()
    name, content_type = form_of(params)
    wanted = RangeRequest(
        topic=clean_name(topic, "topic"),
        partition=_partition(partition),
        topic_id=not_negative(params, "topic_id"),
        start=not_negative(params, "start"),
        end=not_negative(params, "end"),
        format=name,
        omit_nulls=_omits_nulls(params),
        selection=Selection(
            columns=columns_of(params),
            tenant_id=params.get("tenant_id", ""),
            run_id=params.get("run_id", ""),
            from_ms=not_negative(params, "from_ms"),
            to_ms=not_negative(params, "to_ms"),
        ),
    )
    stream = RangeStream(reply, content_type)
    reply.when_first(lambda: hub.engine.ranges.open(wanted, stream.opened))


def read_splits(
    hub: RequestDispatch, request: Request, reply: Reply, topic: str, partition: str
) -> None:
    params = request.params()
    rows, max_rows = split_sizes(params)
    wanted = SplitRequest(
        topic=clean_name(topic, "topic"),
        partition=_partition(partition),
        topic_id=not_negative(params, "topic_id"),
        start=not_negative(params, "start"),
        end=not_negative(params, "end"),
        rows=rows,
        max_rows=max_rows,
    )
    hub.engine.ranges.splits(
        wanted, lambda outcome: send_outcome(reply, outcome, 200, lambda splits: splits)
    )


def read_offsets(hub: RequestDispatch, request: Request, reply: Reply, topic: str) -> None:
    time_ms = not_negative(request.params(), "time_ms")
    hub.engine.ranges.offsets(
        clean_name(topic, "topic"),
        time_ms,
        lambda outcome: send_outcome(reply, outcome, 200, lambda offsets: offsets),
    )


def read_all_offsets(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.ranges.all_offsets(
        request.params().get("after", ""),
        lambda outcome: send_outcome(reply, outcome, 200, lambda page: page),
    )


def check_readable(hub: RequestDispatch, request: Request) -> None:
    """Rows are streamed: a head alone would say nothing of them."""
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    if hub.is_draining:
        raise Unavailable("the broker is stopping")


def columns_of(params: dict[str, str]) -> tuple[str, ...]:
    return tuple(column for column in params.get("columns", "").split(",") if column)


def form_of(params: dict[str, str]) -> tuple[RangeFormat, bytes]:
    """The form that was asked for, and its content type."""
    name = params.get("format") or "arrow"
    if name not in _FORMATS:
        raise InvalidArgument(f"unknown format {name!r}; there are {', '.join(_FORMATS)}")
    return _FORMATS[name]


def split_sizes(params: dict[str, str]) -> tuple[int, int]:
    """Rows of each split, and of all together, at most."""
    rows = whole_number(params, "rows")
    max_rows = whole_number(params, "max_rows")
    if rows is not None and not 1 <= rows <= MAX_SPLIT_ROWS:
        raise InvalidArgument(f"rows must be between 1 and {MAX_SPLIT_ROWS}")
    if max_rows is not None and not 1 <= max_rows <= MAX_OFFSET:
        raise InvalidArgument(f"max_rows must be between 1 and {MAX_OFFSET}")
    return rows or SPLIT_ROWS, max_rows or MAX_OFFSET


def _omits_nulls(params: dict[str, str]) -> bool:
    choice = params.get("nulls", "keep")
    if choice not in ("keep", "omit"):
        raise InvalidArgument(f"nulls takes keep or omit, not {choice!r}")
    return choice == "omit"


def _partition(text: str) -> int:
    index = whole_number({"partition": text}, "partition")
    if index is None:
        raise InvalidArgument("partition must be a whole number")
    return index


def not_negative(params: dict[str, str], name: str) -> int | None:
    number = whole_number(params, name)
    if number is not None and not 0 <= number <= MAX_POSITION:
        raise InvalidArgument(f"{name} must be between 0 and {MAX_POSITION}")
    return number
