"""The replies to the messages of one WebSocket, in the order of the messages.

Must not know how a reply travels: the connection writes its frames.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.model.errors import PenstockError
from penstock.server.http.answer_budget import Claim
from penstock.server.http.responses import (
    CursorErrorBody,
    TypedErrorBody,
    encode_json,
    subscribe_error,
    typed_error,
)
from penstock.server.message_actions import Outcome
from penstock.server.response_queue import Response, ResponseQueue
from penstock.server.websocket.answers import Ok, Subscribed
from penstock.server.websocket.arrays import answer_bytes, encode_outcomes
from penstock.server.websocket.messages import Message, RefusedMessage, SubscribeMessage


class MessageReply(Response):
    """The reply to a message, or to an array of messages. `nbytes` is the size of the request."""

    __slots__ = ("_is_array", "_is_done", "_max_bytes", "_messages", "_outcomes", "nbytes")

    def __init__(
        self,
        order: MessageOrder,
        messages: list[Message | RefusedMessage],
        nbytes: int,
        *,
        is_array: bool = False,
    ) -> None:
        super().__init__(order)
        self._messages = messages
        self._is_array = is_array
        self._max_bytes = order.max_answer_bytes
        self._is_done = False
        self._outcomes: list[Outcome] = []
        self.nbytes = nbytes
        order.add(self)

    def done(self, outcome: Outcome) -> None:
        """Answers a single message."""
        self.done_all([outcome])

    def done_all(self, outcomes: list[Outcome]) -> None:
        """Answers an array of messages. Only the first call counts."""
        if not self._is_done:
            self._is_done = True
            self._outcomes = outcomes
            self.when_room(answer_bytes(outcomes), self._encode)

    def _encode(self) -> None:
        self.data = self._frames()
        self._queue.answered(self)

    def _frames(self) -> list[bytes]:
        if self._is_array:
            return [encode_outcomes(self._messages, self._outcomes, error_answer, self._max_bytes)]
        outcome = self._outcomes[0]
        if isinstance(outcome, PenstockError):
            return [encode_json(error_answer(self._messages[0], outcome))]
        if isinstance(outcome, list):
            return [encode_json(answer) for answer in outcome]
        return [] if outcome is None else [encode_json(outcome)]

    def channel_ids(self) -> list[str]:
        """Returns the ids of the subscriptions and watches that this reply announces."""
        ids: list[str] = []
        for outcome in self._outcomes:
            if isinstance(outcome, Subscribed):
                ids.append(outcome.subscription_id)
            elif isinstance(outcome, Ok) and outcome.watch_id is not None:
                ids.append(outcome.watch_id)
        return ids


class MessageOrder(ResponseQueue[MessageReply]):
    """`held_bytes` is the size of the messages that have no reply yet, or one that must wait."""

    def __init__(
        self,
        answers: Claim,
        send: Callable[[MessageReply], None],
        has_room: Callable[[], bool],
        max_answer_bytes: int,
    ) -> None:
        super().__init__(answers)
        self._send = send
        self._has_room = has_room
        self.max_answer_bytes = max_answer_bytes
        self.held_bytes = 0

    def add(self, response: MessageReply) -> None:
        super().add(response)
        self.held_bytes += response.nbytes

    def write(self, response: MessageReply) -> None:
        self.held_bytes -= response.nbytes
        self._send(response)

    def has_room(self) -> bool:
        return self._has_room()

    def clear(self) -> None:
        super().clear()
        self.held_bytes = 0


def error_answer(
    message: Message | RefusedMessage, error: PenstockError
) -> TypedErrorBody | CursorErrorBody:
    if isinstance(message, SubscribeMessage):
        return subscribe_error(error, request_id=message.request_id)
    return typed_error(error, request_id=message.request_id)
