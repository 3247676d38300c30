"""Segments that are sealed and kept a while longer: their frames as they were.

A sealed message is safe in history, but not byte for byte. A shared stream that loses its end is
repaired with frames, and what it loses is the newest. So the newest sealed segments are renamed
instead of removed. The log no longer knows them. Must not know what a record means.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.segments import list_segments
from penstock.storage.vfs import Vfs, remove_if_there

KEPT_SEGMENTS = 2

_files = NumberedFiles("kept-", ".seg")
is_kept_name = _files.number

logger = logging.getLogger("penstock.storage")


def keep_segments(vfs: Vfs, directory: str, up_to_number: int) -> None:
    """Keeps the segments up to this number, which are about to be removed, and fewer of those that
    were kept before."""
    try:
        dropped = [each for each in list_segments(vfs, directory) if each[0] <= up_to_number]
        for number, path in dropped[-KEPT_SEGMENTS:]:
            vfs.rename(path, os.path.join(directory, _files.name(number)))
        for _, path in kept_segments(vfs, directory)[:-KEPT_SEGMENTS]:
            remove_if_there(vfs, path)
    except OSError as error:
        logger.warning("sealed segments cannot be kept for repairs of the stream: %s", error)


def kept_segments(vfs: Vfs, directory: str) -> list[tuple[int, str]]:
    """Returns number and path of the segments that are kept, oldest first."""
    return sorted(_numbered(directory, vfs.listdir(directory)))


def _numbered(directory: str, names: Iterable[str]) -> Iterable[tuple[int, str]]:
    for name in names:
        number = _files.number(name)
        if number is not None:
            yield number, os.path.join(directory, name)
