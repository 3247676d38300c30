"""Options: their kinds, and errors that name the option, the value and what is allowed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_OFFSET
from penstock.model.options import (
    CACHE,
    MOMENT,
    NAME,
    TEXT,
    TIME_MS,
    TRUE_OR_FALSE,
    YES_OR_NO,
    Kind,
    Option,
    choice,
    duration_ms,
    list_of,
    moment_at,
    number,
    pattern,
    per_second,
    read_member,
    size_bytes,
    unknown_name,
    whole_number,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole_number(), "-3", -3),
        (whole_number(1, 5), " 5 ", 5),
        (number(0, 1), "0.5", 0.5),
        (duration_ms(), "0", 0),
        (duration_ms(1, 60_000), "1m", 60_000),
        (size_bytes(), "1KiB", 1024),
        (choice("records", "journal"), " Journal ", "journal"),
        (TRUE_OR_FALSE, "TRUE", True),
        (YES_OR_NO, "off", False),
        (pattern("[a-z]+", "letters"), "abc", "abc"),
        (list_of(NAME, "names"), "a, b,a", ("a", "b")),
        (list_of(NAME, "names", skip_empty=True), "a,,", ("a",)),
        (CACHE, "t/n/c", "t/n/c"),
        (TIME_MS, "1970-01-01T00:00:01Z", 1000),
        (TIME_MS, "1000", 1000),
        (MOMENT, "2h", timedelta(hours=2)),
        (MOMENT, "2025-01-31T12:00:00Z", datetime(2025, 1, 31, 12, tzinfo=UTC)),
        (TEXT, " as it is ", " as it is "),
    ],
)
def test_a_kind_takes_its_values(kind: Kind, text: str, value: Any) -> None:
    assert Option("x", kind).read(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        (whole_number(1), "0", "it takes a whole number, at least 1"),
        (whole_number(1, 5), "6", "it takes a whole number, 1 to 5"),
        (whole_number(), "many", "it takes a whole number"),
        (number(0.1), "nan", "it takes a number, at least 0.1"),
        (number(0, 5, "seconds"), "6", "it takes a number of seconds, 0 to 5"),
        (duration_ms(1, 60_000), "2m", "such as 500ms, 5s or 7d, 1ms to 1m"),
        (size_bytes(64), "1", "it takes bytes or a size such as 64MiB, at least 64"),
        (choice("a", "b", "c"), "d", "it takes a, b or c"),
        (TRUE_OR_FALSE, "yes", "it takes true or false"),
        (YES_OR_NO, "perhaps", "it takes yes or no"),
        (pattern("[a-z]+", "letters"), "a1", "it takes letters"),
        (list_of(NAME, "names"), "a,,b", "is not allowed; it takes names"),
        (NAME, "n" * 201, "is longer than 200 bytes; it takes a name"),
        (CACHE, "t/n", "it takes tenant/namespace/cache"),
        (TIME_MS, "2025-01-31T12:00:00", "has no time zone: add Z or +02:00; it takes a time"),
        (MOMENT, "120", "or how long ago"),
        (MOMENT, "999999999999999d", "or how long ago"),
    ],
)
def test_an_error_names_the_option_the_value_and_what_is_allowed(
    kind: Kind, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Option("x", kind).read(text, "flag x")
    assert refused.value.message.startswith(f"flag x: {text!r} ")
    assert complaint in refused.value.message


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(InvalidArgument) as refused:
        Option("token", whole_number(), is_secret=True).read("s3cret")
    assert refused.value.message == (
        "option token: the value is not allowed; it takes a whole number"
    )


def test_an_unknown_name_gets_a_suggestion_or_the_names_there_are() -> None:
    known = ["startingOffsets", "topic"]
    assert unknown_name("topics", known) == "unknown option topics; did you mean topic?"
    assert unknown_name("STARTINGOFSETS", known).endswith("did you mean startingOffsets?")
    assert unknown_name("x", known) == "unknown option x; there are startingOffsets, topic"
    many = [f"name{number}" for number in range(21)]
    assert unknown_name("zzz", many, "setting") == "unknown setting zzz"


def test_how_long_ago_counts_from_the_start_of_the_run() -> None:
    now = datetime(2025, 1, 31, 12, tzinfo=UTC)
    assert moment_at(timedelta(hours=1), now) == datetime(2025, 1, 31, 11, tzinfo=UTC)
    assert moment_at(now, datetime.now(UTC)) == now
    assert moment_at(None, now) is None


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (whole_number(1, 5), 5, 5),
        (duration_ms(), MAX_OFFSET, MAX_OFFSET),
        (duration_ms(), "7d", 604_800_000),
        (size_bytes(1), "1KB", 1024),
        (per_second(whole_number(1, MAX_OFFSET), "10/s"), 7, 7),
        (per_second(whole_number(1, MAX_OFFSET), "10/s"), " 7 /s", 7),
        (per_second(size_bytes(1), "10MB/s"), "1KB/s", 1024),
    ],
)
def test_a_member_is_a_number_or_a_text_with_a_unit(kind: Kind, given: int | str, value: int):
    assert read_member(kind, "m", given) == value


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (whole_number(1, 5), 6, "m must be a whole number, 1 to 5, not 6"),
        (duration_ms(1, 60_000), 0, "m must be a whole number, 1 to 60000, not 0"),
        (duration_ms(0, 60_000), "2m", "m: '2m' is not allowed; it takes .*, at most 1m"),
        (size_bytes(1), "much", "m: 'much' is not allowed; it takes bytes or a size"),
        (per_second(whole_number(1), "10/s"), "10", "'10' is not allowed; .* such as 10/s"),
        (per_second(whole_number(1), "10/s"), "10/m", "such as 10/s"),
        (per_second(whole_number(1), "10/s"), "+1/s", "such as 10/s"),
        (per_second(whole_number(1), "10/s"), 0, "m must be a whole number, 1 to"),
    ],
)
def test_a_member_with_a_wrong_value_names_what_is_allowed(kind: Kind, given: int | str, text: str):
    with pytest.raises(InvalidArgument, match=text):
        read_member(kind, "m", given)
