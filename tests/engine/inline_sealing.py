"""Sealing without a process of its own, so that a disk in memory can be sealed, and at once.

The same code runs; only the child process around it is left out (tests/property/test_paging.py
has it). A job is done in one turn and reported in the next, so that a crash may come between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from penstock.engine import sealing
from penstock.model.limits import Limits
from penstock.storage import history_reader
from penstock.storage.errors import StorageError
from penstock.storage.seal import Sealed, SealJob, seal
from penstock.storage.sealer import Sealer
from penstock.storage.vfs import Vfs
from tests.storage.faulty_vfs import FaultyVfs

_real_map_file = history_reader.map_file


class InlineSealer:
    disks: dict[str, FaultyVfs] = {}  # noqa: RUF012 - the disk in force, by directory

    def __init__(
        self,
        directory: str,
        limits: Limits,
        post: Callable[[Callable[[], None]], object],
        on_sealed: Callable[[Sealed], None],
        on_error: Callable[[str], None],
        identity: tuple[int, int] | None = None,
    ) -> None:
        self._identity = identity
        self._vfs = self.disks[directory]
        self._directory = directory
        self._limits = limits
        self._post = post
        self._on_sealed = on_sealed
        self._on_error = on_error
        self.is_running = False
        self.is_held = False
        self.nices: list[int] = []

    def start(
        self,
        up_to_segment: int,
        known_files: Iterable[int] = (),
        nice: int = 0,
        known_journal: Iterable[int] = (),
    ) -> bool:
        if self.is_held:
            return False
        self.is_running = True
        self.nices.append(nice)
        job = SealJob(
            directory=self._directory,
            up_to_segment=up_to_segment,
            limits=self._limits,
            known_files=list(known_files),
            known_journal=list(known_journal),
            identity=self._identity,
        )
        self._post(lambda: self._run(job))
        return True

    def close(self) -> None:
        """Nothing is under way between two turns."""

    def _run(self, job: SealJob) -> None:
        try:
            sealed = seal(self._vfs, job)
        except (OSError, StorageError) as error:
            self.is_running = False
            self._on_error(str(error))
        else:
            self._post(lambda: self._report(sealed))

    def _report(self, sealed: Sealed) -> None:
        self.is_running = False
        self._on_sealed(sealed)


def make_sealer(directory: str, *arguments: object) -> InlineSealer | Sealer:
    kind = InlineSealer if directory in InlineSealer.disks else Sealer
    return kind(directory, *arguments)  # type: ignore[arg-type]  # as Sealing gives them


def map_file(vfs: Vfs, path: str) -> pa.Buffer:
    """A disk in memory cannot be mapped."""
    if isinstance(vfs, FaultyVfs):
        return pa.py_buffer(vfs.read_file(path))
    return _real_map_file(vfs, path)


PATCHES = [(sealing, "Sealer", make_sealer), (history_reader, "map_file", map_file)]
