"""Settings of every suite, where a slow or busy machine is no failure; and what several share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.tls_proxy import Certificate, make_certificate

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))
