"""What several contract tests look for in an answer, and names no two tests share."""

from __future__ import annotations

import itertools

import httpx

from tests.broker_process import BrokerProcess

_numbers = itertools.count(1)


def new_name(stem: str = "t") -> str:
    """A name no other test of the session uses."""
    return f"{stem}-{next(_numbers)}"


def assert_error(reply: httpx.Response, status: int, code: str) -> None:
    """The status, and the common error body: exactly a code and a text for people."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    body = reply.json()
    assert set(body) == {"error", "message"}, body
    assert body["error"] == code, body
    assert isinstance(body["message"], str), body
    assert body["message"].strip(), body
    assert reply.headers["content-type"].startswith("application/json"), reply.headers
    assert "Traceback" not in body["message"], body


def assert_invalid(reply: httpx.Response) -> None:
    assert_error(reply, 400, "INVALID_ARGUMENT")


def assert_not_found(reply: httpx.Response) -> None:
    assert_error(reply, 404, "NOT_FOUND")


def assert_refused(reply: httpx.Response) -> None:
    """409: the state does not allow it."""
    assert_error(reply, 409, "FAILED_PRECONDITION")


def assert_done(reply: httpx.Response) -> None:
    """204, and no byte of a body."""
    assert reply.status_code == 204, (reply.status_code, reply.text)
    assert reply.content == b""


def assert_overloaded(reply: httpx.Response, limit: str) -> None:
    assert reply.status_code == 429, (reply.status_code, reply.text)
    body = reply.json()
    assert set(body) == {"error", "message", "reason", "retry_after_ms", "limit"}, body
    assert body["error"] == "RESOURCE_EXHAUSTED"
    assert body["reason"] == "overloaded"
    assert body["limit"] == limit
    assert isinstance(body["retry_after_ms"], int)
    assert body["retry_after_ms"] > 0
    assert int(reply.headers["retry-after"]) * 1000 >= body["retry_after_ms"]
    assert body["message"]


def assert_nothing_stored(broker: BrokerProcess, topic: str) -> None:
    """The next message is the topic's first, so a refused one before it left nothing."""
    broker.put(topic, "the next one")
    with broker.consume(topic, group=new_name("audit")) as stream:
        item = stream.next()
    assert (item.offset, item.value) == (0, "the next one")
