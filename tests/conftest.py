"""Settings of every suite, where a slow or busy machine is no failure; and what several share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.tls_proxy import Certificate, make_certificate

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TESTS = Path(__file__).parent
SHARING = ("spark/pipelines", "spark")
"""The tests of each of these folders run in one worker, for they share one Spark session. It gets
faster with use."""

SLOW_FIRST = (
    *SHARING,
    "spark/pipelines/test_killed.py",
    "crash/test_kill_loop.py",
    "docs/test_examples.py",
    "soak",
    "cli/test_demo.py",
    "spark/test_cluster.py",
    "crash",
    "spark/pipelines/test_declarative.py",
    "spark/test_session.py",
    "cli/test_pipeline_signals.py",
    "contract/test_openapi_is_exact.py",
    "contract/test_vacuum.py",
    "property",
)
"""Files and folders with tests that take long, longest first. The file counts if both are named:
those files have Java processes of their own."""


def pytest_configure() -> None:
    """Lets processes that tests start be interrupted. A shell has its background jobs ignore
    SIGINT, and their children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs long files first, so that no worker is left with one of them at the end."""
    ranks = {path: _rank(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: ranks[item.path])


class Schedule(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a file, and one worker all tests that share the session."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        part = _slow_part(TESTS.parent / path)
        return part if part in SHARING else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule | None:
    return Schedule(config, log) if config.getvalue("dist") == "loadfile" else None


def _rank(path: Path) -> int:
    slow = _slow_part(path)
    return len(SLOW_FIRST) if slow is None else SLOW_FIRST.index(slow)


def _slow_part(path: Path) -> str | None:
    """Returns the entry of SLOW_FIRST that a file belongs to."""
    found = [slow for slow in SLOW_FIRST if path.is_relative_to(TESTS / slow)]
    return max(found, key=len, default=None)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))
