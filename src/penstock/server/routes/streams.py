"""Streams over REST: publish, and who subscribes. The stream's path comes from the route."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.streams import Lag
from penstock.model.tenancy import Path
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, check_raw_only, truth
from penstock.server.http.responses import encode_json
from penstock.server.message_actions import publish, publish_batch
from penstock.server.routes.socket import send_answer
from penstock.server.websocket.messages import (
    ABSENT,
    PublishBatchBody,
    PublishBody,
    decode_body,
    query_request_id,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_publish_decoder = msgspec.json.Decoder(PublishBody)
_publish_batch_decoder = msgspec.json.Decoder(PublishBatchBody)


def post_publish(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_publish(request)) or decode_body(_publish_decoder, request.body)
    publish(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def _raw_publish(request: Request) -> PublishBody | None:
    """The request's body as the payload, and the rest from the query; None if it is not raw. Of
    `invalidate` every one counts."""
    params = request.params()
    if not truth(params, "raw"):
        check_raw_only(params, ("ack", "invalidate", "request_id"))
        return None
    ack = params.get("ack")
    if ack is not None and ack not in ("none", "per_message"):
        raise InvalidArgument("ack must be none or per_message")
    targets = request.every("invalidate")
    return PublishBody(
        payload=request.body,
        ack=cast("Literal['none', 'per_message'] | None", ack),
        request_id=query_request_id(params),
        invalidate=msgspec.Raw(encode_json(targets)) if targets else ABSENT,
    )


def post_publish_batch(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_publish_batch_decoder, request.body)
    publish_batch(hub.engine, path, body, partial(send_answer, reply, body.request_id))


def list_subscriptions(path: Path, hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.streams.subscriptions(path, partial(_listed, reply))


def _listed(reply: Reply, outcome: list[Lag] | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send_json(200, {"subscriptions": outcome})
