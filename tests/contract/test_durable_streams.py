"""Durable streams over HTTP and the WebSocket: acks, starts, numbers, and what a restart keeps."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Feed, Namespace, assert_typed_error, b64, unb64
from tests.websocket import BINARY, NoFrame, WebSocket

SCOPE = {"tenant_id": "default", "namespace": "default"}
ODD = [b"", b"\xff\xfe\x00", bytes(range(256)), b"plain, with a comma"]


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


def settle(ns: Namespace, stream: str, how: str, feed: Feed, item: Any, **more: Any) -> Any:
    body = {
        "name": feed.first["name"],
        "owner": feed.first["owner"],
        "offset": item["offset"],
        "delivery_id": item["delivery_id"],
    }
    return ns.post(f"{ns.stream_path(stream)}/{how}", **(body | more))


def test_the_documents_own_example_works(ns: Namespace) -> None:
    """felix-118, 122, 125."""
    for body in (
        {"name": "orders", "delivery": "at_least_once", "retention": "7d"},
        {"name": "transactions", "delivery": "exactly_once", "retention": "30d"},
    ):
        reply = ns.post(f"{ns.path}/streams", **body)
        assert reply.status_code == 201, reply.text
        found = reply.json()
        assert (found["delivery"], found["durable"]) == (body["delivery"], True)
        assert found["retention"] == body["retention"]
    plain = ns.broker.client.get(ns.stream_path("default")).json()
    assert plain["delivery"] == "at_most_once"


def test_a_named_subscription_survives_a_restart(start_broker: StartBroker) -> None:
    """felix-109, 110, 118, 119: what was acked does not come again, what was not does."""
    broker = start_broker()
    ns = Namespace(broker)
    stream = ns.create_stream(delivery="at_least_once")
    with ns.subscribe(stream, "name=billing") as feed:
        assert feed.first["name"] == "billing"
        offsets = [ns.publish(stream, event).json()["offset"] for event in ODD]
        assert offsets == [0, 1, 2, 3]
        items = [item.members for item in feed.take(4)]
        assert [unb64(item["payload"]) for item in items] == ODD
        for item in items[:2]:
            assert settle(ns, stream, "ack", feed, item).status_code == 204
    broker.kill()
    broker.start()
    ns = Namespace(broker)
    assert ns.publish(stream, b"later").json()["offset"] == 4
    with ns.subscribe(stream, "name=billing&owner=w2") as feed:
        items = sorted((item.members for item in feed.take(3)), key=lambda item: item["offset"])
        found = [(item["offset"], item["attempt"], unb64(item["payload"])) for item in items]
        assert found == [(2, 2, ODD[2]), (3, 2, ODD[3]), (4, 1, b"later")]
    with ns.subscribe(stream, "start=earliest") as replay:
        assert replay.payloads(5) == [*ODD, b"later"]


def test_acks_are_checked(ns: Namespace) -> None:
    """felix-119, 121."""
    stream = ns.create_stream(delivery="at_least_once")
    with ns.subscribe(stream, "name=billing&owner=w1&lease_ms=60000") as feed:
        ns.publish(stream, b"a", b"b")
        a, b = (item.members for item in feed.take(2))
        listed = ns.broker.client.get(f"{ns.stream_path(stream)}/subscriptions").json()
        assert listed["named"] == [
            {
                "name": "billing",
                "subscribers": 1,
                "next_offset": 2,
                "unacked": 2,
                "messages_behind": 2,
            }
        ]
        other = settle(ns, stream, "ack", feed, a, owner="w2")
        assert_typed_error(other, 409, "FAILED_PRECONDITION")
        assert settle(ns, stream, "extend", feed, a, lease_ms=90_000).status_code == 204
        assert settle(ns, stream, "nack", feed, a, reason="no", delay_ms=0).status_code == 204
        again = feed.next().members
        assert (again["offset"], again["attempt"], again["last_error"]) == (0, 2, "no")
        late = settle(ns, stream, "ack", feed, a)
        assert_typed_error(late, 409, "FAILED_PRECONDITION")
        assert settle(ns, stream, "ack", feed, again).status_code == 204
        assert settle(ns, stream, "ack", feed, again).status_code == 204
        assert settle(ns, stream, "ack", feed, b).status_code == 204
    gone = ns.broker.client.delete(f"{ns.stream_path(stream)}/subscriptions/billing")
    assert gone.status_code == 204
    unknown = settle(ns, stream, "ack", feed, b)
    assert_typed_error(unknown, 409, "FAILED_PRECONDITION")


def test_named_subscriptions_are_measured(ns: Namespace) -> None:
    """felix-131"""
    stream = ns.create_stream(delivery="at_least_once")
    with ns.subscribe(stream, "name=billing") as feed:
        ns.publish(stream, b"a", b"b", b"c")
        items = [item.members for item in feed.take(3)]
        assert settle(ns, stream, "ack", feed, items[0]).status_code == 204
        shown = ns.broker.client.get("/metrics").text
    of = f'namespace="default",stream="{stream}"'
    tenant = 'tenant_id="default"'
    for line in (
        f"penstock_stream_delivered_total{{{of},{tenant}}} 3.0",
        f'penstock_subscription_lag{{{of},subscription="billing",{tenant}}} 2.0',
        f'penstock_subscription_unacked{{{of},subscription="billing",{tenant}}} 2.0',
    ):
        assert line in shown, line


def test_errors_of_streams_speak_of_subscriptions(ns: Namespace) -> None:
    """Neither of groups nor of topics, which users of streams have not met."""
    stream = ns.create_stream(delivery="at_least_once")
    path = ns.stream_path(stream)
    body = {"name": "audti", "owner": "w", "offset": 0}
    for how in ("ack", "nack", "extend"):
        unknown = ns.post(f"{path}/{how}", **body)
        assert_typed_error(unknown, 409, "FAILED_PRECONDITION")
        assert unknown.json()["message"].startswith(f"no subscription 'audti' of stream '{stream}'")
    gone = ns.broker.client.delete(f"{path}/subscriptions/audti")
    assert gone.status_code == 404
    assert gone.json()["message"].startswith("no subscription 'audti' of stream")
    with ns.subscribe(stream, "name=audit&owner=w") as feed:
        for how in ("ack", "nack", "extend"):
            early = ns.post(f"{path}/{how}", **body | {"name": "audit", "offset": 7})
            assert early.json()["message"] == "this event was never delivered to the subscription"
        assert ns.broker.client.delete(f"{path}/subscriptions/audit").status_code == 204
        assert feed.next().members["message"] == "subscription 'audit' was deleted"


def test_a_full_durable_stream_speaks_of_events(start_broker: StartBroker) -> None:
    ns = Namespace(start_broker("--max-partition-msgs", "1"))
    stream = ns.create_stream(delivery="at_least_once")
    with ns.subscribe(stream, "name=audit"):
        ns.publish(stream, b"a")
        refused = ns.publish(stream, b"b")
    assert refused.status_code == 429
    assert refused.json()["message"].startswith("the stream holds 1 unfinished events; ")


@pytest.mark.parametrize("member", [{"owner": "w"}, {"lease_ms": 5000}, {"prefetch": 2}])
def test_members_of_named_subscriptions_need_a_name(ns: Namespace, member: dict[str, Any]) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    ((what, value),) = member.items()
    for start in ("", "&start=0"):
        refused = ns.broker.client.get(f"{ns.stream_path(stream)}/subscribe?{what}={value}{start}")
        assert_typed_error(refused, 400, "INVALID_ARGUMENT")
        assert f"{what} needs a name" in refused.json()["message"]
    with WebSocket(ns.broker.port) as ws:
        at = {"tenant_id": "default", "namespace": ns.path.split("/")[-1], "stream": stream}
        answer = ws.ask({"type": "subscribe", **at, **member})
        assert answer["error"] == "INVALID_ARGUMENT"
        assert f"{what} needs a name" in answer["message"]
    with ns.subscribe(stream, "nmae=x") as feed:
        assert "name" not in feed.first


def test_starts_over_http(ns: Namespace) -> None:
    """felix-126: an offset out of range is an error, over the WebSocket one of its own type."""
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, b"a", b"b", b"c")
    with ns.subscribe(stream, "start=1") as feed:
        assert [item.members["offset"] for item in feed.take(2)] == [1, 2]
    with ns.subscribe(stream, "start=2026-01-01T00:00:00Z&name=since") as feed:
        assert feed.payloads(3) == [b"a", b"b", b"c"]
    path = f"{ns.stream_path(stream)}/subscribe"
    client = ns.broker.client
    assert_typed_error(client.get(f"{path}?start=4"), 416, "OUT_OF_RANGE")
    assert_typed_error(client.get(f"{path}?start=yesterday"), 400, "INVALID_ARGUMENT")
    with WebSocket(ns.broker.port) as ws:
        message = {"type": "subscribe", **SCOPE, "stream": stream, "start": 4, "request_id": 7}
        reply = ws.ask(message)
        assert (reply["type"], reply["error"], reply["request_id"]) == (
            "subscribe_cursor_error",
            "OUT_OF_RANGE",
            7,
        )


def test_a_start_that_retention_has_passed_is_410_everywhere(ns: Namespace) -> None:
    """felix-126: as lines, as server-sent events, and over the WebSocket."""
    stream = ns.create_stream(delivery="at_least_once", retention_bytes=1000)
    path = f"{ns.stream_path(stream)}/subscribe"
    client = ns.broker.client
    ns.publish(stream, *(b"x" * 200 for _ in range(50)))

    def status() -> int:
        with client.stream("GET", f"{path}?start=0") as reply:
            return reply.status_code

    eventually(lambda: status() == 410)
    # A Last-Event-ID of 0 asks for the event after it.
    for reply in (
        client.get(f"{path}?start=0"),
        client.get(f"{path}?start=0&name=new&owner=w"),
        client.get(f"{path}?start=0&format=sse"),
        client.get(f"{path}?format=sse", headers={"Last-Event-ID": "0"}),
    ):
        assert_typed_error(reply, 410, "OUT_OF_RANGE")
        assert "kept" in reply.json()["message"]
    for name in ({}, {"name": "new", "owner": "w"}):
        with WebSocket(ns.broker.port) as ws:
            message = {"type": "subscribe", **SCOPE, "stream": stream, "start": 0, **name}
            reply = ws.ask(message | {"request_id": 7})
            assert (reply["type"], reply["error"], reply["request_id"]) == (
                "subscribe_cursor_error",
                "OUT_OF_RANGE",
                7,
            )
            # The connection and a start that is kept still work.
            assert ws.ask(message | {"start": "earliest"})["type"] == "subscribed"
            assert ws.receive()["type"] in ("event", "event_batch")


def test_a_browser_resumes_behind_the_last_event_it_saw(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, b"a", b"b", b"c")
    url = f"{ns.stream_path(stream)}/subscribe?format=sse"
    with ns.broker.client.stream("GET", url, headers={"Last-Event-ID": "0"}) as reply:
        assert reply.status_code == 200
        text = ""
        for piece in reply.iter_text():
            text += piece
            if text.count("id: ") == 2:
                break
    assert "-1\nevent: event\ndata: " in text
    assert f'"offset":2,"payload":"{b64(b"c")}"' in text
    refused = ns.broker.client.get(url, headers={"Last-Event-ID": "x"})
    assert_typed_error(refused, 400, "INVALID_ARGUMENT")


def test_events_are_acked_over_the_websocket(ns: Namespace) -> None:
    """felix-119: and plain subscribers of the same connection see offsets too."""
    stream = ns.create_stream(delivery="at_least_once")
    at = {**SCOPE, "stream": stream}
    with WebSocket(ns.broker.port) as ws:
        named = ws.ask({"type": "subscribe", **at, "name": "billing", "lease_ms": 60_000})
        assert (named["type"], named["name"]) == ("subscribed", "billing")
        ns.publish(stream, b"a", b"b")
        a, _ = ws.receive_all(2)
        assert (a["offset"], a["attempt"], unb64(a["payload"])) == (0, 1, b"a")
        this = {"subscription_id": named["subscription_id"]}
        ack = {"type": "event_ack", **this, "offset": 0, "delivery_id": a["delivery_id"]}
        assert ws.ask(ack) == {"type": "ok"}
        nack = {"type": "event_nack", **this, "offset": 1, "reason": "no", "delay_ms": 0}
        ws.send(nack)
        frames = ws.receive_all(2)
        again = next(frame for frame in frames if frame["type"] == "event")
        assert (again["offset"], again["attempt"], again["last_error"]) == (1, 2, "no")
        replay = ws.ask({"type": "subscribe", **at, "start": "earliest"})
        batch = ws.receive()
        assert batch == {
            "type": "event_batch",
            "subscription_id": replay["subscription_id"],
            "offset": 0,
            "payloads": [b64(b"a"), b64(b"b")],
        }
        wrong = ws.ask({"type": "event_ack", "subscription_id": replay["subscription_id"]})
        assert (wrong["type"], wrong["error"]) == ("error", "INVALID_ARGUMENT")
        assert ws.ask({"type": "unsubscribe", **this}) == {"type": "ok"}


def test_a_released_event_comes_again_at_its_place_without_an_attempt(ns: Namespace) -> None:
    """driftq-28: for events, over HTTP and over the WebSocket."""
    stream = ns.create_stream(delivery="at_least_once")
    url = ns.stream_path(stream)
    ns.publish(stream, b"a", b"b", b"c")
    with WebSocket(ns.broker.port) as ws:
        join = {"type": "subscribe", **SCOPE, "stream": stream, "name": "n", "owner": "w"}
        named = ws.ask({**join, "start": "earliest", "lease_ms": 60_000})
        events = ws.receive_all(3)
        bodies = [
            {
                "name": "n",
                "owner": "w",
                "offset": each["offset"],
                "delivery_id": each["delivery_id"],
            }
            for each in events
        ]
        release = {"type": "event_release", "subscription_id": named["subscription_id"]}
        assert ws.ask({**release, "offset": 7})["error"] == "FAILED_PRECONDITION"
        assert ws.ask({"type": "unsubscribe", "subscription_id": named["subscription_id"]})
    others = [{**bodies[1], "owner": "other"}, bodies[1], bodies[1]]
    results = ns.broker.client.post(f"{url}/release_batch", json=others).json()["results"]
    assert [each.get("status", each.get("code")) for each in results] == [409, "released", 409]
    assert ns.broker.client.post(f"{url}/release", json=bodies[0]).status_code == 204
    assert ns.broker.client.post(f"{url}/release", json=bodies[0]).status_code == 409
    with WebSocket(ns.broker.port) as ws:
        named = ws.ask({**join, "lease_ms": 60_000})
        again = ws.receive_all(2)
        assert [(each["offset"], each["attempt"]) for each in again] == [(0, 1), (1, 1)]
        release = {"type": "event_release", "subscription_id": named["subscription_id"]}
        ws.send({**release, "offset": 0, "delivery_id": again[0]["delivery_id"]})
        frames = ws.receive_all(2)
        assert {"type": "ok"} in frames
        event = next(each for each in frames if each["type"] == "event")
        assert (event["offset"], event["attempt"]) == (0, 1)


def test_unsubscribing_gives_back_the_events_that_had_not_left(ns: Namespace) -> None:
    """Nobody reads the connection, so that most of what was delivered waits in the broker."""
    stream = ns.create_stream(delivery="at_least_once")
    join = {"type": "subscribe", **SCOPE, "stream": stream, "name": "n", "lease_ms": 60_000}
    with WebSocket(ns.broker.port) as ws:
        subscribed = ws.ask({**join, "start": "earliest"})["subscription_id"]
        for _ in range(40):
            ns.publish(stream, bytes(400_000))
        ws.send({"type": "unsubscribe", "subscription_id": subscribed})
        received = []
        while (frame := ws.receive())["type"] == "event":
            received.append(frame["offset"])
        assert len(received) < 40
        ws.ask(join)
        event = ws.receive()
        assert (event["offset"], event["attempt"]) == (len(received), 1)


def test_a_lease_is_extended_over_the_websocket(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    at = {**SCOPE, "stream": stream}
    with WebSocket(ns.broker.port) as ws:
        named = ws.ask({"type": "subscribe", **at, "name": "n", "lease_ms": 500})
        ns.publish(stream, b"a")
        event = ws.receive()
        extend = {"type": "event_extend", "subscription_id": named["subscription_id"]}
        extend |= {"offset": 0, "delivery_id": event["delivery_id"]}
        assert ws.ask({**extend, "lease_ms": 60_000}) == {"type": "ok"}
        assert ws.ask({**extend, "lease_ms": -1})["error"] == "INVALID_ARGUMENT"
        assert ws.ask({**extend, "offset": 7})["error"] == "FAILED_PRECONDITION"
        with pytest.raises(NoFrame):
            ws.receive(timeout_s=1.5)


@pytest.mark.parametrize("how", [{"start": "earliest"}, {"name": "n"}, {}], ids=str)
def test_a_paused_subscription_gets_nothing_until_it_is_resumed(
    ns: Namespace, how: dict[str, str]
) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    with WebSocket(ns.broker.port) as ws:
        opened = ws.ask({"type": "subscribe", **SCOPE, "stream": stream, "batch": False, **how})
        this = {"subscription_id": opened["subscription_id"]}
        for _ in range(3):
            assert ws.ask({"type": "pause", **this}) == {"type": "ok"}
        ns.publish(stream, b"a", b"b")
        with pytest.raises(NoFrame):
            ws.receive(timeout_s=0.5)
        assert ws.ask({"type": "ping"}) == {"type": "ok"}
        ws.send({"type": "resume", **this})
        ws.send({"type": "resume", **this})
        frames = ws.receive_all(4)
        assert [each["offset"] for each in frames if each["type"] == "event"] == [0, 1]
        ns.publish(stream, b"c")
        assert ws.receive()["offset"] == 2
        assert ws.ask({"type": "pause", "subscription_id": "s0"})["error"] == "NOT_FOUND"


def test_a_paused_name_leaves_its_events_to_others(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    message = {"type": "subscribe", **SCOPE, "stream": stream, "name": "n"}
    with WebSocket(ns.broker.port) as paused, WebSocket(ns.broker.port) as other:
        opened = paused.ask(message)
        paused.ask({"type": "pause", "subscription_id": opened["subscription_id"]})
        other.ask(message)
        ns.publish(stream, b"a", b"b", b"c")
        assert [each["offset"] for each in other.receive_all(3)] == [0, 1, 2]


def test_a_confirmation_has_the_offset_of_the_first_event(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, b"a", b"b")
    with WebSocket(ns.broker.port) as ws:
        ask = {"type": "subscribe", **SCOPE, "stream": stream}
        for start, offset in ((None, 2), ("latest", 2), ("earliest", 0), (1, 1)):
            assert ws.ask({**ask, "start": start})["offset"] == offset
            ws.receive() if offset < 2 else None
        gone = ws.ask({**ask, "start": 3})
        assert (gone["type"], gone["code"]) == ("subscribe_cursor_error", 416)
        assert "offset" not in ws.ask({**ask, "stream": ns.create_stream()})


def test_binary_frames_have_offsets(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, *ODD)
    with WebSocket(ns.broker.port, subprotocol="felix.v1+binary") as ws:
        message = {"type": "subscribe", **SCOPE, "stream": stream, "start": 1}
        subscribed = ws.ask(message)
        opcode, data = ws.receive_frame()
        assert opcode == BINARY
        kind, number, offset, count = struct.unpack_from("<BIQI", data)
        assert (kind, f"s{number}", offset, count) == (3, subscribed["subscription_id"], 1, 3)
        at, found = 17, []
        for _ in range(count):
            (size,) = struct.unpack_from("<I", data, at)
            found.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        assert (found, at) == (ODD[1:], len(data))


def test_numbered_publishes_are_stored_once(start_broker: StartBroker) -> None:
    """felix-122: a gap is refused, a repeat gets its first answer, also after a crash."""
    broker = start_broker()
    ns = Namespace(broker)
    stream = ns.create_stream(delivery="exactly_once")

    def publish(sequence: int | None, *payloads: bytes, producer: str | None = "p1") -> Any:
        return ns.publish(stream, *payloads, producer_id=producer, sequence=sequence)

    assert_typed_error(publish(None, b"a", producer=None), 400, "INVALID_ARGUMENT")
    assert_typed_error(publish(None, b"a"), 400, "INVALID_ARGUMENT")
    assert publish(0, b"a").json()["offset"] == 0
    gap = assert_typed_error(publish(2, b"c"), 409, "FAILED_PRECONDITION")
    assert "1 is expected" in gap["message"]
    assert publish(1, b"b", b"c").json() == {"type": "publish_ok", "count": 2, "offset": 1}
    broker.kill()
    broker.start()
    ns = Namespace(broker)
    assert publish(1, b"b", b"c").json() == {"type": "publish_ok", "count": 2, "offset": 1}
    assert publish(0, b"a").json()["offset"] == 0
    assert publish(0, b"x", producer="p2").json()["offset"] == 3
    raw = f"{ns.stream_path(stream)}/publish?raw=true&producer_id=p1&sequence=2"
    assert broker.client.post(raw, content=b"d").json()["offset"] == 4
    with ns.subscribe(stream, "start=earliest") as feed:
        assert feed.payloads(5) == [b"a", b"b", b"c", b"x", b"d"]


def test_a_broker_in_memory_refuses_durable_streams(start_broker: StartBroker) -> None:
    """felix-120."""
    ns = Namespace(start_broker(memory=True))
    reply = ns.post(f"{ns.path}/streams", name="orders", delivery="at_least_once")
    body = assert_typed_error(reply, 409, "FAILED_PRECONDITION")
    assert "would be lost" in body["message"]


def test_streams_are_no_topics(ns: Namespace) -> None:
    """The topic behind a stream is hidden from the calls on topics."""
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, b"a")
    client = ns.broker.client
    assert "\x1e" not in client.get("/v1/topics").text
    assert stream not in client.get("/v1/topics").text
    assert stream not in client.get("/v1/offsets").text
    assert 'topic="\x1e' not in client.get("/metrics").text
    name = "%1Edefault%1Fdefault%1F" + stream
    assert client.get(f"/v1/topics/{name}").status_code == 400
    produced = client.post(
        "/v1/produce", json={"topic": f"\x1edefault\x1fdefault\x1f{stream}", "value": "v"}
    )
    assert produced.status_code == 400
