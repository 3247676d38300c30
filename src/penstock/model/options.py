"""Options given as text: the kinds of values they take, and one style of error.

The broker's settings, the options of format("penstock") and those of pipelines are declared with
these classes. Invariant: an option that is unknown or has a wrong value raises InvalidArgument,
which names the option, what was given and what is allowed. Must not know what an option is for, or
where its text comes from.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, TypeVar

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_OFFSET
from penstock.model.names import clean_name
from penstock.model.units import format_duration, parse_duration_ms, parse_size

N = TypeVar("N", int, float)

_AMOUNT = re.compile(r"\s*[0-9]+\s*[A-Za-z]*\s*")

MAX_LISTED_NAMES = 20
"""An error that lists more known names than this is harder to read than the documentation."""


class WrongValue(ValueError):
    """The text is not a value of its kind. The message continues a sentence that begins with the
    value: "is longer than 200 bytes"."""


@dataclass(frozen=True)
class Kind:
    """A kind of value. `takes` describes it in errors; `parse` converts a text, or raises
    ValueError. `least` and `most` are the bounds of one that may be given as a number, too."""

    takes: str
    parse: Callable[[str], Any]
    least: int = 0
    most: int = MAX_OFFSET

    def described(self, takes: str) -> Kind:
        return replace(self, takes=takes)

    def refusal(self, given: object, reason: str = "") -> str:
        """Returns the text of the error for a value that is not allowed."""
        return f"{given} {reason or 'is not allowed'}; it takes {self.takes}"


@dataclass(frozen=True)
class Option:
    """`help` says what the option does. `default` is a text, as a user would give it."""

    name: str
    kind: Kind
    help: str = ""
    default: str | None = None
    is_required: bool = False
    is_secret: bool = False

    @property
    def takes(self) -> str:
        return f"{self.kind.takes}: {self.help}" if self.help else self.kind.takes

    def read(self, text: str, label: str = "") -> Any:
        """Returns the value. `label` names the option in errors, if it is not `option <name>`."""
        try:
            return self.kind.parse(text)
        except (ValueError, OverflowError) as error:
            reason = str(error) if isinstance(error, WrongValue) else ""
            raise self.wrong(text, label, reason) from None

    def wrong(self, given: object, label: str = "", reason: str = "") -> InvalidArgument:
        """Returns the error for a value that is not allowed."""
        shown = "the value" if self.is_secret else repr(given)
        text = self.kind.refusal(shown, reason)
        return InvalidArgument(f"{label or f'option {self.name}'}: {text}")

    def missing(self, label: str = "") -> InvalidArgument:
        """Returns the error for a required option that is not given."""
        return InvalidArgument(
            f"{label or f'option {self.name}'} is required; it takes {self.kind.takes}"
        )


def read_member(kind: Kind, name: str, given: str | int) -> Any:
    """Returns the value of a member of a body, which may be a number already."""
    if isinstance(given, int):
        return check_number(name, given, kind.least, kind.most)
    try:
        return kind.parse(given)
    except (ValueError, OverflowError) as error:
        reason = str(error) if isinstance(error, WrongValue) else ""
        raise InvalidArgument(f"{name}: {kind.refusal(repr(given), reason)}") from None


def check_number(name: str, value: int, least: int = 0, most: int = MAX_OFFSET) -> int:
    """Returns a number that was not given as a text. Raises unless it is within its bounds."""
    if not least <= value <= most:
        bounds = _bounds(least, most)
        raise InvalidArgument(f"{name} must be a whole number{bounds}, not {value}")
    return value


def unknown_name(name: str, known: Iterable[str], noun: str = "option") -> str:
    """Says that there is no such option, and which one was probably meant."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if near:
        return f"unknown {noun} {name}; did you mean {by_lower[near[0]]}?"
    if len(by_lower) > MAX_LISTED_NAMES:
        return f"unknown {noun} {name}"
    return f"unknown {noun} {name}; there are {', '.join(by_lower.values()) or 'none'}"


# -- numbers ---------------------------------------------------------------------------------------


def whole_number(least: int | None = None, most: int | None = None) -> Kind:
    def parse(text: str) -> int:
        if not text.isascii():
            raise WrongValue
        return _within(int(text), least, most)

    return Kind("a whole number" + _bounds(least, most), parse, least or 0, most or MAX_OFFSET)


def number(least: float | None = None, most: float | None = None, unit: str = "") -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if (least is not None or most is not None) and not math.isfinite(value):
            raise WrongValue
        return _within(value, least, most)

    noun = f"a number of {unit}" if unit else "a number"
    return Kind(noun + _bounds(least, most, lambda bound: f"{bound:.6g}"), parse)


def duration_ms(least: int = 0, most: int | None = None) -> Kind:
    """Milliseconds; a number without a unit is milliseconds already."""

    def parse(text: str) -> int:
        ms = parse_duration_ms(text)
        if ms is None:
            raise WrongValue
        return _within(ms, least, most)

    noun = "milliseconds or a duration such as 500ms, 5s or 7d"
    takes = noun + _bounds(least or None, most, format_duration)
    return Kind(takes, parse, least, most or MAX_OFFSET)


