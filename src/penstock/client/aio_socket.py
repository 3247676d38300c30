"""A WebSocket to a broker for asyncio: one connection for streams and caches.

Its handles have the names of those over HTTP, so that code can change the way by changing one line.
Builds requests and hands their answers back; `socket_core` keeps the connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from penstock.client import streams
from penstock.client.aio_events import AsyncProducer
from penstock.client.aio_handles import AsyncCacheOperations, AsyncStreamOperations
from penstock.client.aio_socket_events import AsyncSocketEvents
from penstock.client.aio_socket_feeds import AsyncSocketSubscription, AsyncSocketWatch
from penstock.client.aio_socket_runner import AsyncSocketRunner
from penstock.client.calls import Call, Payload, SocketForm, bytes_of, list_of
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.positions import HandledEvents
from penstock.client.scope import is_known
from penstock.client.socket_channels import AnyChannel, GapMark, SocketChannel
from penstock.client.socket_connection import SocketEndpoint
from penstock.client.socket_core import OnError, SocketCore
from penstock.client.socket_exchange import Outgoing
from penstock.client.socket_frames import encode_message, encode_publish
from penstock.client.streams import Ack, BatchAck, Start
from penstock.model.errors import InvalidArgument
from penstock.model.scopes import Scope
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

T = TypeVar("T")

_PUBLISH = SocketForm("publish", {})


class AsyncSocket:
    """An open WebSocket: `client.connect()`. Use it in an `async with`, which closes it.

    Tasks of one event loop may share it. It reconnects by itself. Requests that had not left by
    then leave on the new connection. Reads that had left are sent again, and so are acks and
    publishes of a producer, which change nothing if they were executed. Another write that had left
    without an answer raises OutcomeUnknown. Subscriptions and watches go on.

    An error of a publish with ack `none` goes to `on_error`, in the event loop of the connection.
    Without `on_error`, the next publish with ack `none`, `flush` or `close` raises the first one.
    """

    def __init__(
        self, client: AsyncClient, endpoint: SocketEndpoint, on_error: OnError | None
    ) -> None:
        self.client = client
        self._core = SocketCore(endpoint, on_error)
        self._runner = AsyncSocketRunner(self._core)

    # -- life ----------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._core.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether it is not open: not yet, not any more, or because it cannot connect again."""
        return self._core.has_ended

    @property
    def reconnects(self) -> int:
        """How often the connection broke and was made again."""
        return self._core.reconnects

    async def open(self) -> Self:
        """Connects. Raises Unavailable if there is no broker, and Unauthenticated if it refuses the
        token."""
        if not self.client.scope.tenant:
            await self.client.locate()
        self._runner.start()
        try:
            await self._runner.run(self._core.open())
        except BaseException:
            self._runner.stop()
            raise
        return self

    async def flush(self) -> None:
        """Waits until the broker has handled everything that was published before, and raises an
        error of a publish with ack `none`."""
        await self._runner.run(self._core.flush())

    async def close(self) -> None:
        """Flushes and closes. Raises OutcomeUnknown if the broker cannot be reached."""
        if self._runner.is_running:
            try:
                await self._runner.run(self._core.close())
            finally:
                self._runner.stop()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
        elif self._runner.is_running:
            # The error of the block matters more than what is still to be sent.
            try:
                await self._runner.run(self._core.abort())
            finally:
                self._runner.stop()

    # -- handles -------------------------------------------------------------------------------

    def stream(
        self, name: str, *, tenant_id: str | None = None, namespace: str | None = None
    ) -> AsyncSocketStreamHandle:
        """Returns a handle of a stream, to publish and subscribe. Its tenant and namespace are the
        client's, unless they are given. Sends nothing to the broker."""
        return AsyncSocketStreamHandle(self, (*self._scope(tenant_id, namespace), name))

    def cache(
        self, name: str, *, tenant_id: str | None = None, namespace: str | None = None
    ) -> AsyncSocketCacheHandle:
        """Returns a handle of a cache, to read and write it. Its tenant and namespace are the
        client's, unless they are given. Sends nothing to the broker."""
        return AsyncSocketCacheHandle(self, (*self._scope(tenant_id, namespace), name))

    def _scope(self, tenant_id: str | None, namespace: str | None) -> Scope:
        scope = self.client.path_scope(tenant_id, namespace)
        if not is_known(scope):
            raise InvalidArgument(
                "open the socket first: it asks for the tenant of the credential; or name one"
            )
        return scope

    # -- requests ------------------------------------------------------------------------------

    async def send(self, call: Call[T]) -> T:
        """Sends a call and returns its result. Raises the error that the broker answered with. A
        call that is no message of the WebSocket goes over HTTP."""
        if call.form is None:
            return await self.client.send(call)
        return await self._runner.run(self._core.send(call))

    async def settle(self, channel: AnyChannel, call: Call[T]) -> T:
        """Acks, nacks or extends an event of a channel. Over HTTP if the channel has ended."""
        frame = None
        if call.form is not None and self._runner.is_running:
            frame = await self._runner.run(self._core.settle(channel, call.form))
        return await self.client.send(call) if frame is None else call.answer(200, frame)

    async def publish(self, path: Path, payloads: list[bytes], ack: BatchAck) -> None:
        """Publishes events as one binary frame. With ack `none`, waits only for room."""
        number = self._core.next_number()
        frame = encode_publish(path, payloads, ack, number)
        await self._publish(Outgoing(_PUBLISH, number, frame, is_binary=True), ack, len(payloads))

    async def publish_message(self, call: Call[Any], ack: BatchAck, count: int) -> None:
        """Publishes events as a text frame, which can say more than a binary one."""
        form, number = call.form or _PUBLISH, self._core.next_number()
        frame = encode_message(form, call.body, number)
        await self._publish(Outgoing(form, number, frame), ack, count)

    async def _publish(self, item: Outgoing, ack: BatchAck, count: int) -> None:
        if ack == "none":
            item.events = count
            await self._runner.post(item)
        else:
            item.answers = count if ack == "per_message" else 1
            await self._runner.run(self._core.request(item))

    # -- subscriptions and watches -------------------------------------------------------------

    async def open_channel(self, channel: AnyChannel) -> None:
        await self._runner.run(self._core.open_channel(channel))

    async def take(self, channel: AnyChannel, wait_s: float) -> list[Any]:
        return await self._runner.run(self._core.take(channel, wait_s))

    async def leave_channel(self, channel: SocketChannel[T]) -> list[T | GapMark]:
        """Ends a channel, and returns what arrived for it and was not taken."""
        if not self._runner.is_running:
            return []
        return await self._runner.run(self._core.leave_channel(channel))

    async def close_channel(self, channel: AnyChannel) -> None:
        """Ends a channel. Those of a closed socket have ended."""
        if self._runner.is_running:
            await self._runner.run(self._core.end_channel(channel))


