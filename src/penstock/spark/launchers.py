"""Small shell scripts that start a program with other arguments, kept in the user's cache.

Invariant: a script is complete or absent. Its name is a hash of its text, so two processes that
make it at the same time write the same file. Must not know what is started.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "penstock"


def name_for(what: str, text: str) -> str:
    return f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def make_launcher(path: Path, text: str) -> Path:
    """Writes the script if it is not there, and returns its path. May raise OSError."""
    if _holds(path, text):
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o700)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return path


def _holds(launcher: Path, text: str) -> bool:
    try:
        return launcher.read_text(encoding="utf-8") == text and os.access(launcher, os.X_OK)
    except (OSError, UnicodeDecodeError):
        return False
