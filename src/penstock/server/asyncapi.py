"""The AsyncAPI 3.0 document of the WebSocket, made of the described messages and their structs.

Invariant: a pure function of MESSAGES and FRAMES; nothing of a running broker is in it. It
describes the broker's side: the broker receives the messages, and sends the answers. Must not know
how it is shown.
"""

from __future__ import annotations

from typing import Any

from penstock import __version__
from penstock.server.http.responses import TypedErrorBody
from penstock.server.message_actions import MESSAGES
from penstock.server.message_description import MessageDescription
from penstock.server.schemas import Json, ref, schemas_of
from penstock.server.websocket.answers import FRAMES, FrameDescription
from penstock.server.websocket.binary import EVENTS, PUBLISH
from penstock.server.websocket.upgrade import PATH, SUBPROTOCOLS

CHANNEL = "socket"

ABOUT = (
    "Streams and caches over one connection. A text frame is one JSON object, or an array of "
    "up to 10,000 objects, counting the items of their lists; an array is answered by one "
    "array. Answers come in the order of the requests, and have their request_id. A wrong "
    "message is answered with an error, and the connection stays open; a message over "
    "max_body_bytes closes it with code 1009."
)
ABOUT_BINARY = (
    f"With subprotocol felix.v1+binary the broker sends events as binary frames: u8 kind {EVENTS}, "
    "u32 number of the subscription, u32 count, and for each event u32 length and its bytes. A "
    f"client may publish so: u8 kind {PUBLISH}, u8 ack (0 none, 1 per_message, 2 per_batch), u32 "
    "request number, tenant, namespace and stream each as u8 length and UTF-8, u32 count, and for "
    "each event u32 length and its bytes. All numbers are little-endian; everything else is JSON."
)


def build_document() -> Json:
    messages = {_key(each): _message_entry(each) for each in MESSAGES}
    messages |= {_key(each): _frame_entry(each) for each in FRAMES}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Penstock", "version": __version__, "description": ABOUT},
        "defaultContentType": "application/json",
        "channels": {CHANNEL: _channel(list(messages))},
        "operations": {each.type: _operation(each) for each in MESSAGES} | _pushes(),
        "components": {
            "messages": messages,
            "schemas": schemas_of(
                [each.shape for each in MESSAGES], [each.shape for each in FRAMES]
            ),
        },
    }


def _channel(names: list[str]) -> Json:
    offered = [name.decode() for name in SUBPROTOCOLS]
    header = {
        "type": "string",
        "enum": offered,
        "description": "The client must offer one of them.",
    }
    return {
        "address": PATH.decode(),
        "title": "The WebSocket",
        "description": ABOUT_BINARY,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "bindings": {
            "ws": {
                "method": "GET",
                "headers": {
                    "type": "object",
                    "properties": {"Sec-WebSocket-Protocol": header},
                    "required": ["Sec-WebSocket-Protocol"],
                },
            }
        },
    }


def _message_entry(message: MessageDescription) -> Json:
    return {
        "name": message.type,
        "title": message.type,
        "summary": message.text,
        "payload": ref(message.shape),
        "examples": [{"payload": {"type": message.type} | message.example}],
    }


def _frame_entry(message: FrameDescription) -> Json:
    return {
        "name": message.type,
        "title": message.type,
        "summary": message.text,
        "payload": ref(message.shape),
    }


def _operation(message: MessageDescription) -> Json:
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{CHANNEL}"},
        "summary": message.text,
        "messages": [_message(message.shape)],
        "reply": {
            "channel": {"$ref": f"#/channels/{CHANNEL}"},
            "messages": [_message(message.answer), _message(TypedErrorBody)],
        },
    }


def _pushes() -> Json:
    """The frames that a message causes later, by the message's type."""
    return {
        f"{message.type}_pushes": {
            "action": "send",
            "channel": {"$ref": f"#/channels/{CHANNEL}"},
            "summary": f"What follows {message.type}, until it ends; an error says why it did.",
            "messages": [_message(shape) for shape in (*message.pushes, TypedErrorBody)],
        }
        for message in MESSAGES
        if message.pushes
    }


def _message(shape: Any) -> Json:
    return {"$ref": f"#/channels/{CHANNEL}/messages/{shape.__name__}"}


def _key(message: MessageDescription | FrameDescription) -> str:
    """The struct's name, since the type `lag` is both asked and sent."""
    return str(message.shape.__name__)
