"""The description of a message: its shape, its answer, the access that it needs, its action.

message_actions.py has one for every message; the AsyncAPI document is made from them. Must not know
what an action does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.api import outcomes
from penstock.api.engine import Engine
from penstock.server.access import HandlerNeeds, Open
from penstock.server.websocket.answers import Answers

Action = Callable[[Engine, Any, outcomes.Done[Answers]], None]


class MessageDescription(msgspec.Struct, frozen=True):
    """A message, described. `example` lacks the type. `answer` is the answer to a success; `pushes`
    are the frames that come later for it. `access` says what the sender needs. `action` None: it
    needs an open connection, and websocket/connection.py performs it."""

    shape: Any
    text: str
    example: dict[str, Any]
    answer: Any
    access: HandlerNeeds | Open
    pushes: tuple[Any, ...] = ()
    action: Action | None = None

    @property
    def type(self) -> str:
        return str(self.shape.__struct_config__.tag)
