"""The data plane: produce, ack, nack, extend, one a request or in batches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.core.produce import Produce
from penstock.core.settle import Settle
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_REASON_BYTES
from penstock.model.records import Message
from penstock.server.forms import ack_body_of, lease_of, produce_body_of, produce_of, settle_of
from penstock.server.hub import Hub
from penstock.server.replies import batch_error, encode_json
from penstock.server.requests import Request, decode_body, whole_number
from penstock.server.wire import AckBody, ExtendBody, NackBody, ProduceBody

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.turns import Reply

Body = TypeVar("Body")
Command = TypeVar("Command")

_produce_decoder = msgspec.json.Decoder(ProduceBody)
_ack_decoder = msgspec.json.Decoder(AckBody)
_nack_decoder = msgspec.json.Decoder(NackBody)
_extend_decoder = msgspec.json.Decoder(ExtendBody)
_raw_items = msgspec.json.Decoder(list[msgspec.Raw])
_produce_items = msgspec.json.Decoder(list[ProduceBody])
_ack_items = msgspec.json.Decoder(list[AckBody])


class Produced(msgspec.Struct):
    status: str
    topic: str


class ProducedItem(msgspec.Struct, omit_defaults=True):
    """A duplicate has no place of its own: partition and offset are left out."""

    status: str
    topic: str
    partition: int = -1
    offset: int = -1
    duplicate: bool = False


class AckedItem(msgspec.Struct):
    status: str = "acked"


def produce(hub: Hub, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_produce_decoder, request.body)
    else:
        body = produce_body_of(request.params())
    command = produce_of(body)
    hub.engine.produce(command, partial(_produced, reply, command.topic))


def _produced(reply: Reply, topic: str, outcome: Message | PenstockError | None) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send(200, encode_json(Produced("produced", topic)))


def ack(hub: Hub, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_ack_decoder, request.body)
    else:
        body = msgspec.convert(ack_body_of(request.params()), AckBody)
    hub.engine.ack(settle_of(body), reply.settle)


def nack(hub: Hub, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_nack_decoder, request.body)
    else:
        params = request.params()
        body = msgspec.convert({**ack_body_of(params), "reason": params.get("reason")}, NackBody)
    hub.engine.nack(settle_of(body), clean_reason(body.reason), reply.settle)


def extend(hub: Hub, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_extend_decoder, request.body)
    else:
        params = request.params()
        lease_ms = whole_number(params, "lease_ms")
        body = msgspec.convert({**ack_body_of(params), "lease_ms": lease_ms}, ExtendBody)
    lease = lease_of(body.lease_ms, hub.engine.limits.lease_ms)
    hub.engine.extend(settle_of(body), lease, reply.settle)


def produce_batch(hub: Hub, request: Request, reply: Reply) -> None:
    items = _commands(request.body, _produce_items, _produce_decoder, produce_of)
    commands = [item for item in items if isinstance(item, Produce)]
    hub.engine.produce_many(commands, partial(_send_results, reply, items, _produced_item))


def ack_batch(hub: Hub, request: Request, reply: Reply) -> None:
    items = _commands(request.body, _ack_items, _ack_decoder, settle_of)
    commands = [item for item in items if isinstance(item, Settle)]
    hub.engine.ack_many(commands, partial(_send_results, reply, items, _acked_item))


def clean_reason(raw: str | None) -> str:
    """Trimmed, and cut to what is worth keeping in memory."""
    text = (raw or "").strip()
    if len(text) * 4 > MAX_REASON_BYTES:
        text = text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return text


def _commands(
    body: bytes,
    all_at_once: msgspec.json.Decoder[list[Body]],
    one: msgspec.json.Decoder[Body],
    command_of: Callable[[Body], Command],
) -> list[Command | PenstockError]:
    """A command or an error per item. A body that is no list of JSON values is an error itself."""
    is_array = body.lstrip()[:1] == b"["
    try:
        decoded: list[Any] = all_at_once.decode(body) if is_array else one.decode_lines(body)
        if not is_array and len(decoded) != len(_lines(body)):
            raise InvalidArgument("NDJSON has one object a line")
    except (msgspec.DecodeError, ValueError, RecursionError):
        # Some item is not as it should be: find out which, and let the others stand.
        decoded = _decode_each(body, one, is_array=is_array)
    if not decoded:
        raise InvalidArgument("the batch is empty; send a JSON array or NDJSON lines")
    if len(decoded) > MAX_BATCH_ITEMS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_ITEMS} items")
    return [_command_of(item, command_of) for item in decoded]


def _command_of(item: Any, command_of: Callable[[Any], Command]) -> Command | PenstockError:
    if isinstance(item, PenstockError):
        return item
    try:
        return command_of(item)
    except PenstockError as error:
        return error


def _decode_each(body: bytes, one: msgspec.json.Decoder[Any], *, is_array: bool) -> list[Any]:
    if is_array:
        lines = [bytes(raw) for raw in decode_body(_raw_items, body)]
    else:
        lines = _lines(body)
        for line in lines:
            decode_body(_any, line)
    decoded: list[Any] = []
    for line in lines:
        try:
            decoded.append(decode_body(one, line))
        except InvalidArgument as error:
            decoded.append(error)
    return decoded


def _lines(body: bytes) -> list[bytes]:
    return [line for line in body.split(b"\n") if line.strip()]


_any = msgspec.json.Decoder()


def _send_results(
    reply: Reply, items: list[Any], result_of: Callable[[Any, Any], Any], outcomes: Any
) -> None:
    if isinstance(outcomes, PenstockError):
        reply.send_error(outcomes)
        return
    decided = iter(outcomes)
    results = [
        batch_error(item) if isinstance(item, PenstockError) else result_of(item, next(decided))
        for item in items
    ]
    reply.send(200, encode_json({"results": results}))


def _produced_item(command: Produce, outcome: Message | PenstockError | None) -> Any:
    if isinstance(outcome, Message):
        return ProducedItem("produced", command.topic, outcome.partition, outcome.offset)
    if outcome is None:
        return ProducedItem("produced", command.topic, duplicate=True)
    return batch_error(outcome)


def _acked_item(_: Settle, outcome: PenstockError | None) -> Any:
    return AckedItem() if outcome is None else batch_error(outcome)
