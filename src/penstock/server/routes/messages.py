"""The data plane: produce, ack, nack, release, extend, one a request or in batches."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.api.messages import Produce, ProduceOutcome, Settle, SettleOutcome
from penstock.model.errors import PenstockError
from penstock.model.limits import MAX_REASON_BYTES
from penstock.model.records import Message
from penstock.server.batches import BatchDecoder
from penstock.server.forms import ack_body_of, lease_of, produce_body_of, produce_of, settle_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body, truth, whole_number
from penstock.server.http.responses import JSON_TYPE, batch_error, encode_json
from penstock.server.wire import AckBody, ExtendBody, NackBody, ProduceBody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.server.http.response_order import Reply

Body = TypeVar("Body")
Command = TypeVar("Command")
Outcome = TypeVar("Outcome")

_produce_decoder = msgspec.json.Decoder(ProduceBody)
_ack_decoder = msgspec.json.Decoder(AckBody)
_nack_decoder = msgspec.json.Decoder(NackBody)
_extend_decoder = msgspec.json.Decoder(ExtendBody)
_produce_batches = BatchDecoder(ProduceBody)
_ack_batches = BatchDecoder(AckBody)


class Produced(msgspec.Struct, gc=False):
    status: str
    topic: str


class ProducedItem(msgspec.Struct, omit_defaults=True, gc=False):
    """A duplicate has no place of its own: partition and offset are left out."""

    status: str
    topic: str
    partition: int = -1
    offset: int = -1
    duplicate: bool = False


class AckedItem(msgspec.Struct, gc=False):
    status: str = "acked"


class ReleasedItem(msgspec.Struct, gc=False):
    status: str = "released"


_ACKED = AckedItem()
_RELEASED = ReleasedItem()

# Clients of the contract compare the whole body of a produce, so its place is told in headers.
_PLACE = JSON_TYPE + b"penstock-partition: %d\r\npenstock-offset: %d\r\n"
_DUPLICATE = JSON_TYPE + b"penstock-duplicate: true\r\n"


def produce(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_produce_decoder, request.body)
    else:
        body = produce_body_of(request.params())
    command = produce_of(body)
    hub.engine.produce(command, partial(_produced, reply, command.topic))


def _produced(reply: Reply, topic: str, outcome: ProduceOutcome) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    elif outcome is None:
        reply.send(200, _produced_body(topic), _DUPLICATE)
    else:
        reply.send(200, _produced_body(topic), _PLACE % (outcome.partition, outcome.offset))


@lru_cache(1024)
def _produced_body(topic: str) -> bytes:
    return encode_json(Produced("produced", topic))


def ack(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.ack(_settled(request), reply.settle)


def release(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.release(_settled(request), reply.settle)


def _settled(request: Request) -> Settle:
    """The delivery that is named, and nothing else."""
    if request.body:
        body = decode_body(_ack_decoder, request.body)
    else:
        body = msgspec.convert(ack_body_of(request.params()), AckBody)
    return settle_of(body)


def nack(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_nack_decoder, request.body)
    else:
        params = request.params()
        named = {
            **ack_body_of(params),
            "reason": params.get("reason"),
            "delay_ms": whole_number(params, "delay_ms"),
            "dead": truth(params, "dead"),
        }
        body = msgspec.convert(named, NackBody)
    hub.engine.nack(
        settle_of(body),
        clean_reason(body.reason),
        reply.settle,
        delay_ms=body.delay_ms,
        dead=bool(body.dead),
    )


def extend(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_extend_decoder, request.body)
    else:
        params = request.params()
        lease_ms = whole_number(params, "lease_ms")
        body = msgspec.convert({**ack_body_of(params), "lease_ms": lease_ms}, ExtendBody)
    lease = lease_of(body.lease_ms, hub.engine.limits.lease_ms)
    hub.engine.extend(settle_of(body), lease, reply.settle)


def produce_batch(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    commands, refused = _commands(_produce_batches.decode(request.body), produce_of)
    results_of = partial(map, _produced_item, commands)
    hub.engine.produce_many(commands, partial(_send_results, reply, refused, results_of))


def ack_batch(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    commands, refused = _commands(_ack_batches.decode(request.body), settle_of)
    results_of = partial(map, partial(_settled_item, _ACKED))
    hub.engine.ack_many(commands, partial(_send_results, reply, refused, results_of))


def release_batch(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    commands, refused = _commands(_ack_batches.decode(request.body), settle_of)
    results_of = partial(map, partial(_settled_item, _RELEASED))
    hub.engine.release_many(commands, partial(_send_results, reply, refused, results_of))


def clean_reason(raw: str | None) -> str:
    """Trimmed, and cut to what is worth keeping in memory."""
    text = (raw or "").strip()
    if len(text) * 4 > MAX_REASON_BYTES:
        text = text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return text


def _commands(
    items: list[Body | PenstockError], command_of: Callable[[Body], Command]
) -> tuple[list[Command], dict[int, PenstockError]]:
    """The commands, and by its place whatever is none."""
    commands: list[Command] = []
    refused: dict[int, PenstockError] = {}
    for place, item in enumerate(items):
        try:
            if isinstance(item, PenstockError):
                raise item
            commands.append(command_of(item))
        except PenstockError as error:
            refused[place] = error
    return commands, refused


def _send_results(
    reply: Reply,
    refused: dict[int, PenstockError],
    results_of: Callable[[list[Outcome]], Iterator[Any]],
    outcomes: list[Outcome] | PenstockError,
) -> None:
    if isinstance(outcomes, PenstockError):
        reply.send_error(outcomes)
        return
    results = list(results_of(outcomes))
    if refused:
        decided = iter(results)
        results = [
            batch_error(refused[place]) if place in refused else next(decided)
            for place in range(len(results) + len(refused))
        ]
    reply.send(200, encode_json({"results": results}))


def _produced_item(command: Produce, outcome: ProduceOutcome) -> Any:
    if isinstance(outcome, Message):
        return ProducedItem("produced", command.topic, outcome.partition, outcome.offset)
    if outcome is None:
        return ProducedItem("produced", command.topic, duplicate=True)
    return batch_error(outcome)


def _settled_item(success: Any, outcome: SettleOutcome) -> Any:
    return success if outcome is None else batch_error(outcome)
