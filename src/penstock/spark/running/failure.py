"""Describes why a pipeline failed, for the person who runs it.

Spark wraps an exception of a Python function into one of Java, and that into one of Python again,
each with its own stack. Invariant: the description begins with what the person can act on, their
own error or the broker's, and never shows a token.
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
_OURS = re.compile(r"^penstock\.model\.errors\.(\w+): (?P<message>.*)", re.MULTILINE)
_CALLING = re.compile(r"^An error occurred while calling .*\n: (?:[\w.$]+: )?")
_BEFORE_PLAN = re.compile(r"SQLSTATE: \w{5};$")
_CAUSE = re.compile(r"^Caused by: (?:[\w.$]+: )*(?P<message>.*)$", re.MULTILINE)
_COMMAND_ADVICE = {
    " (option retrySeconds)": "",
    "set the option token, or PENSTOCK_TOKEN before Spark starts": (
        "give it with --token or PENSTOCK_TOKEN"
    ),
}
_MARKS = re.compile(r"\s*[~^]+\s*")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)"')
_NOT_THE_USERS = ("/pyspark/", "/py4j/", "pyspark.zip", "/penstock/spark/", "<frozen ")


class PipelineFailed(FailedPrecondition):
    """A pipeline has failed: in which query and batch, and why."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(f"{where}: {describe_error(error)}")
        self.where = where
        self.error = error


def describe_error(error: BaseException) -> str:
    """Says why, then where, if that is in code that belongs to neither Spark nor this package."""
    if isinstance(error, PenstockError):
        return advice_for_commands(error.message)
    if isinstance(error, PySparkException):
        why = _describe_spark_error(str(error), getattr(error, "_stackTrace", None) or "")
    elif isinstance(error, Py4JJavaError):
        why = _describe_spark_error(_CALLING.sub("", str(error)), str(error))
    else:
        why = f"{type(error).__name__}: {error}"
    if any(map(_FRAME.match, why.splitlines())):
        return _shortened(why)
    stack = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return _shortened("\n".join([why, *_own_frames(stack)]))


def _describe_spark_error(text: str, java_stack: str) -> str:
    ours = list(_OURS.finditer(text))
    if ours:
        return advice_for_commands(ours[-1]["message"])
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
    """Leaves out Java's stack, and the query plan that Spark adds to its errors."""
    kept: list[str] = []
    for line in text.splitlines():
        if _ENDS.match(line):
            break
        kept.append(line)
        if _BEFORE_PLAN.search(line):
            break
    return "\n".join(kept).strip().removesuffix(";") or text[:MOST_CHARS]


def _with_cause(text: str, stack: str) -> str:
    """Adds the root cause: Spark says that a task failed, Java that no space is left."""
    causes = [each["message"].strip() for each in _CAUSE.finditer(stack)]
    if not causes or not causes[-1] or causes[-1] in text or "\n" in text:
        return text
    return f"{text}: {causes[-1]}"


def advice_for_commands(text: str) -> str:
    """Replaces the connector's advice by advice for the command line."""
    for connectors, ours in _COMMAND_ADVICE.items():
        text = text.replace(connectors, ours)
    return text


def _own_frames(stack: list[str]) -> list[str]:
    """Returns the frames, with their code, that belong to neither Spark nor this package."""
    kept: list[str] = []
    is_own = False
    for line in stack:
        frame = _FRAME.match(line)
        if frame is not None:
            is_own = not any(part in frame["file"] for part in _NOT_THE_USERS)
        if is_own and not _MARKS.fullmatch(line):
            kept.append(line)
    return kept


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"
