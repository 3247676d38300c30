"""All entries of a cache, as an Arrow stream or as lines of JSON."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.model.tenancy import Path
from penstock.server.access import Needs, guard_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.range_stream import RangeStream
from penstock.server.http.requests import Request
from penstock.server.http.streamed_response import check_streamable
from penstock.server.routes.caches import CACHE
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.ranges import Columns, Format, columns_of, format_of

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_READ = Needs("cache_read", "cache")


class EntriesQuery(msgspec.Struct):
    columns: Columns = None
    format: Format = None


def read_entries(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    params = request.params()
    name, content_type = format_of(params)
    stream = RangeStream(reply, guard_of(_READ, dispatch, request, reply), content_type)
    open_snapshot = partial(dispatch.engine.caches.entries, path, columns_of(params), name)
    reply.when_first(lambda: open_snapshot(stream.opened))


ENDPOINTS = (
    Endpoint(
        route=f"GET {CACHE}/entries",
        handler=read_entries,
        access=_READ,
        scope="cache",
        tag="Caches",
        summary="Read all entries",
        text="All entries as of the moment when the answer begins, in no order: changes that are "
        "made meanwhile are not in it. Entries that expire before they are sent are left out. "
        "An answer that breaks off does not look complete. 429 while 4 such answers are sent to "
        "the tenant, or 32 in all.",
        query=(EntriesQuery,),
        example={"format": "ndjson"},
        answers={
            200: Answer(
                "key, value, version and expires_at of each entry, as an Arrow IPC stream or as "
                "lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=(400, 404, 429, 503),
    ),
)
