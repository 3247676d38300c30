"""Random heads, JSON and Arrow from fixed seeds: refused or right, whatever comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from penstock.model.errors import PenstockError
from penstock.model.limits import MIB
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.server.arrow_bodies import read_table
from penstock.server.routes.transaction_operations import OperationBody
from penstock.server.row_checks import check_cache_rows, check_topic_rows
from penstock.storage.staging import pack
from tests.broker_process import BrokerProcess
from tests.fuzz import arrow, json_bodies
from tests.fuzz.http import GUARDED, SETTINGS, HttpFuzzer

NOW_MS = 1_800_000_000_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", env=SETTINGS) as process:
        yield process


def test_random_http_is_answered_or_closed_and_harms_nobody(broker: BrokerProcess) -> None:
    """driftq-65, driftq-69: against a process; by hand it runs for as long as it is told."""
    with closing(HttpFuzzer(broker, seed=65)) as fuzzer:
        fuzzer.run(lambda count: count >= 1500)
    kinds = {name.split()[0] for name in fuzzer.counts}
    assert kinds == {"heads", "json", "lines", "arrow"}


def test_random_bodies_of_tokens_rules_and_quotas_harm_nobody(tmp_path: Path) -> None:
    """With access control; the sender is an admin, so that every route reads its body."""
    with (
        BrokerProcess(tmp_path / "data", env=SETTINGS | GUARDED) as process,
        closing(HttpFuzzer(process, seed=94, token=GUARDED["PENSTOCK_TOKEN"])) as fuzzer,
    ):
        fuzzer.run(lambda count: count >= 1500)
    assert fuzzer.counts["json 201"]
    assert not [name for name in fuzzer.counts if name.endswith((" 401", " 403"))]


def test_every_route_that_takes_a_body_gets_random_ones() -> None:
    """A new route is fuzzed without a line here; some have more than their example."""
    covered = {(method, path) for method, path, _ in json_bodies.ROUTES}
    assert len(json_bodies.WITH_BODY) > 30
    for endpoint in json_bodies.WITH_BODY:
        parts = [re.escape(part) for part in re.split(r"\{\w+\}", endpoint.path)]
        pattern = re.compile("[^/]+".join(parts))
        assert any(
            method == endpoint.method and pattern.fullmatch(path) for method, path in covered
        ), endpoint.route
    operations = {
        operation["op"]
        for _, path, body in json_bodies.ROUTES
        for operation in body.get("operations", ())
        if path == "/v1/transactions"
    }
    assert operations == {kind.__struct_config__.tag for kind in get_args(OperationBody)}


def refusal_of(body: bytes, *, is_cache: bool) -> PenstockError | None:
    """None: the rows are as they are stored."""
    try:
        table = read_table(body, MIB)
        if is_cache:
            rows = check_cache_rows(table, 1000)
        else:
            rows = check_topic_rows(table, DEFAULT_SCOPE, "t", 1000, NOW_MS)
    except PenstockError as error:
        return error
    assert pack(rows.table, "t", []).rows == table.num_rows
    return None


@pytest.mark.parametrize("seed", range(3))
def test_damaged_arrow_rows_are_refused_or_right(seed: int) -> None:
    """Thousands of damages: a refusal that can be told, or rows that can be stored."""
    random = Random(seed)
    for _ in range(300):
        is_cache = random.random() < 0.3
        good = arrow.stream(random, is_cache=is_cache)
        for body in (good, *[arrow.damaged(random, good) for _ in range(9)]):
            error = refusal_of(body, is_cache=is_cache)
            if error is not None:
                assert error.http_status in (400, 413)
                assert error.message.encode()
