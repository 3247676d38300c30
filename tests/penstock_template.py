"""Starts the `penstock` command as a copy of a process that has already loaded it.

Loading takes nine tenths of the CPU time of a start, and the tests start many hundred brokers and
commands. A copy is a process like any other: it has its own memory, files and signals, reads its
command line, and its end tells its exit code. Only the loading happened before.

Run as a program, this file is the template. It loads the command, and forks for each request that
comes over the socket on its standard input. It ends when that socket is closed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
REQUEST_BYTES_MAX = 128 * 1024

# Set by scripts/coverage for every process that the tests start.
MEASURING = "COVERAGE_PROCESS_CONFIG" in os.environ

_ENDS_TIMEOUT_S = 60


class CopiedProcess:
    """A command that the template started, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, handle: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"penstock (pid {self.pid})", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._handle)
            os.close(self._status)

    def _look(self, timeout_s: float | None) -> int | None:
        """Returns the exit code once the process has ended, None if it has not in time."""
        if self.returncode is not None:
            return self.returncode
        end = select.poll()  # knows no highest number of a file, as select.select does
        end.register(self._handle, select.POLLIN)
        if not end.poll(None if timeout_s is None else timeout_s * 1000):
            return self.returncode
        with self._lock:
            if self.returncode is None:
                code = os.read(self._status, 16)
                if not code:
                    raise RuntimeError("the template is gone")
                os.close(self._handle)
                os.close(self._status)
                self.returncode = int(code)
            return self.returncode


class CommandTemplate:
    """The template as those who start commands see it."""

    def __init__(self) -> None:
        inherited = os.environ.get("PYTHONPATH")
        environment = os.environ | python_settings([str(SOURCE), inherited])
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                # A library for matrices starts a thread for each processor, and no copy has them.
                env=environment | {"OPENBLAS_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self._close)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        cwd: Path | None = None,
    ) -> CopiedProcess:
        """Starts `penstock` with arguments; without `stdin` it reads nothing."""
        place = str(cwd or Path.cwd())
        request = {"arguments": arguments, "environment": environment, "cwd": place}
        status, their_status = os.pipe()
        try:
            with self._lock:
                files = [their_status, stdout, stderr, *([] if stdin is None else [stdin])]
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                answer, (handle,), *_ = socket.recv_fds(self._socket, 16, 1)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(their_status)
        return CopiedProcess(int(answer), handle, status)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(_ENDS_TIMEOUT_S)


@cache
def template() -> CommandTemplate:
    """Returns the one template of this process, started when it is first needed."""
    return CommandTemplate()


def python_settings(paths: Sequence[str | None]) -> dict[str, str]:
    """Returns variables for Pythons that find modules in these places first."""
    path = os.pathsep.join(each for each in paths if each)
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def is_plain(environment: Iterable[str]) -> bool:
    """Whether only the command reads these variables, when it runs: Python reads its own first."""
    return not MEASURING and all(name.startswith(("PENSTOCK_", "XDG_")) for name in environment)


# -- inside the template --------------------------------------------------------------------------


class _Template:
    """Forks, and tells how each copy ended."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._ready = selectors.DefaultSelector()
        self._ready.register(requests, selectors.EVENT_READ)
        # Ctrl-C is for the copies; the template ends with those who ask it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> dict[str, Any] | None:
        """Returns the request in each copy, and None in the template when nobody can ask."""
        while True:
            for key, _ in self._ready.select():
                if key.data is not None:
                    self._tell_the_end(key.fd, *key.data)
                    continue
                message, files, *_ = socket.recv_fds(self._requests, REQUEST_BYTES_MAX, 4)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    self._become_a_copy(files)
                    request: dict[str, Any] = json.loads(message)
                    return request
                status, *others = files
                for each in others:
                    os.close(each)
                self._keep(pid, status)

    def _keep(self, pid: int, status: int) -> None:
        handle = os.pidfd_open(pid)
        self._ready.register(handle, selectors.EVENT_READ, (pid, status))
        socket.send_fds(self._requests, [str(pid).encode()], [handle])

    def _tell_the_end(self, handle: int, pid: int, status: int) -> None:
        _, how = os.waitpid(pid, 0)
        # Nobody may be left to read it.
        with suppress(BrokenPipeError):
            os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
        self._ready.unregister(handle)
        os.close(handle)
        os.close(status)

    def _become_a_copy(self, files: list[int]) -> None:
        """Closes what belongs to the template and to other copies."""
        status, stdout, stderr, *stdin = files
        for key in list(self._ready.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
                os.close(key.data[1])
        self._ready.close()
        self._requests.close()
        read = stdin[0] if stdin else os.open(os.devnull, os.O_RDONLY)
        for theirs, ours in ((read, 0), (stdout, 1), (stderr, 2)):
            os.dup2(theirs, ours)
            os.close(theirs)
        os.close(status)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _load() -> None:
    """Loads all that the command has loaded when a broker listens."""
    import penstock.cli.commands
    import penstock.cli.main
    import penstock.server.serve  # noqa: F401

    # Otherwise the first collection in each copy would write to all of it, and so copy it for real.
    gc.collect()
    gc.freeze()


def _run() -> None:
    _load()
    request = _Template(socket.socket(fileno=os.dup(0))).serve()
    if request is None:
        return
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # As `python -m penstock` leaves them.
    sys.path.append(os.getcwd())
    import penstock.__main__ as program
    from penstock.cli.main import main

    sys.argv = [str(Path(program.__file__).resolve()), *request["arguments"]]
    main()


if __name__ == "__main__":
    _run()
