"""The commit that this broker was built from, as `GET /v1/version` reports it.

The build hook (`hatch_build.py`) writes `commit.txt` into a wheel that is built from a git
checkout. An editable install has no such file, since its code changes after the install.
"""

from __future__ import annotations

from pathlib import Path


def read_commit(file: Path) -> str:
    """Returns the commit in `file`, or `unknown` if there is no such file."""
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return "unknown"


COMMIT = read_commit(Path(__file__).with_name("commit.txt"))
