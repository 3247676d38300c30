"""The API's document is exact: the broker takes what it allows and refuses what it forbids.

Schemathesis makes requests of both kinds from the document and compares the answers with it too.
What a schema cannot say is left out by openapi_hooks.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess

ROOT = Path(__file__).parents[2]
SEED = "1"
EXAMPLES = "5"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
)
ENDLESS = "/(consume|subscribe|watch)$"
# Names are limited in bytes, and a schema counts characters. Some refusals depend on what is there.
SETTINGS = """
[generation]
codec = "ascii"

[checks.positive_data_acceptance]
expected-statuses = [
    "2xx", "304", "401", "403", "404", "409", "410", "412", "413", "416", "426", "429", "503",
]

[checks.negative_data_rejection]
expected-statuses = [
    "400", "401", "403", "404", "405", "409", "410", "412", "413", "416", "426", "429", "503",
]
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


def test_the_broker_takes_what_the_document_allows_and_refuses_what_it_forbids(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    options = {
        "--phases": "coverage,fuzzing",
        "--checks": ",".join(CHECKS),
        "--max-examples": EXAMPLES,
        "--seed": SEED,
        "--exclude-path-regex": ENDLESS,
        "--request-timeout": "60",
        "--suppress-health-check": "all",
    }
    run = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            f"{broker.url}/docs/openapi.json",
            "--continue-on-failure",
            *(word for option in options.items() for word in option),
        ],
        cwd=tmp_path,
        env=os.environ
        | {"SCHEMATHESIS_HOOKS": "tests.contract.openapi_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    generated = re.search(r"(\d+) generated", run.stdout)
    assert generated is not None
    assert int(generated[1]) > 1000
