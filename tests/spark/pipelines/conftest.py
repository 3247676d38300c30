"""What the tests of pipelines share: one golden sample, played once, which nobody changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.spark.conftest import SMALL_SEGMENTS, _assert_no_traceback
from tests.spark.pipelines.golden import ROUTER, Golden, play


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    data_dir = tmp_path_factory.mktemp("golden")
    process = BrokerProcess(data_dir, "--router", ROUTER, env=SMALL_SEGMENTS)
    try:
        yield play(process.start())
        _assert_no_traceback(process)
    finally:
        process.close()
        shutil.rmtree(data_dir)
