"""The register of runs on this machine: a small file for each run, which its process updates.

Invariant: a run counts as running only while the process that wrote its file runs; another process
that has got the same id since does not count. Files hold no token. Files that cannot be read are
ignored: the register is for people, and no pipeline depends on it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from penstock.model.errors import FailedPrecondition

KEPT_S = 7 * 86_400
MOST_ENDED = 50
RUN_ID = "PENSTOCK_RUN_ID"
"""The environment variable with the id of a run that another process waits for."""

_POLL_S = 0.1
_ID = re.compile(r"[0-9a-f]{32}")

RunState = Literal["running", "ended", "stopped", "failed", "died"]
"""`stopped`: by a person or a signal. `died`: its process is gone without recording an end."""


class Figures(msgspec.Struct):
    """The progress of a query or job of the run."""

    pipeline: str
    name: str
    state: str
    batches: int
    rows: int
    rows_per_s: float
    lag: int | None
    error: str = ""


class RunEntry(msgspec.Struct):
    """A run. `born` is when its process was started, as the operating system reports it."""

    id: str
    name: str
    pid: int
    born: str
    pipelines: list[str]
    lake: str
    master: str
    url: str
    once: bool
    started_s: float
    seen_s: float
    claims: list[str] = []
    activities: list[Figures] = []
    ended_s: float | None = None
    exit_code: int | None = None
    was_stopped: bool = False
    digests: dict[str, str] = msgspec.field(name="asked", default_factory=dict)
    """A hash of each pipeline's settings, which may be secret."""

    @property
    def state(self) -> RunState:
        if self.exit_code is not None:
            if self.exit_code != 0:
                return "failed"
            return "stopped" if self.was_stopped else "ended"
        return "running" if born_of(self.pid) == self.born else "died"

    @property
    def place(self) -> str:
        """The lake, the same for all paths that lead to it."""
        return place_of(self.lake)

    @property
    def is_running(self) -> bool:
        return self.state == "running"


class Register:
    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory(os.environ)

    def enter(
        self,
        name: str,
        pipelines: list[str],
        lake: str,
        master: str,
        url: str,
        *,
        once: bool,
        digests: Mapping[str, str] | None = None,
    ) -> RunEntry:
        """Adds a run of this process."""
        now, given = time.time(), os.environ.get(RUN_ID, "")
        entry = RunEntry(
            id=given if _ID.fullmatch(given) else uuid.uuid4().hex,
            name=name,
            pid=os.getpid(),
            born=born_of(os.getpid()),
            pipelines=pipelines,
            lake=lake,
            master=master,
            url=url,
            once=once,
            started_s=now,
            seen_s=now,
            digests=dict(digests or {}),
        )
        self.keep(entry)
        self.prune()
        return entry

    def claim(self, entry: RunEntry, pipeline: str, name: str) -> None:
        """Claims a query or job for this run. Refuses it if another run has claimed it on that
        lake: two would take each other's batches for their own. The claim is written before others
        are checked, so that of two at the same moment at most one continues."""
        claimed = f"{pipeline}/{name}"
        entry.claims.append(claimed)
        self.keep(entry)
        for other in self.entries():
            is_other = other.id != entry.id and other.is_running and other.place == entry.place
            if is_other and claimed in other.claims:
                entry.claims.remove(claimed)
                raise _taken(name, entry.lake, other)

    def check_free(self, lake: str, digests: Mapping[str, str]) -> None:
        """Refuses a pipeline that runs on that lake already with the same settings, before Spark is
        started. Other runs may still claim the same query; `claim` finds that."""
        for other in self.entries():
            if other.is_running and other.place == place_of(lake):
                for pipeline, settings in digests.items():
                    if other.digests.get(pipeline) == settings:
                        raise _taken(pipeline, lake, other)

    def keep(self, entry: RunEntry) -> None:
        """Writes the entry, complete or not at all. Ignores a full disk and a missing home."""
        path = self._directory / f"{entry.id}.json"
        with suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(entry))
            draft.replace(path)

    def end(self, entry: RunEntry, exit_code: int, *, was_stopped: bool = False) -> None:
        entry.ended_s, entry.exit_code = time.time(), exit_code
        entry.was_stopped = entry.was_stopped or was_stopped
        self.keep(entry)

    def find(self, run_id: str) -> RunEntry | None:
        try:
            return msgspec.json.decode(
                (self._directory / f"{run_id}.json").read_bytes(), type=RunEntry
            )
        except (OSError, msgspec.DecodeError):
            return None

    def entries(self) -> list[RunEntry]:
        """Returns all runs, the oldest first."""
        found = [self.find(path.stem) for path in self._directory.glob("*.json")]
        return sorted((each for each in found if each is not None), key=lambda e: e.started_s)

    def prune(self) -> None:
        """Removes runs that ended long ago, and the oldest if there are too many."""
        over = [entry for entry in self.entries() if not entry.is_running]
        recent = [e for e in over if (e.ended_s or e.seen_s) > time.time() - KEPT_S]
        kept = {entry.id for entry in recent[-MOST_ENDED:]}
        for entry in over:
            if entry.id not in kept:
                with suppress(OSError):
                    (self._directory / f"{entry.id}.json").unlink()

    def stop(self, entry: RunEntry, timeout_s: float) -> bool:
        """Asks the run's process to stop, and waits. Returns False if it is too slow."""
        deadline = time.monotonic() + timeout_s
        if entry.is_running:
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGTERM)
        while born_of(entry.pid) == entry.born:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def place_of(lake: str) -> str:
    """Returns the real path of a local directory, and any other address as it is."""
    if lake.startswith("file:"):
        lake = urlsplit(lake).path
    return lake.rstrip("/") if ":" in lake else os.path.realpath(lake)


def _taken(name: str, lake: str, other: RunEntry) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} runs on {lake} already, in process {other.pid}; "
        f"`penstock pipeline stop {other.pid}` ends it"
    )


def default_directory(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("XDG_STATE_HOME")
    state = Path(chosen) if chosen else Path.home() / ".local" / "state"
    return state / "penstock" / "pipelines"


def born_of(pid: int) -> str:
    """Returns when the process was started; empty if there is none, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _born_by_ps(pid)
    except OSError:
        return ""
    # The program's name is in brackets and may hold any characters.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _born_by_ps(pid: int) -> str:
    done = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