def size_bytes(least: int = 0, most: int | None = None) -> Kind:
    def parse(text: str) -> int:
        size = parse_size(text)
        if size is None:
            raise WrongValue
        return _within(size, least, most)

    takes = "bytes or a size such as 64MiB" + _bounds(least or None, most)
    return Kind(takes, parse, least, most or MAX_OFFSET)


def per_second(amount: Kind, example: str) -> Kind:
    """An amount per second. As a text it ends in `/s`."""

    def parse(text: str) -> int:
        count, _, unit = text.partition("/")
        if unit.strip() != "s" or not _AMOUNT.fullmatch(count):
            raise WrongValue
        return int(amount.parse(count))

    takes = f"a number per second, or a rate such as {example}"
    return Kind(takes, parse, amount.least, amount.most)


def _within(value: N, least: N | None, most: N | None) -> N:
    if (least is not None and value < least) or (most is not None and value > most):
        raise WrongValue
    return value


def _bounds(least: Any, most: Any, show: Callable[[Any], str] = str) -> str:
    if least is None:
        return "" if most is None else f", at most {show(most)}"
    return f", at least {show(least)}" if most is None else f", {show(least)} to {show(most)}"


# -- words -----------------------------------------------------------------------------------------


def choice(*words: str) -> Kind:
    """One of a few words, whatever its case."""

    def parse(text: str) -> str:
        chosen = text.strip().lower()
        if chosen not in words:
            raise WrongValue
        return chosen

    return Kind(f"{', '.join(words[:-1])} or {words[-1]}", parse)


def _boolean(takes: str, true: set[str], false: set[str]) -> Kind:
    def parse(text: str) -> bool:
        word = text.strip().lower()
        if word not in true | false:
            raise WrongValue
        return word in true

    return Kind(takes, parse)


def pattern(regex: str, takes: str) -> Kind:
    """A text that the regular expression matches as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(regex, text):
            raise WrongValue
        return text

    return Kind(takes, parse)


def list_of(kind: Kind, takes: str, *, skip_empty: bool = False) -> Kind:
    """Values with commas between, each kept once. `skip_empty` allows `a,,b` and nothing at all."""

    def parse(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        return tuple(dict.fromkeys(kind.parse(part) for part in parts if part or not skip_empty))

    return Kind(takes, parse)


def parse_name(text: str) -> str:
    """Parses the name of a topic, a group or a cache."""
    if not text.strip():
        raise WrongValue
    try:
        return clean_name(text, "it")
    except InvalidArgument as error:
        raise WrongValue(error.message.removeprefix("it ")) from None


def _parse_cache(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 3:
        raise WrongValue
    return "/".join(parse_name(part) for part in parts)


TEXT = Kind("a text", str)
NAME = Kind("a name", parse_name)
TOPIC = Kind("a topic", parse_name)
CACHE = Kind("tenant/namespace/cache", _parse_cache)
TRUE_OR_FALSE = _boolean("true or false", {"true"}, {"false"})
YES_OR_NO = _boolean("yes or no", {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""})

# -- times -----------------------------------------------------------------------------------------

_TIME = "a time in RFC 3339, like 2025-01-31T12:00:00Z"

Moment = datetime | timedelta
"""A time, or how long before the start of a run it is."""


def _parse_time(text: str, zone: tzinfo | None = None) -> datetime:
    time = datetime.fromisoformat(text.strip())
    if time.tzinfo is None and zone is not None:
        return time.replace(tzinfo=zone)
    if time.tzinfo is None:
        raise WrongValue("has no time zone: add Z or +02:00")
    return time


def _parse_time_ms(text: str) -> int:
    word = text.strip()
    if word.isdigit():
        return _within(int(word), 0, 2**63 - 1)
    ms = round(_parse_time(word).timestamp() * 1000)
    if ms < 0:
        raise WrongValue("is before 1970")
    return ms


def _parse_moment(text: str, zone: tzinfo | None = None) -> Moment:
    ms = parse_duration_ms(text)
    if ms is not None and not text.strip().isdigit():
        return timedelta(milliseconds=ms)
    return _parse_time(text, zone)


TIME_MS = Kind(f"{_TIME}, or milliseconds since 1970", _parse_time_ms)
_AGO = "or how long ago: 90s, 15m, 2h, 7d"
MOMENT = Kind(f"{_TIME}, {_AGO}", _parse_moment)
UTC_MOMENT = Kind(f"{_TIME} (UTC without a zone), {_AGO}", partial(_parse_moment, zone=UTC))


def moment_at(moment: Moment | None, now: datetime) -> datetime | None:
    """The time that a moment means in a run that starts `now`."""
    return now - moment if isinstance(moment, timedelta) else moment
