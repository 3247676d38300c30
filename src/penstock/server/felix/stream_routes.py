"""Streams over REST: publish, and who subscribes. The stream's path comes from the route."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.model.errors import PenstockError
from penstock.model.streams import Lag
from penstock.model.tenancy import Path
from penstock.server.felix.message_routes import send_answer
from penstock.server.felix.messages import PublishBatchBody, PublishBody, decode_body
from penstock.server.felix.operations import publish, publish_batch
from penstock.server.hub import Hub
from penstock.server.requests import Request, truth

if TYPE_CHECKING:
    from penstock.server.turns import Reply

_publish_decoder = msgspec.json.Decoder(PublishBody)
_publish_batch_decoder = msgspec.json.Decoder(PublishBatchBody)


def post_publish(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    if request.query and truth(request.params(), "raw"):
        body = PublishBody(payload=request.body)
    else:
        body = decode_body(_publish_decoder, request.body)
    publish(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def post_publish_batch(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    body = decode_body(_publish_batch_decoder, request.body)
    publish_batch(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def list_subscriptions(path: Path, hub: Hub, request: Request, reply: Reply) -> None:
    hub.engine.streams.subscriptions(path, partial(_listed, reply))


def _listed(reply: Reply, outcome: list[Lag] | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send_json(200, {"subscriptions": outcome})
