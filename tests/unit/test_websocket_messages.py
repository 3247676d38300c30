"""Messages of streams and caches: decoded strictly, refused clearly, performed, answered."""

from __future__ import annotations

import base64
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.api.streams import EventBatch, EventRun
from penstock.model.caching import CacheValue, Delete, Increment, Put, Txn, WatchEvent, Written
from penstock.model.errors import InvalidArgument, NotFound, PenstockError, TooLarge
from penstock.model.limits import Limits
from penstock.model.streams import Publish
from penstock.server.commands import path_of, watch_of
from penstock.server.http.responses import typed_error
from penstock.server.message_actions import perform
from penstock.server.websocket.answers import Ok, PublishOk, Value
from penstock.server.websocket.arrays import encode_outcomes, perform_all
from penstock.server.websocket.decoding import (
    ListDecoder,
    decode_many,
    decode_one,
    is_array,
    request_id_of,
)
from penstock.server.websocket.events import EventLines, encode_runs, encode_singly, encode_watch
from penstock.server.websocket.messages import Message, RefusedMessage

SCOPE = {"tenant_id": "acme", "namespace": "prod"}
LIMITS = Limits(max_message_bytes=100, max_body_bytes=1000)


class FakePart:
    """Remembers what it was asked, and answers as it was told to."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.asked: list[Any] = []

    def publish(self, command: Publish, done: Any) -> None:
        self.asked.append(command)
        done(self.outcome)

    put = delete = increment = transact = publish

    def get(self, path: Any, key: str, done: Any) -> None:
        self.asked.append((path, key))
        done(self.outcome)

    def get_many(self, path: Any, keys: list[str], done: Any) -> None:
        self.asked.append((path, keys))
        done([self.outcome] * len(keys))


def engine_with(outcome: Any = None) -> Any:
    part = FakePart(outcome)
    return SimpleNamespace(streams=part, caches=part, limits=LIMITS, asked=part.asked)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(kind: str, **members: Any) -> Message | RefusedMessage:
    return decode_one(json.dumps({"type": kind, **members}).encode())


def performed(engine: Any, kind: str, **members: Any) -> Any:
    outcomes: list[Any] = []
    perform(engine, decoded(kind, **members), outcomes.append)
    assert len(outcomes) == 1
    return outcomes[0]


def refusal(kind: str, **members: Any) -> str:
    outcome = performed(engine_with(), kind, **members)
    assert isinstance(outcome, PenstockError), outcome
    return outcome.message


def as_json(answer: Any) -> Any:
    return json.loads(msgspec.json.encode(answer))


# -- decoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"nonsense", "invalid JSON"),
        (b"", "invalid JSON"),
        (b"[1]", "expected `object`"),
        (b"{}", "type is required"),
        (b'{"type":"poke"}', "unknown type 'poke'"),
        (b'{"type":"ping","extra":1}', "unknown member 'extra'"),
        (b'{"type":"publish","payload":"???"}', "payload is not base64"),
        (b'{"type":"publish","payload":"QQ"}', "payload is not base64"),
        (b'{"type":"publish","payload":"Q_=="}', "payload is not base64"),
        (b'{"type":"publish","payload":5}', "payload: expected"),
        (b'{"type":"publish","ack":"per_batch"}', "ack: invalid enum value"),
        (b'{"type":"cache_put","ttl_ms":1.5}', "ttl_ms: expected"),
        (b'{"type":"ping","request_id":true}', "request_id: expected"),
        (b'{"type":"ping","request_id":"' + b"x" * 129 + b'"}', "request_id is a text"),
        (b'{"type":"ping","request_id":9223372036854775808}', "request_id is a text"),
        (b'{"type":"' + b"x" * 5000 + b'"}', "unknown type"),
    ],
)
def test_what_is_no_message_is_refused_with_what_is_wrong(text: bytes, message: str) -> None:
    refused = decode_one(text)
    assert isinstance(refused, RefusedMessage)
    assert isinstance(refused.error, InvalidArgument)
    assert message in refused.error.message
    assert len(refused.error.message) <= 300


def test_a_refused_message_keeps_its_request_id() -> None:
    """felix-40"""
    refused = decoded("publish", request_id="r1", extra=1)
    assert isinstance(refused, RefusedMessage)
    assert refused.request_id == "r1"
    assert request_id_of(b'{"request_id":7,"any":{"thing":[]}}') == 7
    assert request_id_of(b'{"request_id":true}') is None
    assert request_id_of(b"nonsense") is None


def test_null_means_absent() -> None:
    message = decoded("publish", **SCOPE, stream="s", payload="", ack=None, request_id=None)
    assert not isinstance(message, RefusedMessage)
    assert message.request_id is None


def test_an_array_keeps_the_place_of_what_is_wrong_in_it() -> None:
    text = b' [{"type":"ping"},{"type":"poke","request_id":2},7,{"type":"ping","request_id":3}]'
    assert is_array(text)
    found = decode_many(text)
    assert [isinstance(each, RefusedMessage) for each in found] == [False, True, True, False]
    assert [each.request_id for each in found] == [None, 2, None, 3]


@pytest.mark.parametrize("text", [b"[", b"[]", b"{}", b'[{"type":"ping"}'])
def test_what_is_no_array_is_refused_as_a_whole(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        decode_many(text)


@pytest.mark.parametrize("item", [b"0", b'{"type":"ping"}', b" " * 200 + b"0"])
def test_an_array_has_at_most_10000_operations(item: bytes) -> None:
    """However large the body is."""
    with pytest.raises(InvalidArgument, match="10000"):
        decode_many(b"[" + b",".join([item] * 10_001) + b"]")


# -- performing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("publish", {"stream": "s", "payload": ""}),
        ("publish_batch", {"stream": "s", "payloads": [""]}),
        ("cache_put", {"cache": "c", "key": "k", "value": ""}),
        ("cache_get", {"cache": "c", "key": "k"}),
        ("cache_get_many", {"cache": "c", "keys": ["k"]}),
        ("cache_delete", {"cache": "c", "key": "k"}),
        ("cache_incr", {"cache": "c", "key": "k"}),
        ("cache_txn", {"cache": "c", "ops": [{"op": "delete", "key": "k"}]}),
    ],
)
def test_every_operation_needs_tenant_namespace_and_name(
    kind: str, members: dict[str, Any]
) -> None:
    """felix-85: and has no effect without them."""
    name = "stream" if "stream" in members else "cache"
    for missing in ("tenant_id", "namespace", name):
        engine = engine_with()
        rest = {k: v for k, v in (SCOPE | members).items() if k != missing}
        outcome = performed(engine, kind, **rest)
        assert isinstance(outcome, InvalidArgument)
        assert outcome.message == f"{missing} is required"
        assert engine.asked == []


def test_a_publish_reaches_the_engine_whole_and_is_answered_by_its_ack() -> None:
    """felix-37, felix-39, felix-40"""
    for ack, answer in [
        (None, PublishOk(request_id=5)),
        ("per_message", PublishOk(request_id=5)),
        ("none", None),
    ]:
        engine = engine_with()
        outcome = performed(
            engine, "publish", **SCOPE, stream="s", payload=b64(b"\0\xff"), ack=ack,
            request_id=5, invalidate=["cache:sessions:user:1"],
        )  # fmt: skip
        assert outcome == answer
        assert engine.asked == [
            Publish(
                path=("acme", "prod", "s"),
                payloads=[b"\0\xff"],
                invalidate=[("sessions", "user:1")],
            )
        ]


def test_lists_are_bounded_and_say_which_item_is_wrong() -> None:
    batch = SCOPE | {"stream": "s"}
    assert "payloads is required" in refusal("publish_batch", **batch, payloads=None)
    assert "10000" in refusal("publish_batch", **batch, payloads=[""] * 10_001)
    large = [b64(b"x" * 300)] * 10_001
    assert "10000" in refusal("publish_batch", **batch, payloads=large)
    assert refusal("publish_batch", **batch, payloads=["", "x"]) == "payloads[1] is not base64"


def test_a_large_list_is_counted_before_anything_is_made_of_it() -> None:
    text = b"[" + b'"",' * 2_000_000 + b'""]'
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="10000"):
            ListDecoder(bytes).decode(text, "payloads")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20, peak


def test_cache_commands_are_made_of_their_messages() -> None:
    path = ("acme", "prod", "c")
    engine = engine_with(Written(3))
    on_key = SCOPE | {"cache": "c", "key": "k"}
    performed(engine, "cache_put", **on_key, value="", ttl_ms=0, if_not_exists=True, if_version=2)
    performed(engine, "cache_delete", **on_key, if_version=4)
    performed(engine, "cache_incr", **on_key, delta=-2, ttl_ms=5)
    performed(engine, "cache_incr", **on_key)
    assert engine.asked == [
        Put(path, "k", b"", 0, True, 2),
        Delete(path, "k", 4),
        Increment(path, "k", -2, 5),
        Increment(path, "k", 1, None),
    ]


def test_cache_answers_have_the_members_of_the_wire() -> None:
    """felix-56, felix-62"""
    on_key = SCOPE | {"cache": "c", "key": "k", "request_id": 1}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("cache_get", None, {"type": "cache_value", "value": None, "version": 0}),
        (
            "cache_get",
            CacheValue(b"", 7, 50),
            {"type": "cache_value", "value": "", "version": 7, "ttl_ms": 50},
        ),
        ("cache_delete", Written(0, False), {"type": "ok", "version": 0, "deleted": False}),
        (
            "cache_incr",
            Written(9, number=0),
            {"type": "cache_value", "value": b64(b"0"), "number": 0, "version": 9},
        ),
    ]
    for kind, outcome, answer in cases:
        found = as_json(performed(engine_with(outcome), kind, **on_key))
        assert found == answer | {"request_id": 1}
    put = as_json(performed(engine_with(Written(4)), "cache_put", **on_key, value="QQ=="))
    assert put == {"type": "ok", "version": 4, "request_id": 1}


@pytest.mark.parametrize(
    ("kind", "members", "message"),
    [
        ("cache_put", {"key": "k"}, "value is required"),
        (
            "cache_put",
            {"key": "k", "value": "", "ttl_ms": -1},
            "ttl_ms must be a whole number, 0 to",
        ),
        (
            "cache_put",
            {"key": "k", "value": "", "if_version": -1},
            "if_version must be a whole number, 0",
        ),
        ("cache_get_many", {}, "keys is required"),
        ("cache_get_many", {"keys": ["k"] * 10_001}, "keys has more than 10000"),
        ("cache_txn", {}, "ops is required"),
        ("cache_txn", {"ops": [{"op": "zap", "key": "k"}]}, "ops[0].op"),
        ("cache_txn", {"ops": [{"op": "put", "key": "k"}]}, "value is required"),
        (
            "cache_txn",
            {"ops": [{"op": "delete", "key": "k"}], "checks": [{"key": "k"}]},
            "either version or exists",
        ),
    ],
)
def test_what_a_cache_message_may_not_say(kind: str, members: dict[str, Any], message: str) -> None:
    assert message in refusal(kind, **SCOPE, cache="c", **members)


def test_a_transaction_may_name_other_caches_of_its_namespace() -> None:
    """felix-81"""
    engine = engine_with([Written(1), Written(2, True), Written(3, number=4)])
    answer = performed(
        engine,
        "cache_txn",
        **SCOPE,
        cache="c",
        checks=[{"key": "a", "version": 0}, {"cache": "d", "key": "a", "exists": True}],
        ops=[
            {"op": "put", "key": "a", "value": "QQ=="},
            {"op": "delete", "cache": "d", "key": "b"},
            {"op": "incr", "key": "n", "delta": 4},
        ],
    )
    (command,) = engine.asked
    assert isinstance(command, Txn)
    assert [check.path[2] for check in command.checks] == ["c", "d"]
    assert [op.path for op in command.ops] == [("acme", "prod", name) for name in "cdc"]
    assert as_json(answer)["results"] == [
        {"version": 1},
        {"version": 2, "deleted": True},
        {"version": 3, "number": 4},
    ]


def test_what_needs_a_connection_says_where_to_go() -> None:
    for kind in ("subscribe", "unsubscribe", "lag", "cache_watch", "cache_unwatch"):
        assert "/v1/felix/ws" in refusal(kind)


def test_ping_is_answered() -> None:
    assert performed(engine_with(), "ping", request_id="p") == Ok(request_id="p")


def test_many_values_are_refused_when_together_they_are_too_large() -> None:
    """A short request must not make an answer of any size."""
    engine = engine_with(CacheValue(b"x" * 100, 1))
    many = SCOPE | {"cache": "c"}
    fits = performed(engine, "cache_get_many", **many, keys=["k"] * 10)
    assert len(as_json(fits)["values"]) == 10
    assert isinstance(performed(engine, "cache_get_many", **many, keys=["k"] * 11), TooLarge)


# -- arrays ----------------------------------------------------------------------------------------


def test_an_array_is_answered_in_order_once_all_are_done() -> None:
    held: list[Any] = []
    done: list[Any] = []
    messages = decode_many(b'[{"type":"ping"},{"type":"ping","request_id":1},{"type":"x"}]')
    perform_all(messages, lambda message, take: held.append(take), done.append)
    held[2](NotFound("c"))
    held[0]("a")
    assert done == []
    held[1](None)
    (outcomes,) = done
    text = encode_outcomes(messages, outcomes, lambda _, error: typed_error(error), 100)
    assert json.loads(text) == [
        "a",
        None,
        {"type": "error", "error": "NOT_FOUND", "message": "c"},
    ]


def test_values_of_an_array_beyond_what_an_answer_may_hold_are_refused() -> None:
    messages = [decoded("ping")] * 3
    outcomes = [Value(b"x" * 60, 1), Value(b"x" * 60, 2), Value(b"x" * 40, 3)]
    text = encode_outcomes(messages, outcomes, lambda _, error: typed_error(error), 100)
    assert [each["type"] for each in json.loads(text)] == ["cache_value", "error", "cache_value"]


# -- names -----------------------------------------------------------------------------------------


def test_names_are_trimmed_and_keys_are_not() -> None:
    assert path_of(" acme ", "prod", "s\t", "stream") == ("acme", "prod", "s")
    assert path_of("acme", "prod", "s", "stream") == ("acme", "prod", "s")
    engine = engine_with()
    performed(engine, "cache_get", tenant_id=" acme", namespace="prod ", cache="c", key=" k ")
    assert engine.asked == [(("acme", "prod", "c"), " k ")]


def test_a_watch_is_of_a_key_or_a_prefix() -> None:
    path = ("a", "b", "c")
    assert watch_of(path, None, "", [], None).prefix == ""
    assert watch_of(path, "k", None, ["evict"], 3).include == {"evict"}
    for bad in [(None, None, []), ("k", "p", []), ("k", None, ["put"]), (None, "\n", [])]:
        with pytest.raises(InvalidArgument):
            watch_of(path, *bad, None)


# -- events ----------------------------------------------------------------------------------------


def run(payloads: list[bytes], start: int = 0, end: int | None = None) -> EventRun:
    return EventRun(EventBatch(payloads), start, len(payloads) if end is None else end, 0)


def test_one_event_is_an_event_and_several_are_a_batch() -> None:
    """felix-9, felix-13"""
    assert json.loads(encode_runs("s1", [run([b"\0,\xff"])])) == {
        "type": "event",
        "subscription_id": "s1",
        "payload": b64(b"\0,\xff"),
    }
    runs = [run([b"a", b""]), run([b"b", b"c", b"d"], 1, 2), run([b"e"])]
    assert json.loads(encode_runs("s2", runs)) == {
        "type": "event_batch",
        "subscription_id": "s2",
        "payloads": [b64(each) for each in (b"a", b"", b"c", b"e")],
    }


def test_events_one_by_one_are_the_same_events() -> None:
    """felix-14"""
    runs = [run([b"a", b""]), run([b"b", b"c", b"d"], 1, 2)]
    events = [
        {"type": "event", "subscription_id": "s2", "payload": b64(each)}
        for each in (b"a", b"", b"c")
    ]
    assert [json.loads(each) for each in encode_singly("s2", runs)] == events
    lines = EventLines("s2", b"data: ", b"\n\n").encode(runs)
    assert lines.endswith(b"\n\n")
    texts = lines.removesuffix(b"\n\n").split(b"\n\n")
    assert all(text.startswith(b"data: ") for text in texts)
    assert [json.loads(text.removeprefix(b"data: ")) for text in texts] == events


def test_a_batch_is_encoded_once_for_all_who_have_it_whole() -> None:
    whole = run([b"a", b"b"])
    encode_runs("s1", [whole])
    shared = whole.batch.encoded["json"]
    whole.batch.payloads = [b"x", b"y"]
    assert shared in encode_runs("s2", [whole])
    part = EventRun(whole.batch, 1, 2, 1)
    assert json.loads(encode_runs("s3", [part]))["payload"] == b64(b"y")


def test_cache_events_have_the_members_of_the_wire() -> None:
    """felix-80"""
    events = [
        WatchEvent("put", 4, "k", b""),
        WatchEvent("delete", 5, "k"),
        WatchEvent("gap", 9, from_version=5),
    ]
    assert [json.loads(each) for each in encode_watch("w1", events)] == [
        {"type": "cache_event", "watch_id": "w1", "event": "put", "version": 4, "key": "k",
         "value": ""},
        {"type": "cache_event", "watch_id": "w1", "event": "delete", "version": 5, "key": "k"},
        {"type": "cache_event", "watch_id": "w1", "event": "gap", "version": 9,
         "from_version": 5, "to_version": 9},
    ]  # fmt: skip
