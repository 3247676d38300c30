"""Consumers: the handle that the engine gives to the server, and the sink that it writes to."""

from __future__ import annotations

from typing import Any, Protocol


class Sink(Protocol):
    """The receiving end of a consumer: a connection, or a test's list."""

    def write(self, items: list[Any]) -> None:
        """Hands durable deliveries to the transport: each an Item, or an EventItem if they are of a
        stream. Afterwards they count as written."""
        ...

    def end(self, reason: str) -> None:
        """Called when the broker ends the stream: its topic or group is gone, or the broker
        stops."""
        ...


class Consumer(Protocol):
    """An open consumer. `id` is its number, which no other has. `topic_id` is that of its topic; of
    a stream, the `stream_id`. `closed`: its connection has closed it, or its group or topic was
    deleted."""

    id: int
    closed: bool

    @property
    def topic_id(self) -> int: ...

    def pause(self) -> None:
        """Called when the connection is above its high-water mark: no deliveries for now."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None:
        """Closes the consumer, because its connection is gone."""
        ...
