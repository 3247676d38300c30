"""Every marked example of README and docs/ does what the page says, against a real broker."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, takewhile, zip_longest
from pathlib import Path

import pytest

from tests.broker_process import SOURCE, BrokerProcess
from tests.docs.documents import DOCUMENTS, ROOT, Block, blocks_of
from tests.quick_java import quick_java
from tests.websocket import TEXT, WebSocket

PAGE_ADDRESS = "127.0.0.1:8080"
EXAMPLE_TIMEOUT_S = 600.0
# A look takes a second of the processor that what is looked at needs.
LOOK_AGAIN_S = 2.0

PAGES = [path for path in DOCUMENTS if "<!-- runs -->" in path.read_text(encoding="utf-8")]

# Reading a stream for a given time and no longer is what --max-time was asked for.
_PRELUDE = """\
set -euo pipefail
curl() { local code=0; command curl "$@" || code=$?; [ $code -eq 28 ] || return $code; }
"""
_WIDTHS = {"…": ".*", "  ": " {2,}", "--": "-{3,}", "──": "─{3,}"}


@pytest.mark.skipif(
    shutil.which("curl") is None and "CI" not in os.environ, reason="curl is not installed"
)
@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_the_examples_of_a_page_run_in_its_order(page: Path, reader: Reader) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for block, following in zip_longest(blocks, blocks[1:]):
        place = f"{page.name}, line {block.line}"
        if block.mark == "serves":
            reader.serve(block.text)
        elif block.mark == "stops":
            reader.stop()
        elif block.mark == "speaks":
            reader.speak(block, place)
        elif block.mark == "stays":
            reader.begin(block, place)
        elif block.mark == "runs":
            if following is not None and following.mark == "prints":
                reader.look(block, place, following.text)
            else:
                printed = reader.run(block, place)
                assert '"error"' not in printed, f"{place}: prints\n{printed}"
    reader.end()


@pytest.mark.parametrize("program", ["fan_out.py", "rate_limit.py", "agent_runs.py", "orders.py"])
def test_a_program_prints_what_it_says_it_prints(program: str, reader: Reader) -> None:
    """It says so in its docstring, indented, behind "It prints"."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / program).read_text())) or ""
    _, _, said = docstring.partition("\nIt prints\n\n")
    expected = "".join(takewhile(lambda line: line.startswith("    "), said.splitlines(True)))
    # A durable stream needs a disk.
    reader.serve("penstock serve" if program == "orders.py" else "penstock serve --memory")
    command = f"{sys.executable} -W error examples/{program}\n"
    printed = reader.run(Block("runs", "sh", command, 1), program)
    assert _lines(printed) == [line.strip() for line in _lines(expected)] != []


@pytest.mark.parametrize(
    ("printed", "is_meant"),
    [
        ("run    rows\n----  -----\nfig   3 rows\nnut\nend\n", True),
        ("run   rows\n----  ----\nfig   … rows\nend\n", True),
        ("run   rows\n----  ----\nfig   3 rows\nnut\n", False),
        ("run   rows\n----  ----\nfig   3 more\nend\n", False),
        ("run rows\n----  ----\nfig   3 rows\nend\n", False),
        ("run   rows\n----  ----\nfig   3 rows\nend\nend\nmore\n", False),
    ],
)
def test_what_is_printed_differs_from_the_page_in_widths_and_where_the_page_has_dots(
    printed: str, is_meant: bool
) -> None:
    page = "run   rows\n---   ----\n\nfig   … rows\n…\nend\n"
    assert _matches(page, printed) is is_meant


