"""Handshakes that fail for the client's certificate: one line of the log a minute."""

from __future__ import annotations

import ssl

import pytest

from penstock.server.tls import PAUSE_S, RefusedCertificates


def failure(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "handshake")
    error.reason = reason
    return error


def test_repeats_are_counted_in_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    refused = RefusedCertificates(lambda: now_s)
    missing = failure("PEER_DID_NOT_RETURN_A_CERTIFICATE")
    for _ in range(4):
        refused.note(missing)
    refused.note(failure("WRONG_VERSION_NUMBER"))
    assert [each.message.rpartition("it ")[2] for each in caplog.records] == ["showed none"]
    now_s += PAUSE_S
    refused.note(failure("CERTIFICATE_VERIFY_FAILED"))
    assert caplog.records[-1].message.endswith(
        "showed one that it does not accept (3 more since the last such line)"
    )
