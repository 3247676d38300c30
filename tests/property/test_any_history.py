"""Any history of commands, consumers, time and crashes: the guarantees hold after every step.

A few seconds' worth of histories, always the same ones, run with every test run;
PENSTOCK_TEST_HISTORIES=2000 looks at that many new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.property.machine import BrokerMachine, TightMachine

HISTORIES = int(os.environ.get("PENSTOCK_TEST_HISTORIES", "0"))

profile = settings(
    max_examples=HISTORIES or 120,
    stateful_step_count=50,
    derandomize=not HISTORIES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

TestAnyHistory = BrokerMachine.TestCase
TestAnyHistory.settings = profile

TestAnyHistoryWithHardlyAnyMemory = TightMachine.TestCase
TestAnyHistoryWithHardlyAnyMemory.settings = profile