class Reader:
    """Somebody who follows a page by hand, in a directory of their own."""

    def __init__(self, directory: Path, spark_classes: Path) -> None:
        self._directory = directory
        self._spark_classes = spark_classes
        self._broker: BrokerProcess | None = None
        self._going_on: list[tuple[subprocess.Popen[str], str]] = []
        commands = directory / "bin"
        commands.mkdir()
        for name, words in (("penstock", "-m penstock "), ("python", "")):
            command = commands / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            command.chmod(0o755)
        (directory / "examples").symlink_to(ROOT / "examples")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        path = os.pathsep.join([str(commands), inherited["PATH"]])
        self._environment = inherited | {
            "PATH": path,
            "PYTHONPATH": str(SOURCE),
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def serve(self, command: str) -> None:
        """Starts what the page starts, but on a free port; a broker before it is killed."""
        self.leave()
        program, action, *flags = shlex.split(command, comments=True)
        assert (program, action) == ("penstock", "serve"), command
        data_dir: Path | None = self._directory / "penstock-data"
        if "--data-dir" in flags:
            at = flags.index("--data-dir")
            data_dir = self._directory / flags[at + 1]
            del flags[at : at + 2]
        if "--memory" in flags:
            flags.remove("--memory")
            data_dir = None
        env = {"PYTHONPATH": str(self._directory)}
        self._broker = BrokerProcess(data_dir, *flags, env=env, cwd=self._directory).start()

    def run(self, block: Block, place: str) -> str:
        """What the example prints. It must succeed."""
        process = self._started(block, place, subprocess.PIPE)
        try:
            printed, complaints = process.communicate(timeout=EXAMPLE_TIMEOUT_S)
        except BaseException:
            _kill(process)
            raise
        assert process.returncode == 0, f"{place}: exit code {process.returncode}\n{complaints}"
        return printed.replace(self._address(), PAGE_ADDRESS)

    def look(self, block: Block, place: str, expected: str) -> None:
        """The example prints that: at once, or in time if it looks at one that goes on."""
        deadline = time.monotonic() + EXAMPLE_TIMEOUT_S
        while not _matches(expected, printed := self.run(block, place)):
            goes_on = any(process.poll() is None for process, _ in self._going_on)
            is_in_time = goes_on and time.monotonic() < deadline
            assert is_in_time, f"{place}: prints\n{printed}"
            time.sleep(LOOK_AGAIN_S)

    def begin(self, block: Block, place: str) -> None:
        """An example that goes on. What it says is the page's test's, if it fails."""
        process = self._started(block, place)
        self._going_on.append((process, place))

    def end(self) -> None:
        """What went on was ended by the page, and well."""
        for process, place in self._going_on:
            code = process.wait(EXAMPLE_TIMEOUT_S)
            assert code == 0, f"{place}: exit code {code}"
        self._going_on.clear()

    def _started(
        self, block: Block, place: str, output: int | None = None
    ) -> subprocess.Popen[str]:
        """In a group of processes of its own, to be killed with what it has started."""
        scheme = "http" if self._broker is None else self._broker.scheme
        at = {"PENSTOCK_URL": f"{scheme}://{self._address()}"}
        return subprocess.Popen(
            self._command(block, place),
            cwd=self._directory,
            env=self._environment | at | quick_java(self._spark_classes),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )

    def _command(self, block: Block, place: str) -> list[str]:
        assert block.language in ("sh", "python"), f"{place}: cannot run {block.language!r}"
        text = block.text.replace(PAGE_ADDRESS, self._address())
        if block.language == "sh":
            return ["bash", "-c", _PRELUDE + text]
        return [sys.executable, "-W", "error", "-c", text]

    def speak(self, block: Block, place: str) -> None:
        """Over a WebSocket of its own: every frame that the page shows, and in its order."""
        assert self._broker is not None, "no broker was started"
        with WebSocket(self._broker.port) as socket:
            for line in _lines(block.text):
                arrow, _, frame = line.partition(" ")
                if arrow == "→":
                    socket.send_frame(TEXT, frame.encode())
                else:
                    assert arrow == "←", f"{place}: neither sent nor received: {line}"
                    _, payload = socket.receive_frame()
                    assert _pattern(frame).fullmatch(payload.decode()), f"{place}: {payload!r}"

    def stop(self) -> None:
        assert self._broker is not None, "no broker was started"
        assert self._broker.terminate() == 0
        self.leave()

    def give_up(self) -> None:
        """What still goes on is killed, with what it has started."""
        for process, _ in self._going_on:
            if process.poll() is None:
                _kill(process)
        self._going_on.clear()

    def leave(self) -> None:
        if self._broker is not None:
            self._broker.close()
            self._broker = None

    def _address(self) -> str:
        return PAGE_ADDRESS if self._broker is None else f"127.0.0.1:{self._broker.port}"


@pytest.fixture(scope="session")
def spark_classes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the first example that uses Spark leaves its classes for the others: 200 MB."""
    archive = tmp_path_factory.getbasetemp() / "spark-classes.jsa"
    yield archive
    archive.unlink(missing_ok=True)


@pytest.fixture
def reader(tmp_path: Path, spark_classes: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, spark_classes)
    try:
        yield reader
    finally:
        reader.give_up()
        reader.leave()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _matches(expected: str, printed: str) -> bool:
    """Line by line; blank lines (heartbeats) and space at a line's end do not count."""
    wanted = "".join(
        r"(?:.*\n)*?" if line == "…" else f"{_pattern(line).pattern}\n" for line in _lines(expected)
    )
    return re.fullmatch(wanted, "".join(f"{line}\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _pattern(line: str) -> re.Pattern[str]:
    """How wide a column and the line below its name are depends on what is in it."""
    parts = re.split(r"(…| {2,}|-{3,}|─{3,})", line)
    loose = [_WIDTHS[part[:2]] for part in parts[1::2]]
    exact = [re.escape(part) for part in parts[::2]]
    return re.compile("".join(chain.from_iterable(zip(exact, [*loose, ""], strict=True))))
