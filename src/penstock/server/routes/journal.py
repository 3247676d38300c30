"""The journal over HTTP: its rows, as an Arrow stream or as lines of JSON, where it begins and
ends, how to share out the work of reading it, and how far it is archived."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.journal import KINDS, JournalRequest, JournalSelection
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, truth
from penstock.server.routes.ranges import (
    RangeStream,
    check_readable,
    columns_of,
    form_of,
    not_negative,
    split_sizes,
)
from penstock.server.wire import ArchivedBody

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_decoder = msgspec.json.Decoder(ArchivedBody)


def read_journal(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    check_readable(hub, request)
    params = request.params()
    name, content_type = form_of(params)
    wanted = JournalRequest(
        start=not_negative(params, "from"),
        end=not_negative(params, "to"),
        format=name,
        selection=JournalSelection(
            columns=columns_of(params),
            kind=_kind(params.get("kind", "")),
            topic=params.get("topic", ""),
            group=params.get("group", ""),
            tenant_id=params.get("tenant_id", ""),
            run_id=params.get("run_id", ""),
            from_ms=not_negative(params, "from_ms"),
            to_ms=not_negative(params, "to_ms"),
        ),
    )
    stream = RangeStream(reply, content_type)
    reply.when_first(lambda: hub.engine.journal.open(wanted, stream.opened))


def read_positions(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    hub.engine.journal.offsets(
        truth(params, "fresh"),
        not_negative(params, "time_ms"),
        lambda outcome: send_outcome(reply, outcome, 200, lambda report: report),
    )


def read_splits(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    rows, max_rows = split_sizes(params)
    hub.engine.journal.splits(
        not_negative(params, "from"),
        not_negative(params, "to"),
        rows,
        max_rows,
        lambda outcome: send_outcome(reply, outcome, 200, lambda splits: splits),
    )


def set_archived(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    next_ = decode_body(_decoder, request.body).next
    if next_ is None or next_ < 0:
        raise InvalidArgument("next is required: a position of the journal, 0 or more")
    hub.engine.journal.set_archived(
        next_,
        lambda outcome: send_outcome(reply, outcome, 200, lambda archive: archive),
    )


def _kind(name: str) -> str:
    if name and name not in KINDS:
        raise InvalidArgument(f"unknown kind {name!r}; there are {', '.join(KINDS)}")
    return name