class AsyncSocketStreamHandle(AsyncStreamOperations):
    """A handle of a stream: `socket.stream("orders")`.

    `subscriptions`, `delete_subscription` and `next_sequence` go over HTTP, through the socket's
    client; all else goes over the socket. `publish` returns no offset and sends no number, so that
    an `exactly_once` stream refuses it: use `producer`.
    """

    def __init__(self, socket: AsyncSocket, path: Path) -> None:
        super().__init__(socket, path)
        self.socket = socket

    def producer(
        self, producer_id: str | None = None, *, next_sequence: int = 0, retry_s: float = 60.0
    ) -> AsyncProducer:
        """Returns a producer that publishes each event once, and retries for `retry_s`, also after
        a reconnect. Without a `producer_id` it makes one up."""
        return AsyncProducer(self.socket, self.path, producer_id, next_sequence, retry_s)

    async def publish(
        self, payload: Payload, *, ack: Ack = "per_message", invalidate: Iterable[str] = ()
    ) -> None:
        """Publishes one event, as over HTTP. With an `ack` of `none` this does not wait for the
        broker; it waits only while the outgoing buffer is full. The broker reports a failure all
        the same: see `AsyncSocket`."""
        if invalidate:
            call = streams.publish(self.path, payload, ack=ack, invalidate=invalidate)
            await self.socket.publish_message(call, ack, 1)
        else:
            await self.socket.publish(self.path, [bytes_of(payload)], ack)

    async def publish_batch(
        self,
        payloads: Iterable[Payload],
        *,
        ack: BatchAck = "per_batch",
        invalidate: Iterable[str] = (),
    ) -> None:
        """Publishes events in their order as one step: all of them, or none if this raises. With an
        `ack` of `none` this does not wait, as `publish`."""
        events = [bytes_of(payload) for payload in list_of(payloads, "payloads")]
        if invalidate:
            call = streams.publish_batch(self.path, events, ack=ack, invalidate=invalidate)
            await self.socket.publish_message(call, ack, len(events))
        else:
            await self.socket.publish(self.path, events, ack)

    def events(
        self,
        *,
        start: Start | None = None,
        name: str | None = None,
        owner: str | None = None,
        lease_ms: int = DEFAULT_LEASE_MS,
        prefetch: int = 0,
        once: HandledEvents | None = None,
        wait_s: float | None = None,
        stream_id: int | None = None,
        resume: bool = True,
    ) -> AsyncSocketEvents:
        """Returns the events of a durable stream, as over HTTP. They go on after a reconnect: see
        `AsyncSocketEvents`."""
        streams.check_named(name, owner, lease_ms, prefetch, once)
        if name is None and start is None:
            start = "earliest"
        return AsyncSocketEvents(
            self.socket,
            self.path,
            name,
            start,
            owner,
            lease_ms,
            prefetch,
            once,
            wait_s,
            stream_id,
            resume=resume,
        )

    @overload
    def subscribe(
        self,
        *,
        event_queue_depth: int | None = None,
        wait_s: float | None = None,
        resume: bool = True,
    ) -> AsyncSocketSubscription: ...

    @overload
    def subscribe(
        self,
        *,
        name: str,
        start: Start | None = None,
        owner: str | None = None,
        lease_ms: int = DEFAULT_LEASE_MS,
        prefetch: int = 0,
        once: HandledEvents | None = None,
        wait_s: float | None = None,
        stream_id: int | None = None,
        resume: bool = True,
    ) -> AsyncSocketEvents: ...

    @overload
    def subscribe(
        self,
        *,
        start: Start,
        wait_s: float | None = None,
        stream_id: int | None = None,
        resume: bool = True,
    ) -> AsyncSocketEvents: ...

    def subscribe(
        self,
        *,
        event_queue_depth: int | None = None,
        wait_s: float | None = None,
        resume: bool = True,
        **durable: Any,
    ) -> AsyncSocketSubscription | AsyncSocketEvents:
        """Returns a subscription. Use it in an `async with`. It begins when opened or first read.
        With a `name` or a `start` it is one of a durable stream: see `events`.

        The broker keeps up to `event_queue_depth` unsent events for it (None: the stream's
        setting) and drops newer ones while that many wait. With `wait_s` the subscription ends when
        nothing has arrived for that many seconds. With `resume` False it ends with Unavailable when
        the connection breaks.
        """
        if durable:
            return self.events(wait_s=wait_s, resume=resume, **durable)
        return AsyncSocketSubscription(
            self.socket, self.path, event_queue_depth, wait_s, resume=resume
        )


class AsyncSocketCacheHandle(AsyncCacheOperations):
    """A handle of a cache: `socket.cache("sessions")`."""

    def __init__(self, socket: AsyncSocket, path: Path) -> None:
        super().__init__(socket, path)
        self.socket = socket

    def watch(
        self,
        *,
        key: str | None = None,
        prefix: str | None = None,
        include: Iterable[str] = (),
        since_version: int | None = None,
        wait_s: float | None = None,
        resume: bool = True,
    ) -> AsyncSocketWatch:
        """Returns a watch. Use it in an `async with`; it begins when it is opened or first read.

        It follows one `key`, or all keys that begin with `prefix` ("" means every key). `include`
        may name the events `expire` and `evict`, which are left out otherwise. If the cache has
        changed after `since_version`, the first event is a gap. With `wait_s` the watch ends when
        nothing has arrived for that many seconds. With `resume` False it ends with Unavailable when
        the connection breaks.
        """
        return AsyncSocketWatch(
            self.socket, self.path, key, prefix, include, since_version, wait_s, resume=resume
        )
