"""Kills under load with every threshold so small that maintenance is always under way.

After each start everything acknowledged is read through every read path and compared with what was
sent. The broker's processes count what they do, and the counts are asserted: a test that no longer
meets sealing or vacuum must not pass for one that does.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from penstock.storage import offline
from penstock.storage.vfs import Vfs
from tests.crash.ledger import TOPIC
from tests.crash.test_kill_loop import KillLoop, StartKilled
from tests.soak.process import SoakBroker
from tests.soak.read_paths import ReadPaths, difference, fresh_positions

LIVES = 8
NEIGHBOUR = "neighbour"
AT_LEAST = {
    "seals": LIVES,
    "files dropped": 3,
    "files rewritten": 3,
    "files joined": 2,
    "evictions": 100,
    "pages read": 100,
}


class SmallBroker(StartKilled, SoakBroker):
    """Dies when it is told to, and has small thresholds."""


class ReadingLoop(KillLoop):
    """Verifies the directory after each death, and reads everything after each start."""

    def __init__(self, broker: SmallBroker, seed: int) -> None:
        self.reads = 0
        self.paths = ReadPaths(broker)
        super().__init__(broker, seed)

    def _start(self) -> None:
        report = offline.verify(Vfs(), str(self.broker.data_dir))
        assert report.damage is None, report.damage
        assert all(file.state == "sound" for file in report.files), report.files
        super()._start()
        self.read_everything()

    def read_everything(self) -> None:
        # Whoever asks for the newest of the journal waits for a run of sealing: so there is one in
        # each life, however slow the machine.
        fresh_positions(self.broker.client)
        self._replace_neighbour()
        by_path = self.paths.of(TOPIC, with_audit=self.ledger.round % 4 == 0)
        rows = by_path["json"]
        for path, found in by_path.items():
            assert found == rows, f"{path} and json: {difference(found, rows)}"
        stored = [{"partition": r.partition, "offset": r.offset, "value": r.value} for r in rows]
        self.ledger.check_stored(stored)
        self._check()
        self.reads += 1

    def _replace_neighbour(self) -> None:
        """Rows of a deleted topic lie among those of the other: vacuum takes them out."""
        client = self.broker.client
        assert client.delete(f"/v1/topics/{NEIGHBOUR}").status_code in (204, 404)
        self.broker.create_topic(NEIGHBOUR)
        bodies = [{"topic": NEIGHBOUR, "value": f"{n} ".ljust(500, ".")} for n in range(10)]
        reply = client.post("/v1/produce/batch", json=bodies)
        assert reply.status_code == 200, reply.text


def test_every_read_path_finds_all_that_was_acknowledged_after_each_kill(tmp_path: Path) -> None:
    """driftq-30, driftq-46: whatever is sealed, joined, rewritten or evicted meanwhile."""
    seed = int(os.environ.get("KILL_LOOP_SEED") or secrets.randbits(32))
    print(f"KILL_LOOP_SEED={seed}")
    broker = SmallBroker(tmp_path)
    try:
        loop = ReadingLoop(broker, seed)
        for _ in range(LIVES):
            loop.live_and_die()
        loop.finish()
        counts = broker.control.counts()
    finally:
        broker.close()
    rare = {what: counts[what] for what, least in AT_LEAST.items() if counts[what] < least}
    assert not rare, f"too rare to be a test: {rare} of {counts}"
    shutil.rmtree(tmp_path / "data")
