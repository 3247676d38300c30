"""The commits of a table: files that come and files that go, all at once, whatever is killed when.

A commit is written down whole before the first file is touched: `_commits/<writer>/<batch>.json`.
From then on it is decided, and who meets it unfinished finishes it: another try, another writer, a
reader. Every step of it can be done twice, and by two at a time, since no name is ever used again.
When all is done its file is renamed to `.done`. A writer's batches rise, so its last one says that
those before are done too, and their files go.

Invariant: a batch of a writer has one commit. Must not know what is in the files, nor Spark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import msgspec

from penstock.model.errors import Internal
from penstock.spark.lake.files import Files

FOLDER = "_commits"

_NAME = re.compile(r"_commits/(?P<writer>[^/]+)/(?P<batch>\d{10,})\.(?P<state>json|done)")
_LONG = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


class Commit(msgspec.Struct, frozen=True):
    """`moves` are names of staged files and of what they become; both lists may be empty. `query`
    is the id of the streaming query whose batch it is, if it is one's: that of its checkpoint."""

    writer: str
    batch: int
    rows: int
    moves: list[tuple[str, str]]
    removals: list[str]
    query: str = ""

    @property
    def name(self) -> str:
        return f"{FOLDER}/{self.writer}/{self.batch:010}"


class Known(msgspec.Struct, frozen=True):
    """A name in the folder: a commit that is done, or not yet."""

    writer: str
    batch: int
    is_done: bool


State = tuple[Known, ...]
"""All that is known. It is never twice the same with a commit between."""


_decode = msgspec.json.Decoder(Commit).decode


def writer_name(text: str) -> str:
    """A name for files: the writer's, if it is short and has only letters, digits, points and
    dashes."""
    if not _UNSAFE.search(text) and not text.startswith(".") and len(text) <= _LONG:
        return text
    digest = hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
    return f"{_UNSAFE.sub('-', text).lstrip('.')[:_LONG]}-{digest}"


class Commits:
    def __init__(self, files: Files) -> None:
        self._files = files

    def state(self) -> State:
        matches = (_NAME.fullmatch(name) for name in self._files.find(f"{FOLDER}/*/*"))
        return tuple(
            Known(match["writer"], int(match["batch"]), match["state"] == "done")
            for match in matches
            if match is not None
        )

    def last(self, writer: str) -> Commit | None:
        """The last one of the writer that is done."""
        done = [one.batch for one in self.state() if one.writer == writer and one.is_done]
        if not done:
            return None
        text = self._files.read(f"{FOLDER}/{writer}/{max(done):010}.done")
        return None if text is None else _decode(text)

    def next_batch(self, writer: str) -> int:
        """For a writer that has no numbers of its own."""
        return max((one.batch for one in self.state() if one.writer == writer), default=-1) + 1

    def pending(self) -> list[Commit]:
        """Decided, and perhaps not done."""
        found = []
        for one in self.state():
            if not one.is_done:
                text = self._files.read(f"{FOLDER}/{one.writer}/{one.batch:010}.json")
                if text is not None:  # else it is done by now
                    found.append(_decode(text))
        return found

    def make(self, commit: Commit) -> None:
        """Decides it, and does it."""
        text = msgspec.json.encode(commit).decode()
        self._files.make_dirs(f"{FOLDER}/{commit.writer}")
        self._files.write(f"{commit.name}.json", text)
        self.finish(commit)

    def finish_all(self) -> None:
        for commit in self.pending():
            self.finish(commit)

    def finish(self, commit: Commit) -> None:
        for folder in sorted({to.rpartition("/")[0] for _, to in commit.moves} - {""}):
            self._files.make_dirs(folder)
        for name, to in commit.moves:
            if not self._files.rename(name, to):
                self._check_moved(commit, name, to)
        for name in commit.removals:
            self._files.delete(name)
        self._files.rename(f"{commit.name}.json", f"{commit.name}.done")
        self._forget(commit)

    def _check_moved(self, commit: Commit, name: str, to: str) -> None:
        """What is not there to be moved was moved before; it may even have been removed since, if
        another has finished the commit meanwhile."""
        if self._files.exists(to) or not self._files.exists(f"{commit.name}.json"):
            return
        raise Internal(
            f"{self._files.path(to)} is missing, and so is {self._files.path(name)} of which it "
            f"should be made: somebody has removed files of batch {commit.batch} of "
            f"{commit.writer} before it was finished"
        )

    def _forget(self, commit: Commit) -> None:
        """What the writer has left from earlier batches."""
        kept = f"{commit.name}.done"
        folder = f"{FOLDER}/{commit.writer}"
        for name in _below(self._files.find(f"{folder}/*"), kept):
            self._files.delete(name)


def _below(names: Sequence[str], kept: str) -> list[str]:
    """Not what is pending, nor newer: another may have gone on."""
    return [name for name in names if name < kept and not name.endswith(".json")]
