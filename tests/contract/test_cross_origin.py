"""Pages of other origins: those in allowed_origins may read every answer, no other may."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from penstock.server.openapi import build_document
from tests.broker_process import BrokerProcess
from tests.contract.namespaces import Namespace

PAGE = "https://page.example"
TOKEN = "s3cret-Token_0123456789"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SUBSCRIBE = "/v1/tenants/default/namespaces/default/streams/default/subscribe?format=sse"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    env = {"PENSTOCK_ALLOWED_ORIGINS": f"{PAGE},https://other.example", "PENSTOCK_TOKEN": TOKEN}
    with BrokerProcess(None, env=env) as process:
        yield process
        assert "Traceback" not in process.stderr()


def assert_readable(reply: httpx.Response, origin: str = PAGE) -> None:
    """By the page's script, with its credentials and with what it needs of the headers."""
    assert reply.headers.get_list("access-control-allow-origin") == [origin]
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert "etag" in reply.headers["access-control-expose-headers"]
    assert "origin" in reply.headers["vary"].lower()


ANSWERS = [
    ("GET", "/v1/topics", 200),
    ("GET", "/v1/nothing", 404),
    ("DELETE", "/v1/produce", 405),
    ("POST", "/v1/produce", 400),
    ("GET", "/v1/tenants/nobody", 404),
    ("GET", "/v1/tenants/default/namespaces/default/caches/default/entries/k", 200),
    ("POST", "/v1/felix", 400),
    ("GET", "/v1/healthz", 200),
    ("GET", "/metrics", 200),
    ("GET", "/docs/openapi.json", 200),
    ("GET", "/docs/nothing", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), ANSWERS)
@pytest.mark.parametrize("origin", [PAGE, "https://other.example"])
def test_an_allowed_page_reads_every_answer_and_error(
    broker: BrokerProcess, method: str, path: str, status: int, origin: str
) -> None:
    for _ in range(3):
        reply = broker.client.request(method, path, headers={"Origin": origin, **BEARER})
        assert reply.status_code == status
        assert_readable(reply, origin)


def test_an_allowed_page_reads_every_header_that_the_api_documents(broker: BrokerProcess) -> None:
    document = build_document()
    operations = [each for path in document["paths"].values() for each in path.values()]
    answers = [answer for each in operations for answer in each["responses"].values()]
    answers += document["components"]["responses"].values()
    documented = {name.lower() for answer in answers for name in answer.get("headers", {})}
    assert {"etag", "penstock-partition", "penstock-offset", "penstock-duplicate"} <= documented
    reply = broker.client.get("/v1/topics", headers={"Origin": PAGE, **BEARER})
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    # A page learns the methods of a path from its preflight.
    assert documented - {"allow"} <= exposed


def test_an_allowed_page_reads_server_sent_events(broker: BrokerProcess) -> None:
    """As an EventSource does: with an Origin, and no wish but for events."""
    headers = {"Origin": PAGE, "Accept": "text/event-stream", **BEARER}
    with broker.client.stream("GET", SUBSCRIBE, headers=headers) as feed:
        assert feed.status_code == 200
        assert_readable(feed)
        assert feed.headers["content-type"].startswith("text/event-stream")
        assert next(feed.iter_lines()) == "event: subscribed"


def test_an_allowed_page_learns_why_it_was_refused(broker: BrokerProcess) -> None:
    """A missing token, an unknown stream: the page reads the error, not a riddle."""
    denied = broker.client.get("/v1/topics", headers={"Origin": PAGE})
    assert denied.status_code == 401
    assert_readable(denied)
    feed = broker.client.get(SUBSCRIBE.replace("streams/default", "streams/none"), headers={
        "Origin": PAGE, **BEARER,
    })  # fmt: skip
    assert feed.status_code == 404
    assert_readable(feed)


@pytest.mark.parametrize(
    "path",
    ["/v1/produce", "/v1/tenants/default/namespaces/default/caches/default/entries/k", "/v1/none"],
)
def test_a_preflight_is_answered_without_the_token_and_does_nothing(
    broker: BrokerProcess, path: str
) -> None:
    """A browser sends none with it."""
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "authorization,content-type,if-match",
    }
    for _ in range(2):
        reply = broker.client.request("OPTIONS", path, headers=headers)
        assert (reply.status_code, reply.content) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == PAGE
        methods = {m.strip() for m in reply.headers["access-control-allow-methods"].split(",")}
        assert {"GET", "POST", "PUT", "PATCH", "DELETE"} <= methods
        allowed = {h.strip() for h in reply.headers["access-control-allow-headers"].split(",")}
        assert {"authorization", "content-type", "if-match", "if-none-match"} <= allowed
    for method in ("GET", "PUT", "DELETE", "POST"):
        assert broker.client.request(method, path, headers=headers).status_code == 401


@pytest.mark.parametrize("origin", ["https://evil.example", f"{PAGE}.evil.example", "null"])
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_a_page_that_is_not_allowed_reads_nothing(
    broker: BrokerProcess, origin: str, method: str
) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "PUT", **BEARER}
    reply = broker.client.request(method, "/v1/topics", headers=headers)
    assert reply.status_code == 403
    assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_an_options_request_that_is_no_preflight_is_405(broker: BrokerProcess) -> None:
    for headers in ({}, {"Origin": PAGE}):
        reply = broker.client.request("OPTIONS", "/v1/produce", headers={**headers, **BEARER})
        assert reply.status_code == 405


def test_answers_depend_on_the_origin_and_say_so(broker: BrokerProcess) -> None:
    """A cache on the way must not give one page what was meant for another."""
    plain = broker.client.get("/v1/topics", headers=BEARER)
    assert plain.headers["vary"].lower() == "origin"
    assert "access-control-allow-origin" not in plain.headers


def test_without_allowed_origins_nothing_is_said(tmp_path: object) -> None:
    process = BrokerProcess(None)
    try:
        process.start()
        reply = process.client.get("/v1/topics", headers={"Origin": process.url})
        assert reply.status_code == 200
        assert "vary" not in reply.headers
        assert "access-control-allow-origin" not in reply.headers
        assert Namespace(process).publish("default", b"x").status_code == 200
    finally:
        process.close()
