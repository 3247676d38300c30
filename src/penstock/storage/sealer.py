"""Starts the sealing process, waits for it, and reports its result to the broker.

Invariant: one job at a time. Every started job ends in exactly one call of `on_sealed` or
`on_error`, made through `post` and so on the event loop, unless the sealer is closed first. Nothing
here blocks the loop. Must not know what sealing does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import msgspec

import penstock
from penstock.model.limits import Limits
from penstock.storage.log import Post
from penstock.storage.seal import Failed, Sealed, SealJob

_ERROR_CHARS = 2000


class Sealer:
    def __init__(
        self,
        directory: str,
        limits: Limits,
        post: Post,
        on_sealed: Callable[[Sealed], None],
        on_error: Callable[[str], None],
        identity: tuple[int, int] | None = None,
    ) -> None:
        """`identity` identifies the directory: a job fails if another one is at its path."""
        self._directory = directory
        self._identity = identity
        self._limits = limits
        self._post = post
        self._on_sealed = on_sealed
        self._on_error = on_error
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_running(self) -> bool:
        """True from `start` until the result is reported."""
        return self._thread is not None

    def start(
        self,
        up_to_segment: int,
        known_files: Iterable[int] = (),
        nice: int = 0,
        known_journal: Iterable[int] = (),
    ) -> bool:
        """Seals every segment up to this one. Returns False while another job is running.

        `known_files` and `known_journal` are all history and journal files in the broker's index.
        `nice` is added to the broker's own priority value.
        """
        if self._closed or self._thread is not None:
            return False
        job = SealJob(
            directory=self._directory,
            up_to_segment=up_to_segment,
            limits=self._limits,
            known_files=list(known_files),
            known_journal=list(known_journal),
            identity=self._identity,
        )
        self._thread = threading.Thread(
            target=self._run, args=(job, nice), name="penstock-sealer", daemon=True
        )
        self._thread.start()
        return True

    def close(self) -> None:
        """Ends a running job. It is done again after the next start."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, job: SealJob, nice: int) -> None:
        try:
            result = self._result(job, nice)
        except Exception as error:  # noqa: BLE001 - every started job ends in a report
            result = Failed(f"the sealing process could not be run: {error!r}")
        if not self._closed:
            self._post(lambda: self._report(result))

    def _report(self, result: Sealed | Failed) -> None:
        self._thread = None
        if self._closed:
            return
        if isinstance(result, Failed):
            self._on_error(result.error)
        else:
            self._on_sealed(result)

    def _result(self, job: SealJob, nice: int) -> Sealed | Failed:
        with self._lock:
            if self._closed:
                return Failed("closed")
            process = self._process = subprocess.Popen(
                # -P: never import a module from the working directory.
                [sys.executable, "-P", "-m", "penstock.storage.seal"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
        # At once, since loading the interpreter is a large part of a short job.
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, own + nice)
        with process:
            output = _exchange(process, msgspec.json.encode(job) + b"\n")
        with self._lock:
            self._process = None
        return _parse_result(output, process.returncode)


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Sends the line and returns the output. Keeps stdin open: its end ends the process."""
    if process.stdin is None or process.stdout is None:
        return b""
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already; its output tells why
    return process.stdout.read()


def _parse_result(output: bytes, status: int) -> Sealed | Failed:
    lines = output.splitlines()
    last = lines[-1] if lines else b""
    try:
        if status:
            return msgspec.json.decode(last, type=Failed)
        return msgspec.json.decode(last, type=Sealed)
    except msgspec.MsgspecError:
        text = output.decode(errors="replace").strip()[-_ERROR_CHARS:]
        return Failed(f"the sealing process ended with status {status}: {text}")


def _environment() -> dict[str, str]:
    """Returns an environment in which the child imports the same package as this process."""
    package = os.path.dirname(os.path.abspath(penstock.__file__))
    path = os.path.dirname(package)
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([path, others]) if others else path}
