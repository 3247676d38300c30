"""Streams and caches over plain requests: publish, the cache, messages, and what is refused."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import assert_error, new_name
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, assert_typed_error, b64
from tests.contract.stream_clients import Session


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


# -- a fresh broker, and what is not there ---------------------------------------------------------


def test_a_fresh_broker_has_a_stream_and_a_cache_to_begin_with(ns: Namespace) -> None:
    assert ns.publish("default", b"x").json() == {"type": "publish_ok"}
    assert ns.put("default", "k", b"v").status_code == 200
    assert ns.value("default", "k") == b"v"


def test_paths_that_are_none_and_methods_that_are_not_taken(ns: Namespace) -> None:
    """With the type that every answer below these paths has; elsewhere errors stay as they are."""
    client = ns.broker.client
    cache, stream = ns.cache_path("default"), ns.stream_path("default")
    for path in ("entries/a/b", "entries/a/b/c", "zap", ""):
        assert_typed_error(client.get(f"{cache}/{path}"), 404, "NOT_FOUND")
    for path in ("zap", "publish/x", "entries/k"):
        assert_typed_error(client.post(f"{stream}/{path}"), 404, "NOT_FOUND")
    for method, path, allow in [
        ("POST", f"{cache}/entries/k", "DELETE, GET, PUT"),
        ("GET", f"{stream}/publish", "POST"),
        ("GET", "/v1/felix", "POST"),
        ("HEAD", f"{stream}/subscribe", "GET"),
    ]:
        reply = client.request(method, path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allow)
        if method != "HEAD":
            assert_typed_error(reply, 405, "METHOD_NOT_ALLOWED")
    assert_error(client.get("/v1/nowhere"), 404, "NOT_FOUND")
    assert_error(client.post("/v1/produce", json={"topic": "none", "value": "v"}), 404, "NOT_FOUND")


# -- publish ---------------------------------------------------------------------------------------


def test_a_publish_is_answered_as_its_ack_says(ns: Namespace) -> None:
    """felix-10, felix-38, felix-39, felix-40"""
    stream = ns.create_stream()
    assert ns.publish(stream, b"a").json() == {"type": "publish_ok"}
    assert ns.publish(stream, b"a", request_id=7).json() == {"type": "publish_ok", "request_id": 7}
    assert ns.publish(stream, b"a", ack="none").json() == {"type": "ok"}
    assert ns.publish(stream, b"a", b"b", request_id="r").json() == {
        "type": "publish_ok",
        "count": 2,
        "request_id": "r",
    }
    each = ns.publish(stream, b"a", b"b", ack="per_message").json()
    assert each == [{"type": "publish_ok", "index": index} for index in range(2)]


def test_published_bytes_come_as_they_are(ns: Namespace) -> None:
    """felix-9, felix-86: by body, raw and as a message"""
    stream = ns.create_stream()
    everything = bytes(range(256))
    with ns.subscribe(stream) as feed:
        ns.publish(stream, b"")
        ns.broker.client.post(f"{ns.stream_path(stream)}/publish?raw=true", content=everything)
        ns.send("publish", stream=stream, payload=b64(everything * 3))
        ns.publish(stream, b"1", b"", b"3")
        assert feed.payloads(6) == [b"", everything, everything * 3, b"1", b"", b"3"]


def test_a_refused_publish_names_its_request_and_publishes_nothing(ns: Namespace) -> None:
    """felix-37, felix-40, felix-84"""
    stream = ns.create_stream()
    path = f"{ns.stream_path(stream)}/publish"
    with ns.subscribe(stream) as feed:
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({}, 400, "INVALID_ARGUMENT"),
            ({"payload": "!"}, 400, "INVALID_ARGUMENT"),
            ({"payload": "", "extra": 1}, 400, "INVALID_ARGUMENT"),
            ({"payload": "", "ack": "per_batch"}, 400, "INVALID_ARGUMENT"),
            ({"payload": "", "invalidate": ["cache:none:k"], "ack": "none"}, 404, "NOT_FOUND"),
            ({"payload": "", "invalidate": ["x"], "ack": "none"}, 400, "INVALID_ARGUMENT"),
            *(
                ({"payload": "", "invalidate": [target]}, 400, "INVALID_ARGUMENT")
                for target in ("sessions:u", "cache:", "cache:s", "cache::k", "cache:default:", 5)
            ),
            ({"payload": "", "invalidate": ["cache:default:k"] * 1001}, 413, "INVALID_ARGUMENT"),
        ]
        for members, status, code in cases:
            reply = ns.post(path, request_id="r9", **members)
            assert_typed_error(reply, status, code, "r9")
        ns.publish(stream, b"the next one")
        assert feed.payloads(1) == [b"the next one"]


@pytest.mark.parametrize("request_id", ["x" * 129, 2**63, 1.5, True, []])
def test_a_request_id_that_is_none_is_refused_and_not_echoed(
    ns: Namespace, request_id: Any
) -> None:
    assert_typed_error(ns.publish("default", b"", request_id=request_id), 400, "INVALID_ARGUMENT")
    reply = ns.post("/v1/felix", type="ping", request_id=request_id)
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_what_a_publish_invalidates_is_gone_when_it_is_acked(ns: Namespace) -> None:
    """felix-82, felix-83"""
    stream, cache = ns.create_stream(), ns.create_cache()
    ns.put(cache, "user:1", b"old")
    ns.put(cache, "user:2", b"kept")
    with ns.subscribe(stream) as feed:
        reply = ns.publish(stream, b"changed", invalidate=[f"cache:{cache}:user:1"])
        assert reply.json() == {"type": "publish_ok"}
        assert (ns.value(cache, "user:1"), ns.value(cache, "user:2")) == (None, b"kept")
        assert feed.payloads(1) == [b"changed"]


def test_payloads_and_values_over_the_limit_are_413(start_broker: StartBroker) -> None:
    """felix-132"""
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_MESSAGE_BYTES": "1000"})
    ns = Namespace(broker)
    at, over = b"x" * 1000, b"x" * 1001
    raw = f"{ns.stream_path('default')}/publish?raw=true"
    assert ns.put("default", "k", b"as it was").status_code == 200
    for reply in (
        ns.publish("default", over),
        ns.publish("default", b"", over),
        broker.client.post(raw, content=over),
        ns.put("default", "k", over),
        broker.client.put(f"{ns.entry_path('default', 'k')}?raw=true", content=over),
        ns.send("cache_txn", cache="default", ops=[{"op": "put", "key": "k", "value": b64(over)}]),
    ):
        body = assert_typed_error(reply, 413, "INVALID_ARGUMENT")
        assert "max_message_bytes is 1000" in body["message"]
    with Session(ns) as ws:
        for answer in (
            ws.call("cache_put", cache="default", key="k", value=b64(over)),
            ws.publish("default", b"small", over),
        ):
            assert answer["error"] == "INVALID_ARGUMENT"
            assert "max_message_bytes is 1000" in answer["message"]
    assert ns.value("default", "k") == b"as it was"
    assert ns.publish("default", at).status_code == 200
    assert ns.put("default", "k", at).status_code == 200
    assert ns.value("default", "k") == at


# -- the cache -------------------------------------------------------------------------------------


def test_a_value_is_read_back_with_its_version_and_what_is_left_of_its_time(ns: Namespace) -> None:
    """felix-51, felix-56, felix-58, felix-59, felix-65"""
    cache = ns.create_cache()
    assert ns.get(cache, "k") == {"type": "cache_value", "value": None, "version": 0}
    first = ns.put(cache, "k", b"\0\xff", ttl_ms=60_000, request_id=1).json()
    assert first == {"type": "ok", "version": first["version"], "request_id": 1}
    found = ns.get(cache, "k")
    assert 0 < found.pop("ttl_ms") <= 60_000
    assert found == {"type": "cache_value", "value": b64(b"\0\xff"), "version": first["version"]}
    second = ns.put(cache, "k", b"").json()
    assert second["version"] > first["version"]
    assert ns.get(cache, "k") == {"type": "cache_value", "value": "", "version": second["version"]}
    assert ns.put(cache, "k", b"x", ttl_ms=0).status_code == 200
    assert ns.value(cache, "k") is None


def test_a_raw_value_is_the_body_itself(ns: Namespace) -> None:
    cache = ns.create_cache()
    client = ns.broker.client
    path = f"{ns.entry_path(cache, 'k')}?raw=true"
    assert_typed_error(client.get(path), 404, "NOT_FOUND")
    assert (
        client.put(f"{path}&if_not_exists=true&ttl_ms=60000", content=b"\0raw").status_code == 200
    )
    reply = client.get(path)
    assert (reply.status_code, reply.content) == (200, b"\0raw")
    assert reply.headers["content-type"] == "application/octet-stream"
    version = ns.get(cache, "k")["version"]
    assert reply.headers["etag"] == f'"{version}"'
    head = client.head(path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "4")
    assert 0 < ns.get(cache, "k")["ttl_ms"] <= 60_000
    assert_typed_error(client.put(f"{path}&if_not_exists=1", content=b"x"), 409, "ALREADY_EXISTS")
    assert_typed_error(client.put(f"{path}&if_version=1", content=b"x"), 412, "FAILED_PRECONDITION")
    assert client.put(f"{path}&if_version={version}", content=b"").status_code == 200
    assert client.get(path).content == b""
    for query in ("raw=maybe", "raw=true&ttl_ms=soon", "raw=true&ttl_ms=-1"):
        reply = client.put(f"{ns.entry_path(cache, 'k')}?{query}", content=b"x")
        assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_a_raw_body_is_not_searched_for_a_request_id(ns: Namespace) -> None:
    path = f"{ns.entry_path(ns.create_cache(), 'k')}?raw=true&ttl_ms=-1"
    reply = ns.broker.client.put(path, content=b'{"request_id":"not mine"}')
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


@pytest.mark.parametrize("key", ["a/b", "a b", "ü", "%2F", "..", ".", "a?b#c", " k ", "incr", "😀"])
def test_a_key_may_be_any_text_percent_encoded(ns: Namespace, key: str) -> None:
    """And the same key by path, by message and in a list."""
    ns.put("default", key, key.encode())
    assert ns.value("default", key) == key.encode()
    by_message = ns.send("cache_get", cache="default", key=key).json()
    assert by_message["value"] == b64(key.encode())
    many = ns.post(f"{ns.cache_path('default')}/get_many", keys=[key]).json()
    assert [each["key"] for each in many["values"]] == [key]
    assert ns.broker.client.delete(ns.entry_path("default", key)).json()["deleted"] is True
    assert ns.value("default", key) is None


@pytest.mark.parametrize("part", ["%00", "%0A", "%C2%85", "%ff", "x" * 1025, "%C3%A9" * 513, ""])
def test_a_key_that_is_none_is_refused(ns: Namespace, part: str) -> None:
    """413 if it is too long, 400 otherwise."""
    path = f"{ns.cache_path('default')}/entries/"
    status = 413 if len(part) > 1000 else 400
    for reply in (
        ns.broker.client.get(path + part),
        ns.broker.client.put(path + part, json={"value": ""}),
        ns.broker.client.delete(path + part),
        ns.broker.client.post(f"{path}{part}/incr"),
    ):
        assert_typed_error(reply, status, "INVALID_ARGUMENT")
    assert ns.broker.client.get(path + "x" * 1024).status_code == 200


@pytest.mark.parametrize(
    ("kind", "members", "status", "code"),
    [
        ("cache_get", {}, 400, "INVALID_ARGUMENT"),
        ("cache_put", {"value": ""}, 400, "INVALID_ARGUMENT"),
        ("cache_put", {"key": "k", "value": "", "ttl_ms": -1}, 400, "INVALID_ARGUMENT"),
        ("cache_get_many", {"keys": ["k", ""]}, 400, "INVALID_ARGUMENT"),
        ("cache_get_many", {"keys": ["k"] * 10_001}, 400, "INVALID_ARGUMENT"),
        ("cache_incr", {"key": "big", "delta": 2**63}, 409, "FAILED_PRECONDITION"),
        ("cache_incr", {"key": "big", "delta": 10**4000}, 409, "FAILED_PRECONDITION"),
        ("cache_txn", {"ops": []}, 400, "INVALID_ARGUMENT"),
        ("cache_txn", {"ops": [{"op": "delete", "key": "k"}] * 1001}, 413, "INVALID_ARGUMENT"),
        ("cache_txn", {"ops": [{"op": "delete"}]}, 400, "INVALID_ARGUMENT"),
    ],
)
def test_cache_messages_that_cannot_be_are_refused(
    ns: Namespace, kind: str, members: dict[str, Any], status: int, code: str
) -> None:
    reply = ns.send(kind, cache="default", request_id=1, **members)
    assert_typed_error(reply, status, code, 1)


def test_names_in_paths_are_percent_encoded_too(broker: BrokerProcess) -> None:
    """felix-25, felix-66, felix-67, felix-68, felix-69"""
    tenant = new_name("ten/ant ü")
    assert broker.client.post("/v1/tenants", json={"tenant_id": tenant}).status_code == 201
    caches = []
    for namespace in ("pr/od", "stag ing"):
        there = Namespace(broker, tenant, namespace)
        parent = there.path.rpartition("/")[0]
        assert broker.client.post(parent, json={"namespace": namespace}).status_code == 201
        for cache in (there.create_cache(), there.create_cache()):
            caches.append((there, cache))
    for number, (there, cache) in enumerate(caches):
        there.put(cache, "k", b"%d" % number)
    assert [there.value(cache, "k") for there, cache in caches] == [b"0", b"1", b"2", b"3"]


def test_a_delete_says_whether_there_was_anything(ns: Namespace) -> None:
    cache = ns.create_cache()
    client, path = ns.broker.client, ns.entry_path(cache, "k")
    assert client.delete(path).json() == {"type": "ok", "version": 0, "deleted": False}
    version = ns.put(cache, "k", b"v").json()["version"]
    stale = client.delete(f"{path}?if_version={version - 1}")
    assert_typed_error(stale, 412, "FAILED_PRECONDITION")
    assert ns.value(cache, "k") == b"v"
    gone = client.delete(f"{path}?if_version={version}").json()
    assert (gone["deleted"], gone["version"] > version) == (True, True)


def test_a_put_by_version_changes_only_what_was_read(ns: Namespace) -> None:
    """felix-78"""
    cache = ns.create_cache()
    version = ns.put(cache, "k", b"1").json()["version"]
    assert ns.put(cache, "k", b"2", if_version=version).status_code == 200
    late = ns.put(cache, "k", b"3", if_version=version, request_id="late")
    assert_typed_error(late, 412, "FAILED_PRECONDITION", "late")
    assert ns.value(cache, "k") == b"2"


def test_increments_add_up_exactly(ns: Namespace) -> None:
    """felix-79, felix-133"""
    cache = ns.create_cache()
    path = f"{ns.entry_path(cache, 'n')}/incr"
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: ns.post(path).json()["number"], range(100)))
    assert sorted(numbers) == list(range(1, 101))
    down = ns.post(path, delta=-30, request_id=3).json()
    assert down == {
        "type": "cache_value",
        "value": b64(b"70"),
        "number": 70,
        "version": down["version"],
        "request_id": 3,
    }
    ns.put(cache, "n", b"no number")
    assert_typed_error(ns.post(path), 409, "FAILED_PRECONDITION")
    assert_typed_error(ns.post(path, delta=1.5), 400, "INVALID_ARGUMENT")


def test_many_keys_are_answered_in_their_order(ns: Namespace) -> None:
    cache = ns.create_cache()
    version = ns.put(cache, "b", b"B").json()["version"]
    reply = ns.post(f"{ns.cache_path(cache)}/get_many", keys=["a", "b", "b"])
    found = {"key": "b", "value": b64(b"B"), "version": version}
    assert reply.json() == {
        "type": "cache_values",
        "values": [{"key": "a", "value": None, "version": 0}, found, found],
    }


def test_a_transaction_is_done_whole_or_not_at_all(ns: Namespace) -> None:
    """felix-81"""
    cache, other = ns.create_cache(), ns.create_cache()
    version = ns.put(cache, "a", b"1").json()["version"]
    path = f"{ns.cache_path(cache)}/txn"
    ops = [
        {"op": "put", "key": "a", "value": b64(b"2"), "ttl_ms": 60_000},
        {"op": "incr", "cache": other, "key": "n", "delta": 5},
        {"op": "delete", "key": "gone"},
    ]
    failing = [{"key": "a", "version": version}, {"key": "b", "exists": True}]
    assert_typed_error(ns.post(path, checks=failing, ops=ops), 412, "FAILED_PRECONDITION")
    assert (ns.value(cache, "a"), ns.value(other, "n")) == (b"1", None)
    done = ns.post(path, checks=failing[:1], ops=ops, request_id="t").json()
    assert (done["type"], done["request_id"]) == ("ok", "t")
    assert [each.get("number") for each in done["results"]] == [None, 5, None]
    assert done["results"][2]["deleted"] is False
    assert (ns.value(cache, "a"), ns.value(other, "n")) == (b"2", b"5")


def test_reads_are_never_torn(ns: Namespace) -> None:
    """felix-53, felix-54, felix-75"""
    cache = ns.create_cache()
    values = [letter * 200_000 for letter in (b"A", b"B")]

    def write(n: int) -> None:
        assert ns.put(cache, "k", values[n % 2]).status_code == 200

    write(0)
    with ThreadPoolExecutor(6) as pool:
        writes = [pool.submit(write, n) for n in range(40)]
        reads = [pool.submit(ns.value, cache, "k") for _ in range(40)]
        assert all(read.result() in values for read in reads)
        for each in writes:
            each.result()
    assert ns.value(cache, "k") == ns.value(cache, "k")


# -- messages --------------------------------------------------------------------------------------


def test_every_message_can_be_posted(ns: Namespace) -> None:
    cache = ns.create_cache()
    at = {"cache": cache, "key": "n"}
    assert ns.post("/v1/felix", type="ping", request_id="p").json() == {
        "type": "ok",
        "request_id": "p",
    }
    assert ns.send("publish", stream="default", payload="").json() == {"type": "publish_ok"}
    batch = ns.send("publish_batch", stream="default", payloads=["", ""]).json()
    assert batch == {"type": "publish_ok", "count": 2}
    silent = ns.send("publish", stream="default", payload="", ack="none", request_id=4).json()
    assert silent == {"type": "ok", "request_id": 4}
    assert ns.send("cache_put", **at, value=b64(b"5")).json()["type"] == "ok"
    assert ns.send("cache_incr", **at, delta=2).json()["number"] == 7
    assert ns.send("cache_get", **at).json()["value"] == b64(b"7")
    assert len(ns.send("cache_get_many", cache=cache, keys=["n", "m"]).json()["values"]) == 2
    txn = ns.send("cache_txn", cache=cache, ops=[{"op": "delete", "key": "n"}]).json()
    assert txn["results"][0]["deleted"] is True
    assert ns.send("cache_delete", **at).json()["deleted"] is False


def test_a_message_that_fails_has_its_errors_status(ns: Namespace) -> None:
    """felix-85, felix-87"""
    client = ns.broker.client
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"type": "publish", "namespace": "default", "stream": "s", "payload": ""}, 400, "tenant"),
        ({"type": "poke"}, 400, "unknown type 'poke'"),
        ({"type": "subscribe", **ns.scope, "stream": "default"}, 400, "/v1/felix/ws"),
        ({"type": "cache_watch", **ns.scope, "cache": "c", "key": "k"}, 400, "watch"),
        ({"type": "lag", "subscription_id": "s1"}, 400, "/v1/felix/ws"),
        ({"type": "publish", **ns.scope, "stream": "none", "payload": ""}, 404, "none"),
        ({"type": "publish", **ns.scope, "stream": "none", "payload": "", "ack": "none"}, 404, "n"),
    ]
    for message, status, says in cases:
        reply = client.post("/v1/felix", json={**message, "request_id": 12})
        code = "NOT_FOUND" if status == 404 else "INVALID_ARGUMENT"
        assert says in assert_typed_error(reply, status, code, 12)["message"]
    for content in (b"", b"{", b"[", b"[]", b"7", b"\xff"):
        reply = client.post("/v1/felix", content=content)
        assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_an_array_is_answered_in_order_with_errors_in_their_places(ns: Namespace) -> None:
    cache = ns.create_cache()
    at = {**ns.scope, "cache": cache, "key": "k"}
    reply = ns.broker.client.post(
        "/v1/felix",
        json=[
            {"type": "cache_put", **at, "value": b64(b"v"), "request_id": "a"},
            {"type": "cache_get", **at, "extra": 1, "request_id": "b"},
            {"type": "cache_get", **at},
            {"type": "publish", **ns.scope, "stream": "none", "payload": "", "request_id": "c"},
            {"type": "publish", **ns.scope, "stream": "default", "payload": "", "ack": "none"},
            {
                "type": "publish_batch",
                **ns.scope,
                "stream": "default",
                "payloads": ["", ""],
                "ack": "per_message",
            },
            {"type": "subscribe", "request_id": "d"},
        ],
    )
    assert reply.status_code == 200, reply.text
    answers = reply.json()
    assert answers[4] is None
    assert [each["index"] for each in answers[5]] == [0, 1]
    kinds = [(answers[n]["type"], answers[n].get("request_id")) for n in (0, 1, 2, 3, 6)]
    assert kinds == [
        ("ok", "a"),
        ("error", "b"),
        ("cache_value", None),
        ("error", "c"),
        ("error", "d"),
    ]
    assert answers[2]["value"] == b64(b"v")
    assert answers[3]["error"] == "NOT_FOUND"


def test_answers_over_max_body_bytes_are_refused(start_broker: StartBroker) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_BODY_BYTES": str(2**20)})
    ns = Namespace(broker)
    ns.put("default", "k", b"x" * 500_000)
    many = ns.post(f"{ns.cache_path('default')}/get_many", keys=["k"] * 3)
    assert_typed_error(many, 413, "INVALID_ARGUMENT")
    get = {"type": "cache_get", **ns.scope, "cache": "default", "key": "k"}
    answers = broker.client.post("/v1/felix", json=[get] * 3).json()
    assert [each["type"] for each in answers] == ["cache_value", "cache_value", "error"]


def test_too_many_operations_are_refused_before_they_are_made(ns: Namespace) -> None:
    operations = [{"type": "cache_put", **ns.scope, "cache": "default", "key": "k", "value": ""}]
    reply = ns.broker.client.post("/v1/felix", content=json.dumps(operations * 10_001))
    body = assert_typed_error(reply, 400, "INVALID_ARGUMENT")
    assert "10000" in body["message"]


def test_streams_and_caches_refuse_other_sites_and_missing_tokens(
    start_broker: StartBroker,
) -> None:
    """A page of another site, and somebody without the token."""
    broker = start_broker(memory=True, env={"PENSTOCK_TOKEN": "secret"})
    ns = Namespace(broker)
    paths = [ns.entry_path("default", "k"), f"{ns.stream_path('default')}/subscribe"]
    for path in paths:
        assert_typed_error(broker.client.get(path), 401, "UNAUTHENTICATED")
        headers = {"authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
        assert_typed_error(broker.client.get(path, headers=headers), 403, "PERMISSION_DENIED")
    known = {"authorization": "Bearer secret"}
    assert broker.client.get(paths[0], headers=known).status_code == 200
    with socket.create_connection(("127.0.0.1", broker.port)) as line:
        line.sendall(
            b"PUT %b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
            b"content-length: 99999999999\r\n\r\n" % paths[0].encode()
        )
        answer = line.makefile("rb").read()
    assert b" 413 " in answer.splitlines()[0]
    assert b'"type":"error"' in answer


def test_streams_and_caches_are_measured(start_broker: StartBroker) -> None:
    """felix-131"""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    with ns.subscribe("default") as feed:
        ns.publish("default", b"a", b"b")
        feed.payloads(2)
        shown = broker.client.get("/metrics").text
    ns.put("default", "k", b"v")
    ns.get("default", "k")
    ns.get("default", "m")
    shown += broker.client.get("/metrics").text
    stream = '{namespace="default",stream="default",tenant_id="default"}'
    cache = '{cache="default",namespace="default",tenant_id="default"}'
    for line in (
        f"penstock_stream_published_total{stream} 2.0",
        f"penstock_stream_delivered_total{stream} 2.0",
        f"penstock_stream_subscribers{stream} 1.0",
        f"penstock_cache_hits_total{cache} 1.0",
        f"penstock_cache_misses_total{cache} 1.0",
        f"penstock_cache_entries{cache} 1.0",
    ):
        assert line in shown, line


def test_a_request_id_of_the_header_is_echoed_there_and_only_there(ns: Namespace) -> None:
    reply = ns.broker.client.get(ns.entry_path("none", "k"), headers={"x-request-id": "header-1"})
    assert reply.headers["x-request-id"] == "header-1"
    assert_typed_error(reply, 404, "NOT_FOUND")


def test_a_later_read_never_shows_an_earlier_version(ns: Namespace) -> None:
    """felix-52"""
    cache = ns.create_cache()
    with ThreadPoolExecutor(1) as pool, ns.broker.new_client() as session:
        writing = pool.submit(lambda: [ns.put(cache, "k", b"%d" % n) for n in range(100)])
        seen = []
        while not writing.done():
            seen.append(session.get(ns.entry_path(cache, "k")).json()["version"])
    assert seen == sorted(seen)
    assert len(set(seen)) > 1
