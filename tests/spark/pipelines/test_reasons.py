"""Normalised reasons: what is taken out, and that Python and Spark take out the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.limits import MAX_REASON_BYTES
from penstock.spark.pipelines.reasons import (
    MAX_READ_CHARS,
    MAX_REASON_CHARS,
    RULES,
    normalised,
    normalised_column,
)

EXAMPLES = [
    (
        "HTTP 503 from https://api.example.com/users/12?page=3, after 30s",
        "HTTP 503 from <url>, after <n>s",
    ),
    ("KeyError: 'user_42'", "KeyError: <text>"),
    ('no field "a b" in `orders`', "no field <text> in <text>"),
    ("can't open 'x', it doesn't exist", "can't open <text>, it doesn't exist"),
    ("File /srv/app-3/main.py:12", "File <path>:<n>"),
    (
        "~/x ../y /tmp and/or application/json </a>",
        "<path> <path> <path> and/or application/json </a>",
    ),
    ("C:\\Users\\ada\\x.txt is missing", "<path> is missing"),
    ("step 3f2504e0-4f89-11d3-9a0c-0305e82c3301 failed", "step <uuid> failed"),
    ("since 2024-05-06T07:08:09.123Z", "since <time>"),
    ("since 2024-05-06 07:08:09 +0200, 12:30:45", "since <time>, <time>"),
    ("connect to 10.0.0.1:5432: refused", "connect to <ip>: refused"),
    ("fe80::1 2001:db8:0:0:0:0:2:1 std::vector", "<ip> <ip> std::vector"),
    ("mail to ada.b+c@example.co.uk bounced", "mail to <email> bounced"),
    ("object 0x7ffee4 of 9f86d081 in 01ARZ3NDEKTSV4RRFFQ69G5FAV", "object <hex> of <hex> in <id>"),
    ("worker-12 took 1.5e-3 and -7 of [1,2,3]", "worker-<n> took <n> and <n> of [<n>]"),
    ("utf8, v2 and decade stay", "utf8, v2 and decade stay"),
    ("exit code 137, status: 404, errno=13", "exit code 137, status: 404, errno=13"),
    ("code 123456", "code <n>"),
    ("  two\n\tlines\x00 \u2003 ", "two lines"),
    ("", ""),
    ("x" * MAX_REASON_CHARS, "x" * MAX_REASON_CHARS),
    ("x" * (MAX_REASON_CHARS + 1), "x" * (MAX_REASON_CHARS - 1) + "…"),
    ("😀" * MAX_REASON_BYTES, "😀" * (MAX_REASON_CHARS - 1) + "…"),
]

WORST = [
    sign * (MAX_REASON_BYTES // len(sign))
    for sign in ("a", "1,", "/a", "'", "a:", "a.a@", "f0", "1:", ":", "://", "0000-", "1.", "a\\")
]
"""Long, and each nearly a match of some rule from every place on."""

PIECES = st.one_of(
    st.sampled_from([word for example, _ in EXAMPLES for word in example.split()]),
    st.sampled_from(list("0aF:.-/\\@<>'\"`+ \t\n\xa0\u2028éß٣😀")),
    st.text(max_size=6),
    st.integers().map(str),
    st.uuids().map(str),
    st.datetimes().map(str),
    st.ip_addresses().map(str),
)
REASONS = st.lists(PIECES, max_size=12).flatmap(
    lambda pieces: st.sampled_from([" ".join(pieces), "".join(pieces)])
)


def of_spark(spark: SparkSession, reasons: list[str | None]) -> list[str | None]:
    rows = list(enumerate(reasons))
    frame = spark.createDataFrame(rows, "n int, reason string")
    told = frame.select("n", normalised_column(F.col("reason")).alias("reason")).collect()
    return [row.reason for row in sorted(told)]


@pytest.mark.parametrize(("reason", "wanted"), EXAMPLES)
def test_what_differs_between_failures_is_taken_out(reason: str, wanted: str):
    assert normalised(reason) == wanted


def test_spark_gives_the_examples_and_the_longest_reasons_as_python_does(spark: SparkSession):
    quoted_too_long = f'"{"x" * MAX_READ_CHARS}"'
    reasons = [*(reason for reason, _ in EXAMPLES), *WORST, quoted_too_long, None]
    assert of_spark(spark, reasons) == [normalised(reason) for reason in reasons]


# Not made smaller when one fails, which would be a job of Spark's for each try.
@settings(max_examples=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(reasons=st.lists(REASONS, min_size=100, max_size=400))
def test_spark_and_python_agree_on_any_reason(spark: SparkSession, reasons: list[str]):
    for reason, told in zip(reasons, of_spark(spark, list(reasons)), strict=True):
        assert told == normalised(reason), reason


def test_what_is_behind_the_first_thousand_characters_makes_no_difference():
    start = "x " * (MAX_READ_CHARS // 2)
    assert normalised(start + "one") == normalised(start + "another")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_nothing_that_python_and_java_read_differently(rule):
    assert not re.search(r"\\[dDsSwWbBhRXZzAG]|\[\[|&&|\(\?[aiLmsux]", rule.pattern)
    assert not re.search(r"[$\\]", rule.placeholder)
    assert not re.compile(rule.pattern).match("")
