"""Build hook: writes the commit of the checkout into wheels and source archives.

Hatchling calls it. `penstock/server/build.py` reads the file, and `GET /v1/version` reports it.
An editable install gets no file: its code changes after the install, so the commit would become
wrong.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "penstock/server/commit.txt"


class CommitHook(BuildHookInterface[Any]):
    """Adds `commit.txt` to what is built, when the commit is known."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._written: Path | None = None
        root = Path(self.root)
        # A source archive brings the file along, and has no git checkout to ask.
        if version == "editable" or (root / "src" / PLACE).exists():
            return
        commit = commit_of(root)
        if commit is None:
            return
        with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
            file.write(f"{commit}\n")
        self._written = Path(file.name)
        place = f"src/{PLACE}" if self.target_name == "sdist" else PLACE
        build_data["force_include"][file.name] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._written is not None:
            self._written.unlink()


def commit_of(root: Path) -> str | None:
    """Returns the commit checked out at `root`, with `-dirty` if tracked files differ from it.

    Returns None when `root` is not the top of a git checkout or git is not installed.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        commit = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changes else commit


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
