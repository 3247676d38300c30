"""An endpoint: its route, its handler and its description.

Each module of this package has a tuple ENDPOINTS; table.py lists the modules. Must not know which
endpoints there are, nor how a document or a page looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.model.tenancy import Path
from penstock.server.access import EndpointAccess
from penstock.server.http.dispatch import Handler, RequestDispatch
from penstock.server.http.requests import Request, path_name
from penstock.server.members import CacheKey, Count, Name

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

ScopePart = Literal["tenant", "namespace"]

PathHandler = Callable[[Path, RequestDispatch, Request, "Reply"], None]
"""A handler that gets the path of a stream or cache first, read and cleaned once for many
requests."""


class Answer(msgspec.Struct, frozen=True):
    """`shape` None: there is no body, or bytes as they are. For a batch it is the shape of one
    result. `headers` are those that only this answer has: the meaning of each, and its type."""

    text: str
    shape: Any = None
    example: Any = None
    media_type: str = "application/json"
    headers: dict[str, tuple[str, str]] = {}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`route` is the method and the path, with names in braces.

    `body` is the struct that is decoded; `query` are structs whose plain members may be in the
    query: beside the body, or instead of it. `query_only`: the document leaves the body out.

    `access`: what the sender needs, and who checks it.

    `scope`: the handler is a PathHandler, for the stream or the cache in the path.

    `example` is that of the body or, without one, of the query. `path_examples` replace those of
    PathNames. `batch`: the body is an array, or lines, of such bodies. `or_array`: the body may be
    an array of such bodies, and the answer is then an array. `conditions` are headers that take
    ETags, with the meaning of each. `reads_scope` says which of the headers X-Penstock-Tenant and
    X-Penstock-Namespace the handler reads, if that does not follow from `access`.
    """

    route: str
    handler: Handler | PathHandler
    access: EndpointAccess
    scope: Literal["", "stream", "cache"] = ""
    tag: str
    summary: str
    text: str = ""
    body: Any = None
    query: tuple[type[msgspec.Struct], ...] = ()
    query_only: bool = False
    batch: bool = False
    or_array: bool = False
    example: Any = None
    path_examples: dict[str, str] = {}
    conditions: dict[str, str] = {}
    reads_scope: tuple[ScopePart, ...] | None = None
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def scope_parts(self) -> tuple[ScopePart, ...]:
        """The parts of the request's scope that it uses. Topics and the producers of batches have
        plain names, which belong to both."""
        if self.reads_scope is not None:
            return self.reads_scope
        has_plain_name = getattr(self.access, "kind", "") in ("topic", "producer")
        return ("tenant", "namespace") if has_plain_name else ()


DONE = {204: Answer("Done.")}

TAGS = {
    "Topics": "Topics, their partitions and their groups.",
    "Messages": "Produce, consume and settle.",
    "Ranges": "Read stored messages as data, without consuming them.",
    "Writes": "Write rows in batches, each exactly once: stage them, then commit.",
    "Journal": "The events of messages, as data.",
    "Effects": "Idempotency on the consumer's side: run a message's effect once for its key.",
    "Transactions": "Produces, acks, effects and cache operations that happen together.",
    "Streams": "Publish to subscribers, at most once or until they ack; and the WebSocket. Many of "
    "the examples need the durable stream orders: the example of “Create a stream” makes it.",
    "Caches": "Values by key, with a TTL, versions, counters, transactions and watches.",
    "Tenants": "Tenants, their namespaces, and the streams and caches in those.",
    "Access": "Access rules and roles.",
    "Registry": "The registry as a whole, for its followers.",
    "Tokens": "Bearer tokens, where access is controlled.",
    "Broker": "Probes and version.",
}


DURABLE_EXAMPLE = {"stream": "orders"}
"""The stream of examples that need a durable one: the example of creating a stream makes it."""


def _named(text: str, example: str) -> msgspec.Meta:
    return msgspec.Meta(description=text, examples=[example])


class PathNames(msgspec.Struct):
    """The names in paths. Each means the same in every path."""

    topic: Annotated[Name, _named("The topic's name: 1 to 200 bytes of UTF-8.", "orders")]
    group: Annotated[Name, _named("The consumer group's name.", "billing")]
    partition: Annotated[Count, _named("The partition's number, from 0.", "0")]
    producer: Annotated[Name, _named("The producer's name: 1 to 200 bytes of UTF-8.", "nightly")]
    batch: Annotated[
        Count,
        _named("The batch's number, 0 or more. The numbers of a producer's batches rise.", "7"),
    ]
    part: Annotated[Count, _named("The number of the part in the batch.", "0")]
    piece: Annotated[Count, _named("The number of the piece in the part, from 0.", "0")]
    rule: Annotated[Count, _named("The rule's id.", "1")]
    role: Annotated[Name, _named("The role's name: 1 to 200 bytes of UTF-8.", "worker")]
    tenant_id: Annotated[Name, _named("The tenant's name: 1 to 200 bytes of UTF-8.", "default")]
    namespace: Annotated[Name, _named("The namespace's name.", "default")]
    stream: Annotated[Name, _named("The stream's name.", "default")]
    subscription: Annotated[Name, _named("The name of a subscription.", "billing")]
    cache: Annotated[Name, _named("The cache's name.", "default")]
    token_id: Annotated[Name, _named("The token's id.", "0b7d3f2a9c1e4d58")]
    broker: Annotated[Name, _named("The name of a broker of the cluster.", "b3")]
    key: Annotated[
        CacheKey, _named("1 to 1,024 bytes of UTF-8 without control characters.", "greeting")
    ]


def names_in_path(request: Request) -> list[str]:
    """Every segment of the path after /v1, as text."""
    return [path_name(part) for part in request.path.split(b"/")[2:]]
