"""The files below a directory, on any file system that Hadoop reaches: file, hdfs, s3a and others.

Names are relative to the directory, with slashes. Invariant: a text is complete or absent, and an
error is one line with the path and the reason. Every method is one step of the file system, except
`write`, which is two. Must not know what the files are for.

Everything goes through the session's Java, where a call costs 70 µs: so a list is one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    Unavailable,
)

_GLOB_SIGNS = re.compile(r"([\\*?{}\[\]^])")
_GONE = ("java.io.FileNotFoundException", "java.nio.file.NoSuchFileException")
_DENIED = ("AccessControlException", "AccessDeniedException")
_AWAY = ("ConnectException", "UnknownHostException", "SocketTimeoutException", "NoRouteToHost")
_UNKNOWN = ("UnsupportedFileSystemException",)


class Files:
    """Cheap to make: it keeps nothing but the directory."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.root = root.rstrip("/") or "/"
        self._jvm = cast(Any, spark._jvm)
        with _java_errors(self.root, "be reached"):
            self._path = self._jvm.org.apache.hadoop.fs.Path
            conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
            found = self._path(self.root).getFileSystem(conf)
            self._base = found.makeQualified(self._path(self.root)).toString().rstrip("/")
            if self._base.startswith("file:"):
                # The raw one: the other keeps a hidden checksum file beside each file, and the two
                # cannot be renamed in one step.
                found = self._jvm.org.apache.hadoop.fs.FileSystem.getLocal(conf).getRawFileSystem()
            self._fs = found

    def path(self, name: str = "") -> str:
        """Returns the full path, for Spark."""
        return f"{self._base}/{name}" if name else self._base

    # -- reading -------------------------------------------------------------------------------

    def find(self, pattern: str) -> list[str]:
        """Returns the names that match a pattern like `topic=*/*.parquet`; * matches no slash."""
        with _java_errors(self.path(pattern), "be listed"):
            return self._names(self._statuses(pattern))

    def sizes(self, pattern: str) -> dict[str, int]:
        """Returns the size in bytes of each file that matches, with a call to Java for each."""
        with _java_errors(self.path(pattern), "be listed"):
            found = self._statuses(pattern)
            names = self._names(found)
            return {name: int(found[at].getLen()) for at, name in enumerate(names)}

    def exists(self, name: str = "") -> bool:
        with _java_errors(self.path(name), "be checked"):
            return bool(self._fs.exists(self._at(name)))

    def read(self, name: str) -> str | None:
        """Returns a small text; None if there is no such file."""
        with _java_errors(self.path(name), "be read"):
            try:
                stream = self._fs.open(self._at(name))
            except Py4JJavaError as error:
                if _class_of(error) in _GONE:
                    return None
                raise
            try:
                return bytes(stream.readAllBytes()).decode()
            finally:
                stream.close()

    # -- changing ------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> None:
        """Writes a small text under a name that is not in use. It appears all at once."""
        draft = f"{name}.draft"
        self.put(draft, text)
        if not self.rename(draft, name):
            raise FailedPrecondition(f"{self.path(name)} cannot be written: {draft} is gone")

    def put(self, name: str, text: str | bytes) -> None:
        """Writes a small text or a picture. A killed process may leave a part of it."""
        with _java_errors(self.path(name), "be written"):
            out = self._fs.create(self._at(name), True)
            try:
                out.write(text.encode() if isinstance(text, str) else text)
            finally:
                out.close()

    def rename(self, name: str, to: str) -> bool:
        """Returns False if there is no such file. The directory of `to` must exist, and `to` must
        not, unless it is the same file: on file systems that copy, a killed rename leaves both."""
        with _java_errors(self.path(to), "be written"):
            try:
                if self._fs.rename(self._at(name), self._at(to)):
                    return True
            except Py4JJavaError as error:
                if _class_of(error) not in _GONE:
                    raise
            if not self._fs.exists(self._at(name)):
                return False
            if self._fs.exists(self._at(to)):
                self._fs.delete(self._at(name), False)
                return True
        raise FailedPrecondition(f"{self.path(name)} cannot be renamed to {self.path(to)}")

    def delete(self, name: str) -> None:
        """Deletes a file, or a directory with everything in it. Does nothing if it is not there."""
        with _java_errors(self.path(name), "be removed"):
            at = self._at(name)
            if self._fs.delete(at, True) or not self._fs.exists(at):
                return
        raise FailedPrecondition(f"{self.path(name)} cannot be removed")

    def make_dirs(self, name: str) -> None:
        with _java_errors(self.path(name), "be made"):
            if self._fs.mkdirs(self._at(name)):
                return
        raise PermissionDenied(
            f"{self.path(name)} cannot be made: check that this user may write there"
        )

    # -- inside --------------------------------------------------------------------------------

    def _at(self, name: str) -> Any:
        return self._path(self.path(name))

    def _statuses(self, pattern: str) -> Any:
        base = _GLOB_SIGNS.sub(r"\\\1", self._base)
        return self._fs.globStatus(self._path(f"{base}/{pattern}")) or []

    def _names(self, statuses: Any) -> list[str]:
        if not len(statuses):
            return []
        paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(statuses)
        text = self._jvm.scala.collection.immutable.ArraySeq.unsafeWrapArray(paths).mkString("\n")
        return [path[len(self._base) + 1 :] for path in text.split("\n")]


def exactly(names: Sequence[str]) -> str:
    """Returns a pattern that matches these names and no others."""
    escaped = [_GLOB_SIGNS.sub(r"\\\1", name).replace(",", r"\,") for name in names]
    return escaped[0] if len(escaped) == 1 else f"{{{','.join(escaped)}}}"


@contextmanager
def _java_errors(path: str, verb: str) -> Iterator[None]:
    """Turns Java's exceptions into ours."""
    try:
        yield
    except Py4JJavaError as error:
        raise _error(error, f"{path} cannot {verb}") from None


def _class_of(error: Py4JJavaError) -> str:
    return str(error.java_exception.getClass().getName())


def _error(error: Py4JJavaError, what: str) -> PenstockError:
    name = _class_of(error)
    why = str(error.java_exception.getMessage() or name).strip().splitlines()[0]
    message = f"{what}: {why}"
    if name.endswith(_DENIED):
        return PermissionDenied(message)
    if name.endswith(_AWAY):
        return Unavailable(message)
    if name.endswith(_UNKNOWN) or "IllegalArgument" in name or "URISyntax" in name:
        return InvalidArgument(message)
    return FailedPrecondition(message)
