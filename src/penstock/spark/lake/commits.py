"""The commits of a table: each adds and removes files all at once, even if a process is killed.

A commit is first written as a whole: `_commits/<writer>/<batch>.json`. From then on it is decided.
Anyone who finds it unfinished finishes it: another try, another writer or a reader. Every step can
be done twice, and by two processes at a time, because no file name is ever used again. At the end
the commit's file is renamed to `.done`. A writer's batch numbers rise, so its last commit says that
the earlier ones are done, and their files are deleted.

Invariant: a batch of a writer has one commit. Must not know what is in the files, or Spark.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from penstock.model.errors import Internal
from penstock.spark.lake.files import Files

FOLDER = "_commits"

_NAME = re.compile(r"_commits/(?P<writer>[^/]+)/(?P<batch>\d{10,})\.(?P<state>json|done)")
_LONG = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


class Commit(msgspec.Struct, frozen=True):
    """`moves` are pairs of a staged file and its final name. `query` is the id of the streaming
    query that the batch belongs to, if there is one; the id is kept in the query's checkpoint."""

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
    """A commit that has a file in the folder, done or not."""

    writer: str
    batch: int
    is_done: bool


State = tuple[Known, ...]
"""All known commits. If two states are equal, there was no commit between them."""


_decode = msgspec.json.Decoder(Commit).decode


def writer_name(text: str) -> str:
    """Returns the writer's own name if it can be a file name; otherwise one with a hash."""
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
        """Returns the writer's last finished commit."""
        done = [one.batch for one in self.state() if one.writer == writer and one.is_done]
        if not done:
            return None
        text = self._files.read(f"{FOLDER}/{writer}/{max(done):010}.done")
        return None if text is None else _decode(text)

    def next_batch(self, writer: str) -> int:
        """Returns the next number for a writer that does not number its batches itself."""
        return max((one.batch for one in self.state() if one.writer == writer), default=-1) + 1

    def pending(self) -> list[Commit]:
        """Returns commits that are decided, and perhaps not finished."""
        found = []
        for one in self.state():
            if not one.is_done:
                text = self._files.read(f"{FOLDER}/{one.writer}/{one.batch:010}.json")
                if text is not None:  # otherwise it has been finished meanwhile
                    found.append(_decode(text))
        return found

    def make(self, commit: Commit) -> None:
        """Decides a commit and finishes it."""
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
        """Accepts a missing file that was moved before, and perhaps deleted since."""
        if self._files.exists(to) or not self._files.exists(f"{commit.name}.json"):
            return
        raise Internal(
            f"{self._files.path(to)} is missing, and so is {self._files.path(name)}, from which it "
            f"is made: files of batch {commit.batch} of {commit.writer} were removed before its "
            "commit was finished"
        )

    def _forget(self, commit: Commit) -> None:
        """Deletes the files of the writer's earlier commits. Leaves out pending and newer ones:
        another process may have continued."""
        for name in self._files.find(f"{FOLDER}/{commit.writer}/*"):
            if name < f"{commit.name}.done" and not name.endswith(".json"):
                self._files.delete(name)
