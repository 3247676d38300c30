"""Normalises failure reasons: removes ids, numbers, names, times and other things that vary.

Invariant: `normalised` and `normalised_column` return the same text for the same reason. Both use
one table of rules, so a pattern must mean the same to Python and to Java: characters are listed one
by one, never as \\d, \\s, \\w or \\b, which the two read differently; a `[` in a class has a
backslash, because Java would nest it; no pattern matches the empty text. Must not know where
reasons come from.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

MAX_READ_CHARS = 1000
"""Later characters do not tell failures apart, and every rule reads all of the text."""

MAX_REASON_CHARS = 200
CUT_MARK = "…"


class Rule(NamedTuple):
    """Each match becomes `placeholder`, which has no special characters in either language."""

    pattern: str
    placeholder: str


_WORD = "0-9A-Za-z"
_BEGIN, _END = f"(?<![{_WORD}])", f"(?![{_WORD}])"
_HEX, _DIGIT = "[0-9a-fA-F]", "[0-9]"
_DAY = f"{_DIGIT}{{4}}-{_DIGIT}{{2}}-{_DIGIT}{{2}}"
_CLOCK = f"{_DIGIT}{{2}}:{_DIGIT}{{2}}(?::{_DIGIT}{{2}}(?:[.,]{_DIGIT}{{1,9}})?)?"
_CLOCK_S = f"{_DIGIT}{{1,2}}:{_DIGIT}{{2}}:{_DIGIT}{{2}}(?:[.,]{_DIGIT}{{1,9}})?"
_ZONE = f"(?: ?(?:Z|UTC|[+-]{_DIGIT}{{2}}:?{_DIGIT}{{2}}){_END})?"
_NO_URL = r" \"'`<>()\[\]{}|\\"
_IN_PATH = r"0-9A-Za-z._+@%~=,-"
_V6 = f"{_HEX}{{1,4}}"
_SOME_V6 = f"(?:{_V6}(?::{_V6}){{0,6}})?"
_IS_CODE = "".join(
    f"(?<!{word}{sign})"
    for word in ("HTTP", "http", "tatus", "ode", "rrno", "ignal")
    for sign in ("[ =:]", ": ")
)
"""After one of these words, a short number is the kind of a failure, not a value."""

RULES = (
    # Control characters too: a reason is a line of a table.
    Rule(r"[\x00-\x20\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]+", " "),
    Rule(r"^ | $", ""),
    # Quotations may hold anything, so they come before all others. An apostrophe has a letter on
    # both sides.
    Rule(r'"[^"]*"', "<text>"),
    Rule(f"{_BEGIN}'[^']*'{_END}", "<text>"),
    Rule(r"`[^`]*`", "<text>"),
    Rule(f"{_BEGIN}[A-Za-z][0-9A-Za-z+.-]{{0,19}}://[^{_NO_URL}]*[^{_NO_URL}.,;:!?]", "<url>"),
    Rule(
        r"(?<![0-9A-Za-z._%+-])[0-9A-Za-z._%+-]{1,64}@[0-9A-Za-z-]{1,63}"
        r"(?:\.[0-9A-Za-z-]{1,63}){1,8}",
        "<email>",
    ),
    Rule(f"{_BEGIN}{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}{_END}", "<uuid>"),
    Rule(f"{_BEGIN}{_DAY}(?:[T ]{_CLOCK}{_ZONE})?{_END}", "<time>"),
    Rule(f"{_BEGIN}{_CLOCK_S}{_END}", "<time>"),
    # It must have a digit, otherwise it may be a name in a program.
    Rule(
        f"(?<![{_WORD}:])(?=[a-fA-F:]{{0,39}}[0-9])"
        f"(?:(?:{_V6}:){{7}}{_V6}|{_SOME_V6}::{_SOME_V6})(?![{_WORD}:])",
        "<ip>",
    ),
    Rule(
        f"{_BEGIN}{_DIGIT}{{1,3}}(?:\\.{_DIGIT}{{1,3}}){{3}}(?::{_DIGIT}{{1,5}})?(?![{_WORD}.])",
        "<ip>",
    ),
    Rule(f"(?<![{_IN_PATH}</])[.~]{{0,2}}/[{_IN_PATH}][{_IN_PATH}/]*", "<path>"),
    Rule(f"{_BEGIN}[A-Za-z]:\\\\[^{_NO_URL}:*?][^ \"'`<>|:*?]*", "<path>"),
    Rule(f"{_BEGIN}0[xX]{_HEX}+{_END}", "<hex>"),
    Rule(f"{_BEGIN}(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9]){_HEX}{{8,}}{_END}", "<hex>"),
    Rule(f"{_BEGIN}(?=[0-9]*[A-Za-z])(?=[A-Za-z]*[0-9])[{_WORD}]{{16,}}{_END}", "<id>"),
    Rule(
        f"{_BEGIN}(?:(?=[0-9]{{4}})|{_IS_CODE})"
        r"[+-]?[0-9]+(?:[.,][0-9]+)*(?:[eE][+-]?[0-9]+)?",
        "<n>",
    ),
)

_COMPILED = tuple((re.compile(rule.pattern), rule.placeholder) for rule in RULES)


def normalised(reason: str | None) -> str | None:
    """Returns the reason as it is grouped. None stays None."""
    if reason is None:
        return None
    text = reason[:MAX_READ_CHARS]
    for pattern, placeholder in _COMPILED:
        text = pattern.sub(placeholder, text)
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + CUT_MARK


def normalised_column(reason: Column) -> Column:
    """Returns the same for a column."""
    text = F.substring(reason, 1, MAX_READ_CHARS)
    for rule in RULES:
        text = F.regexp_replace(text, F.lit(rule.pattern), F.lit(rule.placeholder))
    short = F.concat(F.substring(text, 1, MAX_REASON_CHARS - 1), F.lit(CUT_MARK))
    return F.when(F.char_length(text) <= MAX_REASON_CHARS, text).otherwise(short)
