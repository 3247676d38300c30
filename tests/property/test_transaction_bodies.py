"""The fast way to decode a transaction's body, against the one in steps, with random bodies."""

from __future__ import annotations

import json
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.errors import PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS
from penstock.server.routes.transaction_operations import OperationBody
from penstock.server.routes.transactions import decode_in_steps, decode_transaction

TEXTS = st.sampled_from(["", "orders", "k", " t ", "YQ==", "not base64!", "é", "\u0000"])
NUMBERS = st.sampled_from([0, 1, -1, 12, 2**63, 2**70, 1.5, 1e400])
VALUES = st.one_of(TEXTS, NUMBERS, st.booleans(), st.none(), st.just([]), st.just({}))
TAGS = [body.__struct_config__.tag for body in get_args(OperationBody)]
OPS = st.sampled_from([*TAGS, "unknown"])
MEMBERS = [
    "topic",
    "group",
    "owner",
    "partition",
    "offset",
    "key",
    "value",
    "reason",
    "delay_ms",
    "dead",
    "stream",
    "name",
    "delivery_id",
    "payloads",
    "producer_id",
    "sequence",
    "cache",
    "ttl_ms",
    "if_version",
    "delta",
    "envelope",
    "result",
    "tenant_id",
    "wrong",
]
RIGHT: dict[str, dict[str, Any]] = {
    "produce": {"topic": "orders", "key": "k", "value": "v"},
    "ack": {"topic": "orders", "group": "g", "partition": 0, "offset": 3, "owner": "w"},
    "event_ack": {"stream": "s", "name": "n", "owner": "w", "offset": 3},
    "publish": {"stream": "s", "payloads": ["YQ==", ""]},
    "cache_incr": {"cache": "c", "key": "k", "delta": 2},
}


@st.composite
def operations(draw: st.DrawFn) -> Any:
    """Mostly right ones, some with a member changed, some made up."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(VALUES)
    if kind < 7:
        op = draw(st.sampled_from(sorted(RIGHT)))
        members = {"op": op, **RIGHT[op]}
    else:
        members = {"op": draw(OPS)}
    if kind > 5:
        members |= draw(st.dictionaries(st.sampled_from(MEMBERS), VALUES, max_size=3))
    return members


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    members: dict[str, Any] = {}
    if draw(st.integers(0, 19)):
        members["operations"] = draw(st.lists(operations(), max_size=4))
    if draw(st.booleans()):
        members["transaction_id"] = draw(st.one_of(TEXTS, VALUES))
    if not draw(st.integers(0, 19)):
        members[draw(TEXTS)] = draw(VALUES)
    data = json.dumps(members).encode()
    if not draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data


@given(bodies())
def test_a_body_means_the_same_however_it_is_decoded(data: bytes) -> None:
    assert _decoded(decode_transaction, data) == _decoded(decode_in_steps, data)


def test_too_many_operations_are_refused_alike() -> None:
    data = json.dumps({"operations": [{"op": "ack"}] * (MAX_BATCH_ITEMS + 1)}).encode()
    found = _decoded(decode_transaction, data)
    assert found == _decoded(decode_in_steps, data)
    assert f"more than {MAX_BATCH_ITEMS} items" in found


def _decoded(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except PenstockError as error:
        return f"{type(error).__name__} {error.operation} {error}"
