"""Forwards the requests that this broker does not serve to the owner of their shard.

Each request is judged when it is handled: served here, sent to the owner, or kept for a bounded
time until an owner is known. Invariants: a request that was forwarded once is never forwarded
again, so there are no loops. One whose sender was not verified never reaches an engine here. Bodies
that wait or are under way count as bodies that this broker holds. Must not know how connections to
owners work, nor what requests mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.api.cluster import COPY_PATH, FIRST_SHARD, OwnerMap, OwnerReport
from penstock.model.errors import OutcomeUnknown, PenstockError, Unavailable
from penstock.model.principals import UNVERIFIED
from penstock.server.forwarding.answer_heads import OWNER_HEADER
from penstock.server.forwarding.exchange import Exchange
from penstock.server.forwarding.pool import UpstreamPool
from penstock.server.forwarding.socket_exchange import ForwardedSocket
from penstock.server.http.requests import Request
from penstock.server.http.responses import (
    JSON_TYPE,
    TYPED_PATHS,
    encode_json,
    error_body,
    error_head,
    typed_error,
)

if TYPE_CHECKING:
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.response_order import Reply
    from penstock.server.websocket.upgrade import HandOver

RETRY_S = 0.05
"""How soon an owner that cannot be reached is tried again."""

RETRY_AFTER_MS = 1000
DRAIN_S = 2.0
"""How long answers of a broker that is the owner no longer may still come."""

PROBES = frozenset({b"/v1/healthz", b"/v1/livez", b"/v1/readyz"})
HERE_ONLY = PROBES | {b"/metrics", COPY_PATH.encode()}
"""Paths that are about this broker, and are never forwarded."""
DOCUMENTS = frozenset(
    {b"/v1/cluster", b"/docs", b"/docs/openapi.json", b"/docs/asyncapi.json", b"/docs/sign-in.js"}
)
"""Paths that are answered here, unless the sender is not verified: then the owner, whose answer is
the same, checks the credential."""


class Forwarder:
    """`wait_ms` is how long a request waits for an owner that is known and can be reached."""

    def __init__(
        self,
        dispatch: RequestDispatch,
        owners: OwnerMap,
        *,
        wait_ms: int,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self.owners = owners
        self.forwarded = 0
        self.unknown_outcomes = 0
        self._dispatch = dispatch
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._wait_s = wait_ms / 1000
        self._exchanges: dict[Reply, Exchange] = {}
        self._waiting: dict[Exchange, str] = {}
        """Requests without an owner to send them to, and why."""
        self._pool: UpstreamPool | None = None
        self._retired: set[UpstreamPool] = set()
        self._next_try: asyncio.TimerHandle | None = None
        owners.when_changed(self.owner_changed)

    # -- called by the dispatch ------------------------------------------------------------------

    def takes(self, request: Request) -> bool:
        """Returns whether a request is not for this broker."""
        is_unverified = request.notes.principal is UNVERIFIED
        if self._dispatch.is_serving and not is_unverified:
            return False
        path = request.path
        if path in HERE_ONLY:
            return False
        return is_unverified or path not in DOCUMENTS

    def forward(self, request: Request, reply: Reply) -> None:
        if request.notes.via:
            self._refuse_misdirected(reply)
            return
        until = self._loop.time() + self._wait_s
        self._start(Exchange(self, request, reply, until))

    def forward_socket(self, hand_over: HandOver) -> None:
        """Forwards a request for a WebSocket, whose connection is read no more until the owner has
        answered."""
        if hand_over.request.notes.via:
            hand_over.connection.shutdown()
            hand_over.connection.flow.resume_reading()
            self._refuse_misdirected(hand_over.reply)
            return
        self._start(ForwardedSocket(self, hand_over, self._loop.time() + self._wait_s))

    def has(self, reply: Reply) -> bool:
        """Returns whether the answer is to come from an owner."""
        return reply in self._exchanges

    def dropped(self, reply: Reply) -> None:
        """Nobody wants this answer any more."""
        exchange = self._exchanges.get(reply)
        if exchange is not None:
            exchange.drop()

    def check_ready(self) -> None:
        """Raises Unavailable if requests could not be forwarded now."""
        if self._owner() is None:
            raise Unavailable(
                f"no broker is known to own shard {FIRST_SHARD}", retry_after_ms=RETRY_AFTER_MS
            )

    def tick(self) -> None:
        """Called once a second."""
        for pool in (self._pool, *self._retired):
            if pool is not None:
                pool.close_idle(self._loop.time())

    @property
    def connections(self) -> int:
        """Returns the number of connections to owners."""
        return sum(len(pool) for pool in (self._pool, *self._retired) if pool is not None)

    @property
    def under_way(self) -> int:
        """Returns the number of requests whose answers have not come, those that wait included."""
        return len(self._exchanges)

    @property
    def waiting(self) -> int:
        """Returns the number of requests that wait for an owner."""
        return len(self._waiting)

    def end_streams(self, reason: str) -> None:
        """Ends the answers that have no end of their own, because this broker stops."""
        for exchange in list(self._exchanges.values()):
            exchange.end_stream(reason)
        for exchange in list(self._waiting):
            exchange.refuse(Unavailable(reason, retry_after_ms=RETRY_AFTER_MS))

    def close(self) -> None:
        if self._next_try is not None:
            self._next_try.cancel()
        for pool in (self._pool, *self._retired):
            if pool is not None:
                pool.close()

    def owner_text(self) -> str:
        """Names the owner and its address, for a person."""
        owner = self._owner()
        return "the owner, which is not known now" if owner is None else _text_of(owner)

    # -- called by the owner map -----------------------------------------------------------------

    def owner_changed(self) -> None:
        """Sends waiting requests to the new owner, and none to the one before any more."""
        owner, pool = self._owner(), self._pool
        if pool is not None and (owner is None or owner.url != pool.url):
            self._pool = None
            self._retired.add(pool)
            pool.retire()
            self._loop.call_later(DRAIN_S, self._end_retired, pool)
        self._place_waiting()

    def _end_retired(self, pool: UpstreamPool) -> None:
        self._retired.discard(pool)
        pool.close()

    # -- called by exchanges ---------------------------------------------------------------------

    def not_sent(self, exchange: Exchange, reason: str) -> None:
        """No byte of the request has left, or the broker that got it was not the owner: looks for
        the owner again."""
        if exchange.is_dropped:
            return
        self._waiting[exchange] = reason
        self._schedule()

    def try_again(self, exchange: Exchange, reason: str) -> None:
        """Sends a safe request again, whose connection broke."""
        exchange.is_sent = False
        exchange.until = self._loop.time() + self._wait_s
        self.not_sent(exchange, reason)

    def finished(self, exchange: Exchange) -> None:
        """The exchange has ended, in whatever way."""
        self._exchanges.pop(exchange.reply, None)
        self._waiting.pop(exchange, None)
        self._dispatch.body_bytes -= exchange.held_bytes
        exchange.held_bytes = 0
        following, exchange.next = exchange.next, None
        if following is not None and not following.is_over:
            following.until = self._loop.time() + self._wait_s
            self._waiting[following] = "the request before it took too long"
            self._loop.call_soon(self._place_waiting)

    def outcome_unknown(self, request: Request, reason: str) -> OutcomeUnknown:
        self.unknown_outcomes += 1
        method, path = request.method.decode(), request.path[:200].decode("latin-1")
        return OutcomeUnknown(
            f"the outcome is not known: {reason} after {method} {path} was forwarded to the owner, "
            "which may have executed it or not; it was not sent again",
            retry_after_ms=RETRY_AFTER_MS,
        )

    # -- within ----------------------------------------------------------------------------------

    def _owner(self) -> OwnerReport | None:
        return self.owners.owner_of(FIRST_SHARD)

    def _start(self, exchange: Exchange) -> None:
        dispatch = self._dispatch
        if dispatch.body_bytes + exchange.held_bytes > dispatch.max_bodies_bytes:
            exchange.held_bytes = 0
            exchange.refuse(dispatch.too_many_bodies())
            return
        dispatch.body_bytes += exchange.held_bytes
        self.forwarded += 1
        before = None if exchange.reply.is_alone() else self._last_before(exchange.reply)
        self._exchanges[exchange.reply] = exchange
        if before is None:
            self._place(exchange)
        elif not exchange.follow(before):
            before.next = exchange

    def _last_before(self, reply: Reply) -> Exchange | None:
        """Returns the last request of the same connection that is still under way. Requests of one
        connection take effect in their order, as they do at the owner."""
        found = [self._exchanges.get(each) for each in reply.before()]
        return next((each for each in reversed(found) if each is not None), None)

    def _place(self, exchange: Exchange) -> None:
        owner = self._owner()
        if owner is None:
            self._waiting[exchange] = f"no broker is known to own shard {FIRST_SHARD}"
            self._schedule()
        elif self._dispatch.is_serving and exchange.request.notes.principal is not UNVERIFIED:
            # This broker has become the owner meanwhile.
            self.finished(exchange)
            self._dispatch.requests -= 1
            exchange.hand_back(self._dispatch)
        elif owner.owner == self.owners.name and not self._dispatch.is_serving:
            self._waiting[exchange] = "this broker is about to serve"
            self._schedule()
        else:
            exchange.send_by(self._pool_of(owner))

    def _pool_of(self, owner: OwnerReport) -> UpstreamPool:
        if self._pool is None:
            self._pool = UpstreamPool(owner.url, self.owners.name, self._loop, self._tls)
        return self._pool

    def _schedule(self) -> None:
        if self._next_try is None:
            self._next_try = self._loop.call_later(RETRY_S, self._try_waiting)

    def _try_waiting(self) -> None:
        self._next_try = None
        self._place_waiting()

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        now = self._loop.time()
        for exchange, reason in waiting.items():
            if exchange.is_over:
                continue
            if now >= exchange.until:
                exchange.refuse(
                    Unavailable(
                        f"the request was not executed: {reason}", retry_after_ms=RETRY_AFTER_MS
                    )
                )
            else:
                self._place(exchange)

    def _refuse_misdirected(self, reply: Reply) -> None:
        """Answers a request that another broker forwarded to this one, which is not the owner."""
        owner = self._owner()
        text = "no owner is known" if owner is None else f"the owner is {_text_of(owner)}"
        error: PenstockError = Unavailable(
            f"broker {self.owners.name} does not own shard {FIRST_SHARD} and forwards nothing that "
            f"was forwarded already; {text}",
            retry_after_ms=RETRY_AFTER_MS,
        )
        body = typed_error(error) if reply.path.startswith(TYPED_PATHS) else error_body(error)
        name = b"-" if owner is None else owner.owner.encode()
        head = b"%b%b%b: %b\r\n" % (JSON_TYPE, error_head(error), OWNER_HEADER, name)
        reply.send(503, encode_json(body), head)


def _text_of(owner: OwnerReport) -> str:
    return f"{owner.owner} at {owner.url}"
