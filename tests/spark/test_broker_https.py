"""The connector over TLS: its trust is that of every client, and what waiting cannot mend is said
at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from penstock.model.errors import InvalidArgument, Unavailable
from penstock.spark.broker import BrokerConnection
from penstock.spark.options import BrokerSettings
from tests.broker_process import BrokerProcess
from tests.tls_proxy import Certificate, tls_proxy


@pytest.fixture(scope="module")
def url(broker: BrokerProcess, certificate: Certificate) -> Iterator[str]:
    with tls_proxy(broker.port, certificate) as address:
        yield address


def connect(url: str, retry_s: float = 60) -> BrokerConnection:
    return BrokerConnection(BrokerSettings(url=url, retry_s=retry_s))


def refused_at_once(url: str, told: str) -> None:
    begun = time.monotonic()
    with connect(url) as connection:
        with pytest.raises(InvalidArgument, match=told):
            connection.call("GET", "/v1/topics")
        with pytest.raises(InvalidArgument, match=told):
            connection.rows("/v1/topics/x/partitions/0/records", {})
    assert time.monotonic() - begun < 20


def test_calls_and_rows_trust_what_ssl_cert_file_names(
    url: str,
    topic: str,
    certificate: Certificate,
    broker: BrokerProcess,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    broker.put(topic, "hello")
    with connect(url) as connection:
        assert topic.encode() in connection.call("GET", "/v1/topics")
        with connection.rows(f"/v1/topics/{topic}/partitions/0/records", {}) as rows:
            assert [row["value"] for batch in rows for row in batch.to_pylist()] == ["hello"]


def test_a_certificate_that_does_not_hold_is_said_at_once(url: str):
    told = f"the certificate of {url} does not hold: self.signed certificate; SSL_CERT_FILE may"
    refused_at_once(url, told)


def test_https_to_a_port_of_http_is_said_at_once(broker: BrokerProcess):
    address = broker.url.replace("http:", "https:")
    told = f"{address} does not speak TLS; is it {broker.url}\\?"
    refused_at_once(address, told)


def test_http_to_a_port_of_tls_is_tried_again_and_suspected_in_the_end(url: str):
    address = url.replace("https:", "http:")
    told = f"a port of TLS does so too, is it {url}\\?; tried for 0.3 s"
    with connect(address, retry_s=0.3) as connection, pytest.raises(Unavailable, match=told):
        connection.call("GET", "/v1/topics")


def test_a_single_try_is_not_said_to_have_taken_time(url: str):
    address = url.replace("https:", "http:")
    with connect(address, retry_s=0) as connection:
        with pytest.raises(Unavailable) as failure:
            connection.call("GET", "/v1/topics")
        assert "tried for" not in failure.value.message
