"""`python -m tests.soak.sealing`: the sealing process with the soak's faults and thresholds."""

from __future__ import annotations

import sys
from typing import Any

from penstock.storage import seal, vacuum
from tests.soak.control import Control
from tests.soak.disk import control, count_calls, spoil
from tests.thresholds import STORAGE_OF_PROCESSES, lower


def prepare(numbers: Control) -> None:
    lower(STORAGE_OF_PROCESSES)
    spoil(numbers, "child_eio_in")

    def planned(plan: vacuum.VacuumPlan, *_: Any) -> None:
        numbers.count("files rewritten", len(plan.rewrite))
        numbers.count("files joined", len(plan.rewrite) if len(plan.rewrite) > 1 else 0)

    def sealed(result: seal.Sealed, *_: Any) -> None:
        numbers.count("seals")
        numbers.count("files dropped", len(result.dropped))
        numbers.count("journal files joined", len(result.journal_dropped))

    count_calls(seal, "plan_vacuum", planned)
    count_calls(seal, "seal", sealed, lambda: numbers.count("seal failures"))


if __name__ == "__main__":
    prepare(control())
    sys.exit(seal.main())
