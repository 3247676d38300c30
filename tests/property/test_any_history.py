"""Any history of commands, consumers, time and crashes: the guarantees hold after every step.

The same few hundred histories run with every test run; PENSTOCK_TEST_HISTORIES=2000 looks at that
many new ones. A history that fails is printed as it is; PENSTOCK_TEST_SHRINK=1 makes it shorter
first, which may take five minutes.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tests.property.machine import BrokerMachine, TightMachine

HISTORIES = int(os.environ.get("PENSTOCK_TEST_HISTORIES", "0"))
SHRINK = [Phase.shrink] if os.environ.get("PENSTOCK_TEST_SHRINK") else []

profile = settings(
    max_examples=HISTORIES or 300,
    stateful_step_count=50,
    derandomize=not HISTORIES,
    deadline=None,
    database=None,
    phases=[Phase.generate, *SHRINK],
    report_multiple_bugs=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

TestAnyHistory = BrokerMachine.TestCase
TestAnyHistory.settings = profile

TestAnyHistoryWithHardlyAnyMemory = TightMachine.TestCase
TestAnyHistoryWithHardlyAnyMemory.settings = profile
