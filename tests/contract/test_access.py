"""Section I: who may connect, driftq-68."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.broker_process import BrokerProcess, StartFailed
from tests.contract.checks import (
    assert_error,
    new_name,
)
from tests.contract.conftest import StartBroker

ROUTES = [
    ("GET", "/v1/topics"),
    ("POST", "/v1/produce"),
    ("POST", "/v1/ack"),
    ("POST", "/v1/produce/batch"),
    ("GET", "/v1/consume"),
    ("GET", "/v1/healthz"),
    ("GET", "/metrics"),
    ("GET", "/v1/nothing"),
]


def assert_denied(reply: httpx.Response) -> None:
    assert_error(reply, 403, "PERMISSION_DENIED")


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1.evil.example"]
)
def test_a_foreign_origin_is_403(
    broker: BrokerProcess, method: str, path: str, origin: str
) -> None:
    """driftq-68: another port of this host is foreign too."""
    assert_denied(broker.client.request(method, path, headers={"Origin": origin}))


def test_the_brokers_own_origin_is_welcome(broker: BrokerProcess, topic: str) -> None:
    """driftq-68"""
    for host in ("127.0.0.1", "localhost"):
        headers = {"Origin": f"http://{host}:{broker.port}", "Host": f"{host}:{broker.port}"}
        assert broker.client.get("/v1/topics", headers=headers).status_code == 200
        body = {"topic": topic, "value": "v"}
        assert broker.client.post("/v1/produce", json=body, headers=headers).status_code == 200


def test_a_foreign_origin_stores_nothing(broker: BrokerProcess, topic: str) -> None:
    """driftq-68"""
    body = {"topic": topic, "value": "forged"}
    origin = {"Origin": "https://evil.example"}
    assert_denied(broker.client.post("/v1/produce", json=body, headers=origin))
    broker.put(topic, "honest")
    with broker.consume(topic) as stream:
        assert stream.next().value == "honest"


def test_a_configured_origin_is_welcome(start_broker: StartBroker) -> None:
    """driftq-68"""
    origin = "https://console.example"
    broker = start_broker(memory=True, env={"PENSTOCK_ALLOWED_ORIGINS": origin})
    broker.create_topic("t")
    headers = {"Origin": origin}
    assert broker.client.get("/v1/topics", headers=headers).status_code == 200
    body = {"topic": "t", "value": "v"}
    assert broker.client.post("/v1/produce", json=body, headers=headers).status_code == 200
    foreign = {"Origin": "https://other.example"}
    assert_denied(broker.client.get("/v1/topics", headers=foreign))


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.attacker.com",
        "127.0.0.1.evil.com:8080",
        "127.0.0.1.",
        "0.0.0.0",
        "[::]",
    ],
)
def test_a_host_that_is_no_loopback_name_is_403(
    broker: BrokerProcess, method: str, path: str, host: str
) -> None:
    """driftq-68: DNS rebinding."""
    assert_denied(broker.client.request(method, path, headers={"Host": host}))


def test_a_rebound_name_is_403_with_an_origin_of_its_own(broker: BrokerProcess) -> None:
    """driftq-68: to a browser the page and the broker are then one site."""
    headers = {"Host": "127.attacker.com:8080", "Origin": "http://127.attacker.com:8080"}
    assert_denied(broker.client.get("/v1/topics", headers=headers))


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if "/v1" in route[1]])
@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_a_page_from_another_site_is_403_also_without_an_origin(
    broker: BrokerProcess, method: str, path: str, site: str
) -> None:
    """driftq-68: an image, a frame or a link sends none; a GET of consume would take messages."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    assert_denied(broker.client.request(method, path, headers=headers))


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_brokers_own_pages_and_a_typed_address_are_welcome(
    broker: BrokerProcess, site: str
) -> None:
    """driftq-68"""
    headers = {"Sec-Fetch-Site": site}
    assert broker.client.get("/v1/topics", headers=headers).status_code == 200
    assert broker.client.post("/v1/produce", headers=headers).status_code == 400


def test_a_link_from_another_site_opens_the_docs(broker: BrokerProcess) -> None:
    """driftq-68: they are there to be read, and hold nothing."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert broker.client.get("/docs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "127.0.0.1", "[::1]", "127.0.0.1:80", "LOCALHOST", "localhost:8080",
        "[::1]:8080", "127.1.2.3",
    ],
)  # fmt: skip
def test_loopback_names_are_welcome(broker: BrokerProcess, host: str) -> None:
    """driftq-68"""
    assert broker.client.get("/v1/topics", headers={"Host": host}).status_code == 200
    assert broker.client.post("/v1/produce", headers={"Host": host}).status_code == 400


TOKEN = "s3cret-Token_0123456789"


@pytest.fixture(scope="module", params=["file", "environment"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """A broker with a token, configured either way."""
    home = tmp_path_factory.mktemp("guarded")
    (home / "token").write_text(TOKEN + "\n")
    (home / "token").chmod(0o600)
    if request.param == "file":
        process = BrokerProcess(None, "--token-file", str(home / "token"))
    else:
        process = BrokerProcess(None, env={"PENSTOCK_TOKEN": TOKEN})
    try:
        yield process.start()
    finally:
        process.close()


@pytest.mark.parametrize(("method", "path"), [*ROUTES[:5], *ROUTES[6:], ("GET", "/v1/version")])
def test_with_a_token_every_route_but_the_probes_needs_it(
    guarded: BrokerProcess, method: str, path: str
) -> None:
    """driftq-68"""
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"},
             {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}]  # fmt: skip
    for headers in wrong:
        assert_error(guarded.client.request(method, path, headers=headers), 401, "UNAUTHENTICATED")
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.client.request(method, path, headers=right).status_code != 401


def test_the_probes_need_no_token_and_the_token_works(guarded: BrokerProcess) -> None:
    """driftq-68"""
    for probe in ("/v1/livez", "/v1/readyz"):
        assert guarded.client.get(probe).status_code == 200
    right = {"Authorization": f"Bearer {TOKEN}"}
    name = new_name()
    body = {"name": name}
    assert guarded.client.post("/v1/topics", json=body, headers=right).status_code == 201
    produce = {"topic": name, "value": "v"}
    assert guarded.client.post("/v1/produce", json=produce, headers=right).status_code == 200


def test_the_token_is_never_shown(guarded: BrokerProcess) -> None:
    """driftq-68"""
    assert TOKEN not in guarded.stdout() + guarded.stderr()


def test_binding_elsewhere_without_a_token_must_be_asked_for_by_name() -> None:
    """driftq-68"""
    refused = BrokerProcess(None, host="0.0.0.0")
    with pytest.raises(StartFailed) as failure:
        refused.start()
    refused.close()
    assert failure.value.code not in (None, 0)
    assert "--allow-insecure-bind" in failure.value.output
    assert "Traceback" not in failure.value.output
