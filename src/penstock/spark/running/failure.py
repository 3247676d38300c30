"""What made a pipeline fail, in words for the person who runs it.

Spark wraps what a Python function raised into Java's exception, and that into Python's again, each
with its own stack. Invariant: what is said begins with what the person can act on, their own error
or the broker's, and has no token in it.
"""

from __future__ import annotations

import re
import traceback

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from penstock.model.errors import FailedPrecondition, PenstockError

MOST_CHARS = 2000
_TRACEBACK = "Traceback (most recent call last):"
_ENDS = re.compile(r"^(?:\s*at \S+\(|SQLSTATE|Caused by:|JVM stacktrace:|=== )")
_OURS = re.compile(r"^penstock\.model\.errors\.(\w+): (?P<said>.*)", re.MULTILINE)
_CALLING = re.compile(r"^An error occurred while calling .*\n: (?:[\w.$]+: )?")
_BEFORE_PLAN = re.compile(r"SQLSTATE: \w{5};$")
_CAUSE = re.compile(r"^Caused by: (?:[\w.$]+: )*(?P<said>.*)$", re.MULTILINE)
_IN_OUR_WORDS = {
    " (option retrySeconds)": "",
    "set the option token, or PENSTOCK_TOKEN before Spark starts": (
        "give it with --token or PENSTOCK_TOKEN"
    ),
}
_MARKS = re.compile(r"\s*[~^]+\s*")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
_OF_SPARK = ("/pyspark/", "/py4j/", "pyspark.zip", "/penstock/spark/", "<frozen ")


class PipelineFailed(FailedPrecondition):
    """Which pipeline, query and batch, and why."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(f"{where}: {said(error)}")
        self.where = where
        self.error = error


def said(error: BaseException) -> str:
    """Why; then where, in code that is neither Spark's nor ours."""
    if isinstance(error, PenstockError):
        return in_our_words(error.message)
    if isinstance(error, PySparkException):
        why = _of_spark(str(error), getattr(error, "_stackTrace", None) or "")
    elif isinstance(error, Py4JJavaError):
        why = _of_spark(_CALLING.sub("", str(error)), str(error))
    else:
        why = f"{type(error).__name__}: {error}"
    if any(map(_FRAME.match, why.splitlines())):
        return _shortened(why)
    stack = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return _shortened("\n".join([why, *_own_frames(stack)]))


def _of_spark(text: str, java_stack: str) -> str:
    ours = list(_OURS.finditer(text))
    if ours:
        return in_our_words(ours[-1]["said"])
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return _with_cause(_plain(text), java_stack)
    stack: list[str] = []
    why: list[str] = []
    for line in text[at + len(_TRACEBACK) :].splitlines()[1:]:
        if _ENDS.match(line):
            break
        if why or not line.startswith("  "):
            why.append(line)
        else:
            stack.append(line)
    return "\n".join(["\n".join(why).strip(), *_own_frames(stack)])


def _plain(text: str) -> str:
    """Without Java's stack, and without the plan that Spark adds to what it says of a query."""
    kept: list[str] = []
    for line in text.splitlines():
        if _ENDS.match(line):
            break
        kept.append(line)
        if _BEFORE_PLAN.search(line):
            break
    return "\n".join(kept).strip().removesuffix(";") or text[:MOST_CHARS]


def _with_cause(text: str, stack: str) -> str:
    """And what it comes from: Spark says that a task failed, Java that no space is left."""
    causes = [each["said"].strip() for each in _CAUSE.finditer(stack)]
    if not causes or not causes[-1] or causes[-1] in text or "\n" in text:
        return text
    return f"{text}: {causes[-1]}"


def in_our_words(text: str) -> str:
    """The connector's advice, as who gives commands can follow it."""
    for its, ours in _IN_OUR_WORDS.items():
        text = text.replace(its, ours)
    return text


def _own_frames(stack: list[str]) -> list[str]:
    """The frames of a stack that belong to neither Spark nor this package, each with its code."""
    kept: list[str] = []
    is_own = False
    for line in stack:
        frame = _FRAME.match(line)
        if frame is not None:
            is_own = not any(part in frame["file"] for part in _OF_SPARK)
        if is_own and not _MARKS.fullmatch(line):
            kept.append(line)
    return kept


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"
