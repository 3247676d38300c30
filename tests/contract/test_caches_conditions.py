"""If-Match and If-None-Match of cache entries, the ETags they name, and what the query may say."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.namespaces import Namespace, assert_typed_error, unb64


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture
def url(ns: Namespace) -> str:
    return ns.entry_path(ns.create_cache(), "k")


def etag_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.headers["etag"]


def put(ns: Namespace, url: str, value: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return ns.broker.client.put(url, json={"value": value}, headers=named)


def value(ns: Namespace, url: str) -> bytes | None:
    text = ns.broker.client.get(url).json()["value"]
    return None if text is None else unb64(text)


def test_an_entrys_etag_is_its_version_in_quotes(ns: Namespace, url: str) -> None:
    client = ns.broker.client
    assert "etag" not in client.get(url).headers
    made = put(ns, url, "MQ==")
    etag = f'"{made.json()["version"]}"'
    assert etag_of(made) == etag_of(client.get(url)) == etag
    assert etag_of(client.get(url, params={"raw": "true"})) == etag
    assert etag_of(client.put(f"{url}?raw=true", content=b"2")) != etag
    assert "etag" not in client.delete(url).headers
    counted = client.post(f"{url}/incr")
    assert etag_of(counted) == f'"{counted.json()["version"]}"' == etag_of(client.get(url))


def test_unknown_query_parameters_are_ignored(ns: Namespace, url: str) -> None:
    client, more = ns.broker.client, {"unknown": "1", "key": ""}
    assert client.put(url, params=more, json={"value": "MQ=="}).status_code == 200
    assert client.put(url, params=more | {"raw": "true"}, content=b"2").status_code == 200
    assert client.get(url, params=more).json()["value"] == "Mg=="
    assert client.post(f"{url}/incr", params=more).json()["number"] == 3
    assert client.delete(url, params=more).json()["deleted"] is True


def test_if_match_changes_that_version_only(ns: Namespace, url: str) -> None:
    """felix-78: else 412, and nothing has changed."""
    first = etag_of(put(ns, url, "MQ=="))
    second = etag_of(put(ns, url, "Mg==", if_match=first))
    for stale in (first, f"{first}, {first}", '"0"', '"x"', '""', '"01"', f"W/{second}"):
        assert_typed_error(put(ns, url, "Mw==", if_match=stale), 412, "FAILED_PRECONDITION")
        deleted = ns.broker.client.delete(url, headers={"If-Match": stale})
        assert_typed_error(deleted, 412, "FAILED_PRECONDITION")
        counted = ns.broker.client.post(f"{url}/incr", headers={"If-Match": stale})
        assert_typed_error(counted, 412, "FAILED_PRECONDITION")
    assert value(ns, url) == b"2"
    third = etag_of(put(ns, url, "Mw==", if_match=f'"x", {second} ,W/"7"'))
    assert ns.broker.client.delete(url, headers={"If-Match": third}).json()["deleted"] is True
    assert value(ns, url) is None


def test_if_match_of_anything_needs_a_value(ns: Namespace, url: str) -> None:
    """felix-78"""
    refused = put(ns, url, "MQ==", if_match="*")
    error = assert_typed_error(refused, 412, "FAILED_PRECONDITION")
    assert error["message"] == "key 'k' has no value, and If-Match asks for one"
    gone = ns.broker.client.delete(url, headers={"If-Match": "*"})
    assert_typed_error(gone, 412, "FAILED_PRECONDITION")
    put(ns, url, "MQ==")
    assert put(ns, url, "Mg==", if_match="*").status_code == 200
    assert ns.broker.client.delete(url, headers={"If-Match": "*"}).status_code == 200


def test_if_none_match_of_anything_creates_only(ns: Namespace, url: str) -> None:
    """felix-77: 412 for a value that is there, which stays."""
    made = put(ns, url, "MQ==", if_none_match="*")
    assert made.status_code == 200
    assert_typed_error(put(ns, url, "Mg==", if_none_match="*"), 412, "FAILED_PRECONDITION")
    same = put(ns, url, "Mg==", if_none_match=etag_of(made))
    assert_typed_error(same, 412, "FAILED_PRECONDITION")
    gone = ns.broker.client.delete(url, headers={"If-None-Match": "*"})
    assert_typed_error(gone, 412, "FAILED_PRECONDITION")
    assert value(ns, url) == b"1"
    assert put(ns, url, "Mg==", if_none_match='"x"').status_code == 200


@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
@pytest.mark.parametrize("text", ["17", '"17', '*, "17"', '"17" "18"', "", ",", 'w/"17"', '"a"b"'])
def test_a_condition_that_is_none_is_400(ns: Namespace, url: str, header: str, text: str) -> None:
    put(ns, url, "MQ==")
    client = ns.broker.client
    for reply in (
        client.put(url, json={"value": "Mg=="}, headers={header: text}),
        client.delete(url, headers={header: text}),
        client.get(url, headers={header: text}),
    ):
        assert header in assert_typed_error(reply, 400, "INVALID_ARGUMENT")["message"]
    assert value(ns, url) == b"1"


def test_a_condition_of_the_header_and_one_of_the_body_must_both_hold(
    ns: Namespace, url: str
) -> None:
    """felix-77, 78"""
    client = ns.broker.client
    first = put(ns, url, "MQ==")
    version, etag = first.json()["version"], etag_of(first)
    wrong = client.put(url, json={"value": "Mg==", "if_version": 1}, headers={"If-Match": etag})
    assert_typed_error(wrong, 412, "FAILED_PRECONDITION")
    wrong = client.put(
        f"{url}?raw=true&if_version={version}", content=b"2", headers={"If-Match": '"1"'}
    )
    assert_typed_error(wrong, 412, "FAILED_PRECONDITION")
    wrong = client.delete(f"{url}?if_version=1", headers={"If-Match": etag})
    assert_typed_error(wrong, 412, "FAILED_PRECONDITION")
    wrong = client.put(
        url, json={"value": "Mg==", "if_not_exists": True}, headers={"If-Match": etag}
    )
    assert_typed_error(wrong, 409, "ALREADY_EXISTS")
    assert value(ns, url) == b"1"
    both = client.delete(f"{url}?if_version={version}", headers={"If-Match": etag})
    assert both.json()["deleted"] is True


@pytest.mark.parametrize("raw", ["", "raw=false&"])
@pytest.mark.parametrize("name", ["if_version", "ttl_ms", "if_not_exists", "request_id"])
def test_what_only_a_raw_put_has_in_its_query_is_refused_beside_json(
    ns: Namespace, url: str, name: str, raw: str
) -> None:
    put(ns, url, "MQ==")
    reply = ns.broker.client.put(f"{url}?{raw}{name}=1", json={"value": "Mg=="})
    assert (reply.status_code, reply.json()["error"]) == (400, "INVALID_ARGUMENT")
    assert name in reply.json()["message"]
    assert "raw=true" in reply.json()["message"]
    assert value(ns, url) == b"1"


@pytest.mark.parametrize("name", ["ack", "invalidate", "request_id"])
def test_what_only_a_raw_publish_has_in_its_query_is_refused_beside_json(
    ns: Namespace, name: str
) -> None:
    url = f"{ns.stream_path(ns.create_stream())}/publish"
    reply = ns.broker.client.post(f"{url}?{name}=none", json={"payload": "MQ=="})
    assert (reply.status_code, reply.json()["error"]) == (400, "INVALID_ARGUMENT")
    assert name in reply.json()["message"]


def test_a_value_that_the_client_has_is_304(ns: Namespace, url: str) -> None:
    client = ns.broker.client
    etag = etag_of(put(ns, url, "MQ=="))
    for known in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        for query in ("", "?raw=true"):
            reply = client.get(url + query, headers={"If-None-Match": known})
            assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", etag)
            assert "content-length" not in reply.headers
    assert client.get(url, headers={"If-None-Match": '"1"'}).status_code == 200
    stale = client.get(url, headers={"If-Match": '"1"'})
    assert_typed_error(stale, 412, "FAILED_PRECONDITION")
    assert client.get(url, headers={"If-Match": etag}).status_code == 200
    client.delete(url)
    assert client.get(url, headers={"If-None-Match": "*"}).json()["version"] == 0


def test_a_condition_holds_for_the_same_bytes_sent_again(ns: Namespace, url: str) -> None:
    """A head that the broker has seen before means what it meant: only the first one creates."""
    body = b'{"value":"MQ=="}'
    head = f"PUT {url} HTTP/1.1\r\nhost: 127.0.0.1:{ns.broker.port}\r\nif-none-match: *\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", ns.broker.port), 10) as connection:
        statuses = []
        for _ in range(4):
            connection.sendall(request)
            answer = b""
            while b"}" not in answer:
                answer += connection.recv(65536)
            statuses.append(answer.split(b" ", 2)[1])
    assert statuses == [b"200", b"412", b"412", b"412"]


# -- what the query says of a body that is bare bytes --------------------------------------------


def test_a_raw_publish_takes_the_rest_from_the_query(ns: Namespace) -> None:
    """felix-37, 39, 40, 82"""
    stream, cache = ns.create_stream(), ns.create_cache()
    raw = f"{ns.stream_path(stream)}/publish?raw=true"
    client = ns.broker.client
    assert client.post(raw, content=b"x").json() == {"type": "publish_ok"}
    named = client.post(f"{raw}&request_id=mine&ack=per_message", content=b"x")
    assert named.json() == {"type": "publish_ok", "request_id": "mine"}
    quiet = client.post(f"{raw}&ack=none&request_id=q", content=b"x")
    assert quiet.json() == {"type": "ok", "request_id": "q"}
    for key in ("a", "b,c", "d:e"):
        ns.put(cache, key, b"1")
    params = {"invalidate": [f"cache:{cache}:a", f"cache:{cache}:b,c"]}
    with ns.subscribe(stream) as feed:
        reply = client.post(raw, content=b"\x00raw", params={"raw": "true", **params})
        assert reply.json() == {"type": "publish_ok"}
        assert feed.payloads(1) == [b"\x00raw"]
    assert [ns.value(cache, key) for key in ("a", "b,c", "d:e")] == [None, None, b"1"]


def test_a_raw_publish_that_is_wrong_says_which_it_was(ns: Namespace) -> None:
    """felix-40, 84: and nothing is published."""
    stream = ns.create_stream()
    raw = f"{ns.stream_path(stream)}/publish?raw=true&request_id=mine"
    with ns.subscribe(stream) as feed:
        for query in ("ack=perhaps", "ack=per_batch", "ack=", "invalidate=sessions"):
            reply = ns.broker.client.post(f"{raw}&{query}", content=b"x")
            assert_typed_error(reply, 400, "INVALID_ARGUMENT", "mine")
        missing = ns.broker.client.post(f"{raw}&invalidate=cache:none:k", content=b"x")
        assert_typed_error(missing, 404, "NOT_FOUND", "mine")
        too_long = ns.broker.client.post(f"{raw.replace('mine', 'x' * 129)}", content=b"x")
        assert_typed_error(too_long, 400, "INVALID_ARGUMENT")
        ns.publish(stream, b"only this")
        assert feed.payloads(1) == [b"only this"]


def test_a_raw_put_echoes_its_request_id(ns: Namespace, url: str) -> None:
    """felix-40"""
    made = ns.broker.client.put(f"{url}?raw=true&request_id=r", content=b"1")
    assert made.json()["request_id"] == "r"
    refused = ns.broker.client.put(f"{url}?raw=true&request_id=r&if_version=1", content=b"1")
    assert_typed_error(refused, 412, "FAILED_PRECONDITION", "r")


def test_a_repeated_include_adds_up(ns: Namespace) -> None:
    """felix-80"""
    cache = ns.create_cache(max_entries=1)
    with (
        ns.watch(cache, "prefix=&include=expire&include=evict") as both,
        ns.watch(cache, "prefix=&include=expire") as one,
    ):
        ns.put(cache, "a", b"1")
        ns.put(cache, "b", b"1", ttl_ms=0)
        ns.value(cache, "b")
        ns.put(cache, "c", b"1")
        seen = [item.members["event"] for item in both.take(5, 10.0)]
        assert sorted(seen) == ["evict", "expire", "put", "put", "put"]
        kinds = [item.members["event"] for item in one.take(4, 10.0)]
        assert sorted(kinds) == ["expire", "put", "put", "put"]
