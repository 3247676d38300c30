"""/docs in a browser when the broker has a token: a page asks for it, and holds no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import assert_error

TOKEN = "s3cret-Token_77"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[BrokerProcess]:
    with BrokerProcess(None, env={"PENSTOCK_TOKEN": TOKEN}) as process:
        yield process


@pytest.mark.parametrize("credentials", [{}, {"Authorization": "Bearer wrong"}])
def test_a_browser_without_the_token_is_asked_for_it(
    guarded: BrokerProcess, credentials: dict[str, str]
) -> None:
    page = guarded.client.get("/docs", headers=BROWSER | credentials)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-store"
    assert "type='password'" in page.text
    # Nothing of the documentation, and nothing secret.
    assert "/v1/" not in page.text
    assert TOKEN not in page.text


def test_the_pages_policy_allows_the_brokers_own_script_and_no_other(
    guarded: BrokerProcess,
) -> None:
    page = guarded.client.get("/docs", headers=BROWSER)
    policy = dict(
        part.split(maxsplit=1) for part in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page.text, re.DOTALL)
    assert scripts == [(" src='/docs/sign-in.js' defer", "")]
    assert not re.search(r"\son\w+\s*=", page.text)


def test_the_script_needs_no_token_and_keeps_it_in_the_tab_only(guarded: BrokerProcess) -> None:
    script = guarded.client.get("/docs/sign-in.js")
    assert script.status_code == 200
    assert script.headers["content-type"].startswith("text/javascript")
    assert "sessionStorage" in script.text
    for elsewhere in ("localStorage", "document.cookie", "innerHTML", "eval(", "http"):
        assert elsewhere not in script.text
    assert TOKEN not in script.text


@pytest.mark.parametrize(
    "path", ["/docs/openapi.json", "/docs/asyncapi.json", "/metrics", "/docs/", "/v1/topics"]
)
def test_everything_behind_the_page_needs_the_token(guarded: BrokerProcess, path: str) -> None:
    """driftq-68"""
    assert_error(guarded.client.get(path, headers=BROWSER), 401, "UNAUTHENTICATED")


def test_a_program_without_the_token_gets_the_error(guarded: BrokerProcess) -> None:
    """driftq-68"""
    for headers in ({}, {"Accept": "application/json"}, {"Authorization": "Bearer wrong"}):
        reply = guarded.client.get("/docs", headers=headers)
        assert_error(reply, 401, "UNAUTHENTICATED")
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("accept", ["*/*", "text/html"])
def test_with_the_token_the_documentation_comes(guarded: BrokerProcess, accept: str) -> None:
    page = guarded.client.get("/docs", headers=RIGHT | {"Accept": accept})
    assert page.status_code == 200
    assert "/v1/produce" in page.text
    assert "<script" not in page.text


def test_without_a_token_configured_nobody_is_asked(broker: BrokerProcess) -> None:
    page = broker.client.get("/docs", headers=BROWSER)
    assert "/v1/produce" in page.text
    assert "<script" not in page.text
