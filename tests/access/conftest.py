"""One broker under access control for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.access.server import AccessServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccessServer]:
    server = AccessServer(tmp_path_factory.mktemp("access"))
    try:
        server.must("root", "POST", "/v1/tenants", {"tenant_id": "other"})
        server.must("root", "POST", "/v1/tenants/other/namespaces", {"namespace": "default"})
        server.must("root", "POST", "/v1/topics", {"name": "orders"})
        yield server
    finally:
        server.close()
