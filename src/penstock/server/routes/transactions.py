"""Transactions: the endpoint that does several operations together, all or none of them.

The operations themselves are in `transaction_operations`.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec

from penstock.api.transactions import TransactionCommand
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_TXN_OPS
from penstock.model.names import clean_name
from penstock.model.scopes import full_name
from penstock.model.transactions import OperationResult
from penstock.server.access import Open
from penstock.server.batches import SMALL_BODY_BYTES
from penstock.server.commands import is_absent
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body
from penstock.server.members import Name, StrictBody, decoded_later, limits, optional, required
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.transaction_operations import (
    OperationBody,
    TransactionItem,
    check_operation,
    item_of,
    operation_of,
)
from penstock.server.websocket.decoding import ListDecoder, explain
from penstock.server.websocket.messages import ABSENT

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_Operations = Annotated[list[OperationBody], limits(minItems=1, maxItems=MAX_TXN_OPS)]


class TransactionBody(StrictBody):
    operations: Annotated[
        msgspec.Raw,
        required("1 to 1,000 operations, done in this order."),
        decoded_later(_Operations),
    ] = ABSENT
    transaction_id: Annotated[
        Name | None,
        optional(
            "A new name for each transaction, of 1 to 200 bytes. If the same request comes again, "
            "it is answered like the first, and nothing is done twice."
        ),
    ] = None


class CommittedTransaction(msgspec.Struct):
    status: str
    results: list[TransactionItem]


class _WholeBody(StrictBody):
    """A body of ordinary size, decoded in one go."""

    operations: list[OperationBody]
    transaction_id: str | None = None


_whole = msgspec.json.Decoder(_WholeBody)
_bodies = msgspec.json.Decoder(TransactionBody)
_lists = ListDecoder(OperationBody)
_raws = ListDecoder(msgspec.Raw)
_one: msgspec.json.Decoder[OperationBody] = msgspec.json.Decoder(OperationBody)
_NAMES = ", ".join(str(body.__struct_config__.tag) for body in get_args(OperationBody))


def commit(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    bodies, transaction_id = decode_transaction(request.body)
    scope = request.notes.scope
    if not bodies:
        # Before its id is looked up: whoever may do nothing must not learn which ids were used.
        raise InvalidArgument("a transaction needs at least one operation")
    command = TransactionCommand([operation_of(scope, *each) for each in enumerate(bodies)])
    if request.notes.principal is not None:
        for index, operation in enumerate(command.operations):
            check_operation(dispatch.engine.access, request.notes, index, operation)
    if transaction_id is not None:
        name = clean_name(transaction_id, "transaction_id")
        command.transaction_id = full_name(scope, name)
        # Members in another order, or spaces, make another transaction: clients repeat the bytes.
        command.fingerprint = hashlib.blake2b(request.body, digest_size=8).digest()
    answer = partial(_committed, bodies)
    dispatch.engine.transactions.commit(
        command, lambda outcome: send_outcome(reply, outcome, 200, answer)
    )


def decode_transaction(data: bytes) -> tuple[list[OperationBody], str | None]:
    """Returns the operations and the id. Tries to decode all in one go, which is fast; a body that
    is large or wrong is decoded in steps, which tell what is wrong with it."""
    if len(data) <= SMALL_BODY_BYTES:
        try:
            whole = _whole.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
        else:
            if len(whole.operations) <= MAX_BATCH_ITEMS:
                return whole.operations, whole.transaction_id
    return decode_in_steps(data)


def decode_in_steps(data: bytes) -> tuple[list[OperationBody], str | None]:
    body = decode_body(_bodies, data)
    return _operations(body.operations), body.transaction_id


def _operations(raw: msgspec.Raw) -> list[OperationBody]:
    if is_absent(raw):
        raise InvalidArgument("operations is required")
    try:
        return _lists.decode(raw, "operations")
    except InvalidArgument:
        # Some operation is wrong: find out which.
        for index, each in enumerate(_raws.decode(raw, "operations")):
            try:
                _one.decode(each)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                is_unknown = str(error).endswith("`$.op`")
                text = f"op must be one of {_NAMES}" if is_unknown else explain(error)
                raise InvalidArgument(text).at_operation(index) from error
        raise


def _committed(bodies: list[OperationBody], results: list[OperationResult]) -> CommittedTransaction:
    items = [item_of(body, result) for body, result in zip(bodies, results, strict=True)]
    return CommittedTransaction("committed", items)


_DELIVERY = {
    "topic": "orders",
    "group": "billing",
    "partition": 0,
    "offset": 12,
    "owner": "w1",
    "delivery_id": "2-1",
}

ENDPOINTS = (
    Endpoint(
        route="POST /v1/transactions",
        handler=commit,
        access=Open("each operation is checked by itself"),
        reads_scope=("tenant", "namespace"),
        tag="Transactions",
        summary="Run operations together",
        text="Does all operations, in order, or none of them, also across a crash. If one is "
        "refused, the answer is its error, and operation is its index. An ack of a message or an "
        "event that is done already is refused here, so that its results are produced once.",
        body=TransactionBody,
        example={
            "transaction_id": "w1-000017",
            "operations": [
                {"op": "produce", "topic": "invoices", "key": "user-1", "value": "17 EUR"},
                {"op": "ack", **_DELIVERY},
                {"op": "cache_incr", "cache": "totals", "key": "invoices"},
            ],
        },
        answers={
            200: Answer(
                "All of it is done. A result per operation, in order.",
                CommittedTransaction,
                {
                    "status": "committed",
                    "results": [
                        {"status": "produced", "topic": "invoices", "partition": 0, "offset": 4},
                        {"status": "acked"},
                        {"status": "incremented", "version": 1_767_225_600_000_001, "number": 5},
                    ],
                },
            )
        },
        errors=(400, 404, 409, 412, 413, 429, 503),
    ),
)
