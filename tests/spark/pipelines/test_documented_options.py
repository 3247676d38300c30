"""The tables of options in docs/pipelines.md: their options exist, and their examples are taken.

An example is what stands in code style behind "such as", and every `option=value` in a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from penstock.model.options import Option
from penstock.spark.launching.catalog import find
from penstock.spark.pipelines.names import BUILT_IN
from penstock.spark.pipelines.selection import Criteria, chosen
from tests.docs.documents import ROOT, prose_of
from tests.spark.pipelines.messages import message, records

PAGE = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
_HEADING = re.compile(r"(#+) (.+)")
_CODE = re.compile(r"`([^`]+)`")
_SETTING = re.compile(r"`(?:--set )?(?:\w+\.)?(\w+)=([^`\s]+)`")


class Row(NamedTuple):
    """A row of a table below the heading of `pipeline`; `line` is for messages."""

    pipeline: str
    cells: tuple[str, ...]
    line: int


def rows() -> Iterator[Row]:
    pipeline = ""
    for line, text in prose_of(PAGE):
        heading = _HEADING.fullmatch(text)
        if heading is not None and len(heading[1]) == 2:
            pipeline = heading[2].strip("`")
        if text.startswith("|") and pipeline in BUILT_IN:
            yield Row(pipeline, tuple(cell.strip() for cell in text.strip("|").split("|")), line)


def options_of(pipeline: str) -> dict[str, Option]:
    (found,) = find([pipeline])
    return {option.name: option for option in found.options}


def examples() -> Iterator[tuple[str, str, str]]:
    """Pipeline, option and a value that the page gives as an example."""
    for row in rows():
        options = options_of(row.pipeline)
        for name in filter(options.__contains__, _CODE.findall(row.cells[0])):
            for said in re.findall(r"such as (`[^`]+`)", row.cells[1]):
                yield row.pipeline, name, said.strip("`")
            default = _CODE.fullmatch(row.cells[-1])
            if default is not None:
                yield row.pipeline, name, default[1]
        for cell in row.cells:
            for name, value in _SETTING.findall(cell):
                if name in options:
                    yield row.pipeline, name, value


EXAMPLES = sorted(set(examples()))


def test_the_page_has_examples_of_several_pipelines():
    assert {pipeline for pipeline, _, _ in EXAMPLES} >= {"archive", "replay", "route", "metrics"}
    assert ("replay", "where") in {(pipeline, name) for pipeline, name, _ in EXAMPLES}


@pytest.mark.parametrize("pipeline", BUILT_IN)
def test_every_option_has_its_row(pipeline: str):
    first_cells = [row.cells[0] for row in rows() if row.pipeline == pipeline]
    assert set(options_of(pipeline)) <= set(_CODE.findall(" ".join(first_cells)))


@pytest.mark.parametrize(("pipeline", "name", "value"), EXAMPLES)
def test_an_example_in_a_table_is_taken(spark: SparkSession, pipeline: str, name: str, value: str):
    read = options_of(pipeline)[name].read(value)
    if name == "where":
        stored = records(spark, message(0, key="cart-1", value='{"amount": 7}'), message(1))
        assert chosen(stored, Criteria(to="t", where=read)).count() == 1
