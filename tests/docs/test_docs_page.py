"""The curl commands on the page /docs work when they are pasted, also with a token."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess

TOKEN = "s3cret-Token_77"

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None and "CI" not in os.environ, reason="curl is not installed"
)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", env={"PENSTOCK_TOKEN": TOKEN}) as process:
        yield process


def test_examples_send_the_token_and_name_what_the_examples_before_them_made(
    guarded: BrokerProcess,
) -> None:
    page = guarded.client.get("/docs", headers={"Authorization": f"Bearer {TOKEN}"}).text
    commands = [html.unescape(each) for each in re.findall("<pre>(.*?)</pre>", page, re.DOTALL)]
    assert len(commands) > 50

    def paste(path: str, more: str = "") -> None:
        command = next(each for each in commands if re.search(rf"/v1/\S*{path}", each))
        shell = f"{command} {more} -o /dev/null -w '%{{http_code}}'"
        environ = os.environ | {"PENSTOCK_TOKEN": TOKEN}
        done = subprocess.run(shell, shell=True, env=environ, capture_output=True, text=True)
        assert done.stdout[-3:] in ("101", "200", "201", "204"), (command, done.stdout)

    paste(r"topics \\")
    paste(r"produce \\")
    paste(r"consume\?", "--max-time 1")
    for path in (r"extend \\", r"ack \\", r"progress \\", r"records\?"):
        paste(path)
    paste(r"idempotency/begin \\")
    paste(r"idempotency\?")
    paste(r"tenants/default/namespaces/default/caches/default/entries/greeting \\")

    streams = "tenants/default/namespaces/default/streams"
    paste(rf"{streams} \\")
    paste(rf"{streams}/orders/publish_batch \\")
    paste(rf"{streams}/orders/subscribe\?", "--max-time 1")
    for path in (r"extend \\", r"ack \\", r"nack \\", r"release_batch \\"):
        paste(f"{streams}/orders/{path}")
    for path in (r"records\?", r"splits\?", "offsets", "producers/nightly"):
        paste(f"{streams}/orders/{path}")
    paste(rf"{streams}/orders/subscriptions/billing/progress \\")
    paste("felix/ws")
