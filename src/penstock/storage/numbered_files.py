"""Names of files that are numbered, such as `history-00000000000000000001.arrow`.

Invariant: names sort as their numbers do. Must not know what the files hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from penstock.storage.vfs import Vfs, remove_if_there


class NumberedFiles:
    """The files of one kind."""

    def __init__(self, prefix: str, suffix: str) -> None:
        self._prefix = prefix
        self._suffix = suffix
        self._pattern = re.compile(rf"{re.escape(prefix)}([0-9]{{20}}){re.escape(suffix)}")

    def name(self, number: int) -> str:
        return f"{self._prefix}{number:020d}{self._suffix}"

    def number(self, name: str) -> int | None:
        """Returns the number in the name, or None if it is no name of this kind."""
        match = self._pattern.fullmatch(name)
        return int(match[1]) if match else None

    def remove(self, vfs: Vfs, directory: str, numbers: Iterable[int]) -> None:
        """Deletes the files with these numbers, which the manifest must no longer name."""
        for number in numbers:
            remove_if_there(vfs, os.path.join(directory, self.name(number)))
