"""The broker's process under the soak: how it is started, disturbed, and looked at from outside."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.broker_process import BrokerProcess
from tests.soak.control import Control
from tests.soak.disk import CONTROL_VARIABLE

SETTINGS = {
    "PENSTOCK_SEGMENT_BYTES": "32768",
    "PENSTOCK_MEMORY_BYTES": "65536",
    "PENSTOCK_RESERVE_BYTES": "131072",
    "PENSTOCK_CACHE_MEMORY_BYTES": "4194304",
    "PENSTOCK_MAX_IN_FLIGHT": "40",
    "PENSTOCK_IDEMPOTENCY_TTL_MS": "86400000",
    "PENSTOCK_EVENT_QUEUE_DEPTH": "64",
    "PENSTOCK_PUB_QUEUE_DEPTH": "64",
}

ANSWER_TIMEOUT_S = 120.0


class SoakBroker(BrokerProcess):
    def __init__(self, directory: Path) -> None:
        self.control = Control(directory / "control")
        environment = SETTINGS | {
            CONTROL_VARIABLE: str(self.control.path),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        super().__init__(directory / "data", env=environment)

    def new_client(self, **options: Any) -> httpx.Client:
        """Patient: a busy machine may take a minute to seal what somebody waits for."""
        return super().new_client(**{"timeout": ANSWER_TIMEOUT_S} | options)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def open_files(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _command(self) -> list[str]:
        real = super()._command()
        assert real[:3] == [sys.executable, "-m", "penstock"]
        return [sys.executable, "-m", "tests.soak.broker", *real[3:]]
