"""The client for asyncio.

Sends the calls that `requests`, `registry`, `access`, `cluster`, `ranges`, `journal` and `tokens`
build, and hands their answers back. Must not know what a call means.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from penstock.client import access, cluster, journal, ranges, registry, requests, tokens
from penstock.client.addresses import AddressBook
from penstock.client.aio_feeds import AsyncLineStream, AsyncOpenRows
from penstock.client.aio_handles import AsyncCacheHandle, AsyncStreamHandle
from penstock.client.aio_transactions import AsyncTransaction
from penstock.client.aio_transport import AsyncTransport
from penstock.client.calls import Call, error_of, named_like
from penstock.client.connection import (
    DEFAULT_TIMEOUT_S,
    PING_S,
    USER_AGENT,
    answer_timeout,
    heartbeat_of,
    http_options,
)
from penstock.client.credentials import Credentials, Token, url_of
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, DeliveryBuffer, new_owner
from penstock.client.results import Produced
from penstock.client.scope import UNKNOWN, ClientScope, is_located, located
from penstock.client.tls import has_certificate
from penstock.model.errors import NotFound, PenstockError
from penstock.model.scopes import DEFAULT_SCOPE, Scope

if TYPE_CHECKING:
    from penstock.client.aio_socket import AsyncSocket
    from penstock.client.socket_core import OnError

P = ParamSpec("P")
T = TypeVar("T")


def _operation(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Returns a method that sends the call which `build` makes from its arguments."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(build(*args, **kwargs))

    return named_like(method, build)


class AsyncClient:
    """A connection to a broker. Close it, or use it in an `async with`.

    Tasks of one event loop may share it.

    `url` defaults to the environment variable PENSTOCK_URL, else http://127.0.0.1:8080. It may be
    several addresses of one cluster, separated by commas: then requests go to the owner, and to any
    other broker when that cannot be reached. `token`
    is the token or a function that returns it. It defaults to the contents of the file that
    PENSTOCK_TOKEN_FILE names, else to PENSTOCK_TOKEN. After a 401 the client reads a token that
    can change again, and if it has changed, sends the request once more.
    `tenant` and `namespace` say where topics, producers, streams and caches are that are given by
    name alone. They default to PENSTOCK_TENANT and PENSTOCK_NAMESPACE, else to those of the
    credential, else to `default`.
    `client_cert` and `client_key` are PEM files, for a broker that asks for a certificate. They
    default to PENSTOCK_CLIENT_CERT and PENSTOCK_CLIENT_KEY.
    `transport` is an httpx transport, for tests that need no socket.
    """

    create_topic = _operation(requests.create_topic)
    list_topics = _operation(requests.list_topics)
    describe_topic = _operation(requests.describe_topic)
    configure_topic = _operation(requests.configure_topic)
    delete_topic = _operation(requests.delete_topic)
    delete_group = _operation(requests.delete_group)
    set_progress = _operation(ranges.set_progress)
    offsets = _operation(ranges.offsets)
    all_offsets = _operation(ranges.all_offsets)
    splits = _operation(ranges.splits)
    journal_offsets = _operation(journal.journal_offsets)
    set_journal_archived = _operation(journal.set_journal_archived)
    produce = _operation(requests.produce)
    produce_batch = _operation(requests.produce_batch)
    ack = _operation(requests.ack)
    ack_batch = _operation(requests.ack_batch)
    nack = _operation(requests.nack)
    release = _operation(requests.release)
    release_batch = _operation(requests.release_batch)
    extend = _operation(requests.extend)
    begin_effect = _operation(requests.begin_effect)
    look_up_effect = _operation(requests.look_up_effect)
    renew_effect = _operation(requests.renew_effect)
    commit_effect = _operation(requests.commit_effect)
    fail_effect = _operation(requests.fail_effect)
    create_tenant = _operation(registry.create_tenant)
    list_tenants = _operation(registry.list_tenants)
    describe_tenant = _operation(registry.describe_tenant)
    delete_tenant = _operation(registry.delete_tenant)
    create_namespace = _operation(registry.create_namespace)
    list_namespaces = _operation(registry.list_namespaces)
    describe_namespace = _operation(registry.describe_namespace)
    delete_namespace = _operation(registry.delete_namespace)
    create_stream = _operation(registry.create_stream)
    list_streams = _operation(registry.list_streams)
    describe_stream = _operation(registry.describe_stream)
    change_stream = _operation(registry.change_stream)
    delete_stream = _operation(registry.delete_stream)
    create_cache = _operation(registry.create_cache)
    list_caches = _operation(registry.list_caches)
    describe_cache = _operation(registry.describe_cache)
    change_cache = _operation(registry.change_cache)
    delete_cache = _operation(registry.delete_cache)
    describe_quota = _operation(registry.describe_quota)
    change_quota = _operation(registry.change_quota)
    apply = _operation(registry.apply)
    registry_status = _operation(registry.registry_status)
    grant_access = _operation(access.grant_access)
    revoke_access = _operation(access.revoke_access)
    list_access_rules = _operation(access.list_access_rules)
    check_access = _operation(access.check_access)
    who_am_i = _operation(access.who_am_i)
    set_role = _operation(access.set_role)
    remove_role = _operation(access.remove_role)
    list_roles = _operation(access.list_roles)
    create_token = _operation(tokens.create_token)
    list_tokens = _operation(tokens.list_tokens)
    describe_token = _operation(tokens.describe_token)
    rotate_token = _operation(tokens.rotate_token)
    revoke_token = _operation(tokens.revoke_token)
    describe_cluster = _operation(cluster.describe_cluster)
    move_shard = _operation(cluster.move_shard)
    drain_broker = _operation(cluster.drain_broker)
    remove_broker = _operation(cluster.remove_broker)
    version = _operation(requests.version)
    health = _operation(requests.health)
    ready = _operation(requests.ready)

    def __init__(
        self,
        url: str | None = None,
        *,
        token: Token | None = None,
        tenant: str | None = None,
        namespace: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
        user_agent: str = USER_AGENT,
        client_cert: str | None = None,
        client_key: str | None = None,
    ) -> None:
        self.url = url_of(url)
        self._timeout_s = timeout_s
        self._user_agent = user_agent
        self._certificate = (client_cert, client_key)
        self._credentials = Credentials(token)
        self.scope = ClientScope.of(tenant, namespace)
        self._own_scope: Scope | None = None
        book = AddressBook(self.url)
        self.has_several_addresses = book.has_several
        self._options = http_options(
            book.first, timeout_s, user_agent, self.scope, client_cert, client_key
        )
        self._transport = AsyncTransport(book, self._credentials, self._options, transport)

    async def send(self, call: Call[T]) -> T:
        """Sends a call and returns its result. Raises the error that the broker answered with."""
        path = await self._located(call.path)
        used = self._credentials.token
        response = await self._ask(call, path)
        if response.status_code == 401 and self._credentials.has_changed(used):
            response = await self._ask(call, path)
        return call.answer(response.status_code, response.content, response.headers)

    def consume(
        self,
        topic: str,
        group: str,
        *,
        owner: str = "",
        lease_ms: int = DEFAULT_LEASE_MS,
        prefetch: int = 0,
        wait_s: float | None = None,
    ) -> AsyncDeliveries:
        """Returns a stream of deliveries. It connects when it is first read.

        An empty `owner` is replaced by a unique name. `prefetch` limits how many deliveries of this
        stream may be unfinished at a time (0: the broker's limit). The stream ends when the broker
        ends it or, with `wait_s`, when nothing has arrived for that many seconds. With several
        addresses it goes on at another broker instead, and ends if the topic is gone.
        """
        return AsyncDeliveries(self, topic, group, owner or new_owner(), lease_ms, prefetch, wait_s)

    def read_range(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        *,
        columns: Iterable[str] = (),
        tenant_id: str | None = None,
        run_id: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
    ) -> AsyncOpenRows:
        """Returns the rows of a partition from offset `start` up to, but not including, `end`. It
        connects when it is first read. Without `start` the oldest row is the first; without `end`
        the newest at that time is the last."""
        only = {"tenant_id": tenant_id, "run_id": run_id, "from_ms": from_ms, "to_ms": to_ms}
        return AsyncOpenRows(self, ranges.range_path(topic, partition, start, end, columns, **only))

    def journal(
        self,
        *,
        from_: int | None = None,
        to: int | None = None,
        columns: Iterable[str] = (),
        **only: str | int | None,
    ) -> AsyncOpenRows:
        """Returns the rows of the journal, which records what happened to messages, from position
        `from_` up to, but not including, `to`. It connects when it is first read. Without `from_`
        the oldest row is the first; without `to` the newest that can be read then is the last.
        `only` filters by kind, topic or stream, resource_kind (topic or stream), group, run_id,
        tenant_id, from_ms and to_ms."""
        return AsyncOpenRows(self, journal.journal_path(from_, to, columns, only))

    def stream(
        self, name: str, *, tenant_id: str | None = None, namespace: str | None = None
    ) -> AsyncStreamHandle:
        """Returns a handle of a stream, to publish and subscribe. Its tenant and namespace are the
        client's, unless they are given. Sends nothing to the broker. If no tenant is named and the
        client has a credential, its first request asks for the tenant of that."""
        return AsyncStreamHandle(self, (*self.path_scope(tenant_id, namespace), name))

    def cache(
        self, name: str, *, tenant_id: str | None = None, namespace: str | None = None
    ) -> AsyncCacheHandle:
        """Returns a handle of a cache, to read and write it. Its tenant and namespace are the
        client's, unless they are given. Sends nothing to the broker. If no tenant is named and the
        client has a credential, its first request asks for the tenant of that."""
        return AsyncCacheHandle(self, (*self.path_scope(tenant_id, namespace), name))

    def transaction(self, transaction_id: str = "") -> AsyncTransaction:
        """Returns a transaction. Use it in an `async with`, which commits it at its end, or sends
        nothing if the block raises. An empty id is replaced by a unique one."""
        return AsyncTransaction(self, transaction_id)

    def connect(self, *, on_error: OnError | None = None, ping_s: float = PING_S) -> AsyncSocket:
        """Returns a WebSocket for streams and caches. Use it in an `async with`, which connects.

        It needs the extra `websocket`. `on_error` gets the errors of publishes with ack `none`.
        After `ping_s` without a byte from the broker the socket sends a ping, and it reconnects if
        the client's `timeout_s` passes without an answer.
        """
        # Imported here, so that programs without a socket do not load it.
        from penstock.client.aio_socket import AsyncSocket
        from penstock.client.socket_connection import SocketEndpoint

        endpoint = SocketEndpoint(
            self.url,
            self._credentials,
            self._timeout_s,
            self._user_agent,
            ping_s,
            self._certificate,
            self._transport.book,
            self._options,
        )
        return AsyncSocket(self, endpoint, on_error)

    async def redrive(self, letter: Delivery) -> Produced:
        """Produces a dead letter to its original topic again, with its original retry policy, then
        acks it. Its attempts count from 1 again. If this fails, repeat it: the broker does not
        store the message twice."""
        message = requests.redriven(letter)
        produced = await self.produce(
            message.topic, message.value, key=message.key, envelope=message.envelope
        )
        await self.ack(letter)
        return produced

    async def open_stream(self, path: str, wait_s: float) -> httpx.Response:
        """Requests a stream and returns its response as soon as the head has arrived. The caller
        closes it. A stream that is silent for more than `wait_s` counts as broken."""
        path = await self._located(path)
        used = self._credentials.token
        response = await self._ask_stream(path, wait_s)
        if response.status_code == 401 and self._credentials.has_changed(used):
            response = await self._ask_stream(path, wait_s)
        if response.status_code != 200:
            raise error_of(response.status_code, response.content)
        return response

    def path_scope(self, tenant_id: str | None = None, namespace: str | None = None) -> Scope:
        """Returns the tenant and namespace in the path of a stream or cache. What the broker has
        to be asked for is UNKNOWN until `locate`."""
        own = self._own_scope or (UNKNOWN if self._has_credential() else DEFAULT_SCOPE)
        return self.scope.path_scope(tenant_id, namespace, own)

    async def locate(self) -> Scope:
        """Returns the tenant and namespace of the credential. Asks the broker once."""
        if self._own_scope is None and self._has_credential():
            try:
                found = await self.who_am_i()
                self._own_scope = (found.tenant_id, found.namespace)
            except NotFound:
                # An older broker, which does not say.
                self._own_scope = DEFAULT_SCOPE
        return self._own_scope or DEFAULT_SCOPE

    def _has_credential(self) -> bool:
        return bool(self._credentials.token) or has_certificate(*self._certificate)

    async def _located(self, path: str) -> str:
        return path if is_located(path) else located(path, await self.locate())

    def doubt_owner(self) -> None:
        """Looks for the owner again before the next request, if there are several addresses."""
        self._transport.book.doubt()

    async def _ask(self, call: Call[T], path: str) -> httpx.Response:
        headers = self._credentials.headers()
        if call.content_type:
            headers["Content-Type"] = call.content_type
        return await self._transport.ask(
            call.method,
            path,
            headers,
            answer_timeout(self._timeout_s, call.wait_s),
            body=call.body,
            is_read=call.is_read,
        )

    async def _ask_stream(self, path: str, wait_s: float) -> httpx.Response:
        timeout = answer_timeout(self._timeout_s, wait_s)
        # Streams are read as they come over the wire, so a proxy must not compress them.
        headers = self._credentials.headers() | {"Accept-Encoding": "identity"}
        return await self._transport.ask(
            "GET", path, headers, timeout, is_read=True, is_stream=True
        )

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closed

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncDeliveries(AsyncLineStream[Delivery]):
    """An open consume stream. Iterate over it in an `async with`, which closes it.

    Deliveries stay leased after the stream has ended and can still be acked. The broker gives
    messages that it had not sent yet to another consumer at once.
    """

    goes_on = True

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        group: str,
        owner: str,
        lease_ms: int,
        prefetch: int,
        wait_s: float | None,
        heartbeat_ms: int = 0,
    ) -> None:
        self.owner = owner
        heartbeat_ms = heartbeat_ms or heartbeat_of(wait_s)
        path = requests.consume_path(topic, group, owner, lease_ms, prefetch, heartbeat_ms)
        buffer = DeliveryBuffer(topic, group, owner)
        super().__init__(client, path, buffer, wait_s, heartbeat_ms)

    def _is_end(self, error: PenstockError) -> bool:
        return isinstance(error, NotFound)
