"""A part of the contract suite, against clusters of two brokers that are asked in turn.

The files here go through every route, and every kind of stream and socket, by way of the broker
that is not the owner. By hand, all of it: `PENSTOCK_TEST_CLUSTER=1 scripts/test tests/contract`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.nats_servers import nats_server

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (
    "test_route_credentials.py",
    "test_pipelining.py",
    "test_transactions.py",
    "test_durable_streams.py",
    "test_streams_http.py",
    "test_caches_conditions.py",
    "test_writes_streams.py",
)
TIMEOUT_S = 1200


def test_the_contract_holds_for_clusters() -> None:
    nats_server()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"tests/contract/{name}" for name in FILES)],
        cwd=ROOT,
        env={**os.environ, "PENSTOCK_TEST_CLUSTER": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2000:]
