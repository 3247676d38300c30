"""One minute of the soak, with a fixed seed: `scripts/soak` runs it for as long as one likes."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.soak.soak import Soak

SECONDS = 60
SEED = 13
MET = (
    "produced",
    "delivered",
    "acked",
    "cache writes",
    "events received",
    "events of a name",
    "transactions",
    "read paths compared",
    "wal verify",
)
"""What a minute meets on any machine. How often depends on its speed, so that is not asked."""


def test_a_minute_of_everything_with_faults_breaks_no_promise(tmp_path: Path) -> None:
    """driftq-30, driftq-39, driftq-46, driftq-57, felix-78: under kills and a failing disk."""
    soak = Soak(tmp_path / "soak", SEED)
    soak.run(SECONDS)
    print(soak.figures())
    counts = soak.counts + soak.model.counts
    assert not [what for what in MET if not counts[what]], soak.figures()
    shutil.rmtree(tmp_path / "soak")
