"""Requests and answers of JetStream's own API, which are JSON on subjects under `$JS.API`.

Knows the fields and error codes that Penstock uses. Whatever is not a clear answer becomes
Unanswered, with a reason for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock.cluster.jetstream.connection import REQUEST_TIMEOUT_S, NatsConnection
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Bounds, Unanswered

PREFIX = "$JS.API."
ASK_TIMEOUT_S = 3.0
"""A server does not answer at all about a stream whose leader is being elected; so it is asked
again soon."""

INSUFFICIENT_RESOURCES = 10023
MESSAGE_NOT_FOUND = 10037
NO_SUITABLE_PEERS = 10005
STORAGE_EXCEEDED = 10047
JETSTREAM_NOT_ENABLED = 10076
JETSTREAM_NOT_ENABLED_FOR_ACCOUNT = 10039
NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059
WRONG_LAST_SEQUENCE = 10071
NOT_CLUSTERED = 10074

A = TypeVar("A", bound="ApiAnswer")


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"JetStream: {self.description or 'error'} ({self.err_code or self.code})"


class ApiAnswer(msgspec.Struct, frozen=True):
    error: ApiError | None = None


class PublishAnswer(ApiAnswer, frozen=True):
    stream: str = ""
    seq: int = 0


class PurgeAnswer(ApiAnswer, frozen=True):
    success: bool = False
    purged: int = 0


class StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    data: bytes = b""
    hdrs: bytes = b""


class MessageAnswer(ApiAnswer, frozen=True):
    message: StoredMessage | None = None


class ConsumerAnswer(ApiAnswer, frozen=True):
    name: str = ""


class JetStreamConfig(msgspec.Struct, frozen=True):
    """Members of a stream's configuration that Penstock sets or checks, named as in JetStream."""

    name: str = ""
    subjects: tuple[str, ...] = ()
    retention: str = "limits"
    storage: str = "file"
    discard: str = "old"
    num_replicas: int = 1
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    max_msg_size: int = -1
    max_age: int = 0
    deny_delete: bool = False
    deny_purge: bool = False
    allow_direct: bool = False
    allow_rollup_hdrs: bool = False
    allow_msg_ttl: bool = False
    no_ack: bool = False
    sealed: bool = False
    persist_mode: str = ""
    mirror: msgspec.Raw | None = None
    sources: tuple[msgspec.Raw, ...] = ()
    subject_transform: msgspec.Raw | None = None
    metadata: dict[str, str] = {}


class StreamState(msgspec.Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0


class PeerReport(msgspec.Struct, frozen=True):
    name: str = ""
    current: bool = False
    offline: bool = False
    lag: int = 0


class PlacementReport(msgspec.Struct, frozen=True):
    leader: str = ""
    replicas: tuple[PeerReport, ...] = ()


class StreamInfo(ApiAnswer, frozen=True):
    config: JetStreamConfig = JetStreamConfig()
    created: str = ""
    state: StreamState = StreamState()
    cluster: PlacementReport | None = None

    @property
    def identity(self) -> str:
        """Changes when the stream is deleted and made again, by whomever."""
        return f"{self.config.metadata.get(IDENTITY, '')}@{self.created}"

    def bounds(self) -> Bounds:
        state, limit = self.state, self.config.max_bytes
        room = max(0, limit - state.bytes) if limit >= 0 else UNLIMITED_BYTES
        # The first sequence of an empty stream depends on how it became empty.
        first = state.first_seq if state.messages else state.last_seq + 1
        return Bounds(first, state.last_seq, room, self.identity, state.bytes)


IDENTITY = "penstock_stream"
"""The stream's metadata has its random id under this name."""
UNLIMITED_BYTES = 1 << 62

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


def decode(kind: type[A], message: NatsMessage) -> A | Unanswered:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        answer: A = decoder.decode(message.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unanswered(f"JetStream's answer cannot be read: {error}")
    return answer


class JetStreamApi:
    """Calls of the API over one connection."""

    def __init__(self, connection: NatsConnection) -> None:
        self.connection = connection

    def call(
        self,
        kind: type[A],
        name: str,
        body: object,
        answered: Callable[[A | Unanswered], None],
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`answered` gets the answer whether or not it is an error of the API."""

        def replied(message: NatsMessage | Unanswered) -> None:
            if isinstance(message, Unanswered):
                answered(message)
            else:
                answered(decode(kind, message))

        self.connection.request(_subject(name), _encode(body), replied, timeout_s=timeout_s)

    async def ask(
        self, kind: type[A], name: str, body: object, timeout_s: float = ASK_TIMEOUT_S
    ) -> A | Unanswered:
        message = await self.connection.ask(_subject(name), _encode(body), timeout_s)
        return message if isinstance(message, Unanswered) else decode(kind, message)


def _subject(name: str) -> bytes:
    return (PREFIX + name).encode()


def _encode(body: object) -> bytes:
    return b"" if body is None else msgspec.json.encode(body)
