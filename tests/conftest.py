"""Settings of every suite, where a slow or busy machine is no failure; and what several share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tls_proxy import Certificate, make_certificate

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
SLOW_FIRST = (
    "spark/pipelines/test_killed.py",
    "cli/test_demo.py",
    "crash",
    "soak",
    "docs/test_examples.py",
    "spark",
    "contract/test_openapi_is_exact.py",
    "contract/test_vacuum.py",
    "property",
)
"""Files and folders with tests that take long, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs long files first, so that no worker is left with one of them at the end."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    path = item.path.relative_to(TESTS)
    for rank, slow in enumerate(SLOW_FIRST):
        if path.is_relative_to(slow):
            return rank
    return len(SLOW_FIRST)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))
