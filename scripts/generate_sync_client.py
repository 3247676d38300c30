"""Writes the blocking client from the asyncio one.

.venv/bin/python scripts/generate_sync_client.py           writes the generated modules
.venv/bin/python scripts/generate_sync_client.py --check   fails if one of them is not current

The modules `aio*.py` of `penstock.client` are the source; each `sync*.py` of `GENERATED` is its
source after the replacements below, sorted and formatted by ruff. `*_waiting` and `*_socket_runner`
are written by hand for both: they hold the differences that replacing words cannot express.
`scripts/check` and a unit test run the check.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "src" / "penstock" / "client"

GENERATED = {
    "aio.py": "sync.py",
    "aio_events.py": "sync_events.py",
    "aio_feeds.py": "sync_feeds.py",
    "aio_handles.py": "sync_handles.py",
    "aio_socket.py": "sync_socket.py",
    "aio_socket_events.py": "sync_socket_events.py",
    "aio_socket_feeds.py": "sync_socket_feeds.py",
    "aio_transactions.py": "sync_transactions.py",
    "aio_transport.py": "sync_transport.py",
    "aio_worker_base.py": "sync_worker_base.py",
}

REPLACEMENTS = [
    # The longer text first: "an `async with`" contains "async with".
    (r"an `async with`", "a `with`"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b(?:Coroutine\[Any, Any, |Awaitable\[)(\w+)\]", r"\1"),
    (r"Async(?=[A-Z])", ""),
    (r"\baio(?=_|\b)", "sync"),
    (r"\b__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\ba(close|iter_raw|next|read)\b", r"\1"),
    (r"\bfor asyncio\b", "for blocking code"),
    (r"\bTasks of one event loop\b", "Threads"),
    (r"\b([Aa]nother|[Oo]ne) task\b", r"\1 thread"),
]


def main() -> None:
    stale = [target for source, target in GENERATED.items() if not is_current(source, target)]
    if "--check" in sys.argv[1:]:
        if stale:
            command = shlex.join([".venv/bin/python", str(Path(__file__).relative_to(ROOT))])
            sys.exit(f"not current: {', '.join(stale)}; run {command}")
        return
    for source, target in GENERATED.items():
        if target in stale:
            (CLIENT / target).write_text(generated(source, target), encoding="utf-8")


def is_current(source: str, target: str) -> bool:
    path = CLIENT / target
    return path.exists() and path.read_text(encoding="utf-8") == generated(source, target)


def generated(source: str, target: str) -> str:
    """Returns what the module `target` should contain."""
    text = (CLIENT / source).read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    notice = f"# Generated from {source} by scripts/generate_sync_client.py: edit that, run this.\n"
    # Imports change their order, and some are needed by asyncio only.
    text = ruff(notice + text, target, "check", "--fix", "--quiet", "--select", "I,F401")
    return ruff(text, target, "format", "--quiet")


def ruff(text: str, target: str, *command: str) -> str:
    """Returns the text after a command of ruff that reads stdin, as if it were in `target`."""
    config = ("--no-cache", "--config", str(ROOT / "pyproject.toml"))
    arguments = [*command, *config, "--stdin-filename", str(CLIENT / target), "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        sys.exit(f"ruff failed on {target}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
