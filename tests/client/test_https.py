"""TLS in front of a broker: the trust is the system's or SSL_CERT_FILE's, and what is wrong with an
address is said once, by name."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.client import AsyncClient, Client, Worker
from penstock.model.errors import InvalidArgument
from tests.broker_process import SOURCE, BrokerProcess
from tests.tls_proxy import Certificate, make_certificate, tls_proxy


@pytest.fixture(scope="module")
def url(broker: BrokerProcess, certificate: Certificate) -> Iterator[str]:
    with tls_proxy(broker.port, certificate) as address:
        yield address


@pytest.fixture
def trusted(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))


@pytest.mark.usefixtures("trusted")
def test_a_client_trusts_what_ssl_cert_file_names(url: str, topic: str) -> None:
    with Client(url) as client:
        client.produce(topic, "hello")
        assert [each.value for each in client.consume(topic, "g", wait_s=0.5)] == ["hello"]


@pytest.mark.usefixtures("trusted")
def test_an_async_client_trusts_it_too(url: str, topic: str) -> None:
    async def ask() -> list[str]:
        async with AsyncClient(url) as client:
            await client.produce(topic, "hello")
            return [each.value async for each in client.consume(topic, "g", wait_s=0.5)]

    assert asyncio.run(ask()) == ["hello"]


@pytest.mark.usefixtures("trusted")
def test_proxies_of_the_environment_are_left_out(
    url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with Client(url) as client:
        assert topic in client.list_topics()


def test_a_certificate_that_nobody_trusted_has_signed_is_named(url: str, topic: str) -> None:
    told = f"the certificate of {url} does not hold: self.signed certificate; SSL_CERT_FILE may"
    with Client(url) as client:
        with pytest.raises(InvalidArgument, match=told) as refusal:
            client.list_topics()
        assert not refusal.value.retryable
        with pytest.raises(InvalidArgument, match=told):
            next(client.consume(topic, "g"))


def test_an_async_client_names_it_too(url: str) -> None:
    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.list_topics()

    with pytest.raises(InvalidArgument, match=f"the certificate of {url} does not hold"):
        asyncio.run(ask())


def test_a_certificate_of_another_name_is_not_mended_by_trust(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_certificate(tmp_path, "DNS:elsewhere.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(other.file))
    with tls_proxy(broker.port, other) as address, Client(address) as client:
        with pytest.raises(InvalidArgument, match="does not hold: IP address mismatch") as refusal:
            client.list_topics()
        assert "SSL_CERT_FILE" not in refusal.value.message


def test_https_to_a_port_of_http_is_told_from_a_broker_that_is_away(broker: BrokerProcess) -> None:
    address = broker.url.replace("http:", "https:")
    told = f"{address} does not speak TLS; is it {broker.url}\\?"
    with Client(address) as client, pytest.raises(InvalidArgument, match=told):
        client.list_topics()


def test_a_worker_does_not_wait_for_another_certificate(url: str, topic: str) -> None:
    with Client(url) as client, ThreadPoolExecutor() as threads:
        worker = Worker(client, topic, "g", print)
        running = threads.submit(worker.run)
        try:
            with pytest.raises(InvalidArgument, match="does not hold"):
                running.result(10)
        finally:
            worker.stop()


def test_plain_http_does_not_read_what_the_system_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bool] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: read.append(True))
    Client("http://127.0.0.1:8080").close()
    assert not read


def test_the_command_line_trusts_and_refuses_likewise(
    url: str, topic: str, certificate: Certificate
) -> None:
    trusting = list_topics(url, SSL_CERT_FILE=str(certificate.file))
    assert (trusting.returncode, topic in trusting.stdout) == (0, True)
    refusing = list_topics(url)
    assert refusing.returncode == 1
    assert f"the certificate of {url} does not hold" in refusing.stderr
    assert "penstock serve" not in refusing.stderr
    assert len(refusing.stderr.splitlines()) == 1


def list_topics(url: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "topic", "list", "--url", url],
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
