"""A user's function: how it is found, what it may be, and that it reaches other processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from pyspark.sql import SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.pipelines.functions import UserFunction, load
from penstock.spark.pipelines.verdicts import (
    NOTHING,
    NotAVerdict,
    Verdict,
    judged,
    verdict_of,
    verdicts_of_series,
)
from tests.spark.pipelines.messages import message, records


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def function(tmp_path: Path, text: str, name: str = "label") -> UserFunction:
    return load(written(tmp_path / "rules.py", text) + f":{name}")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def label(row): ...", "row"),
        ("def label(row: dict) -> str: ...", "row"),
        ("def label(value: str) -> str: ...", "value"),
        ("import pandas as pd\ndef label(values: pd.Series) -> pd.Series: ...", "series"),
        ("from pyspark.sql import DataFrame\ndef label(rows: DataFrame): ...", "frame"),
        (
            "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    import pandas as pd\ndef label(values: pd.Series): ...",
            "series",
        ),
        ("class Model:\n    def __call__(self, value: str): ...\nlabel = Model()", "value"),
        ("def label(row, threshold=0.5): ...", "row"),
        ("label = dict", "row"),
    ],
)
def test_what_a_function_is_given_is_what_it_asks_for(tmp_path: Path, text: str, kind: str):
    assert function(tmp_path, text).kind == kind


@pytest.mark.parametrize(
    ("spec", "text", "said"),
    [
        ("rules.py", "", "takes path/file.py:name"),
        ("rules.py:", "", "takes path/file.py:name"),
        ("none.py:label", "", "there is no file .*none.py"),
        ("rules.py:label", "def lable(row): ...", "has no `label`; it has lable"),
        ("rules.py:label", "label = 3", "`label` is a int, not a function"),
        ("rules.py:label", "x = 1\n1 / 0\n", r"ZeroDivisionError: .* \(.*rules.py:2\)"),
        ("rules.py:label", "def label(row)\n", r"SyntaxError: .* \(.*rules.py:1\)"),
        ("rules.py:label", "raise SystemExit(3)", r"SystemExit: 3 \(.*rules.py:1\)"),
        ("rules.py:label", "import nosuchmodule", "No module named 'nosuchmodule'"),
        ("rules.py:label", "def label(): ...", "must take one argument"),
        ("rules.py:label", "def label(a, b): ...", "must take one argument"),
        (
            "rules.py:label",
            "import pandas\ndef label(rows: pandas.DataFrame): ...",
            "takes a pandas DataFrame",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_what_is_wrong(
    tmp_path: Path, spec: str, text: str, said: str
):
    (tmp_path / "rules.py").write_text(text)
    with pytest.raises(InvalidArgument) as refused:
        load(f"{tmp_path}/{spec}")
    assert re.search(said, refused.value.message), refused.value.message


def test_a_file_that_is_changed_is_loaded_anew(tmp_path: Path):
    first = function(tmp_path, "def label(row): return 'old'")
    second = function(tmp_path, "def label(row): return 'new'")
    assert (first.callable()({}), second.callable()({})) == ("old", "new")


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (None, NOTHING),
        ("", NOTHING),
        ("spam", Verdict(label="spam")),
        ({}, NOTHING),
        ({"topic": "t", "value": "v"}, Verdict(topic="t", value="v")),
        (
            {"label": "spam", "meta": {"score": 0.5, "why": "words", "empty": ""}},
            Verdict(label="spam", meta={"score": "0.5", "why": "words", "empty": ""}),
        ),
    ],
)
def test_a_function_says_a_label_or_a_dict_or_nothing(said: Any, verdict: Verdict):
    assert verdict_of(said) == verdict


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (3, r"returned 3 \(int\)"),
        (["spam"], "returned"),
        ({"label": 3}, "label is 3"),
        ({"lable": "spam"}, "has 'lable'"),
        ({"meta": "words"}, "meta is 'words'"),
        ({"meta": {"model": object()}}, "meta has <object"),
        ({"value": ""}, "value is empty"),
        ("\ud800", "UTF-8"),
        ({"meta": {"a": "\ud800"}}, "UTF-8"),
    ],
)
def test_what_is_no_verdict_is_said(said: Any, why: str):
    with pytest.raises(NotAVerdict, match=why):
        verdict_of(said)


def test_a_series_that_raises_is_asked_for_row_by_row(tmp_path: Path):
    made = function(
        tmp_path,
        "import pandas as pd\n"
        "def label(values: pd.Series) -> pd.Series:\n"
        "    return values.map(lambda value: 'even' if int(value) % 2 == 0 else None)\n",
    )
    fine = verdicts_of_series(made, pd.Series(["2", "3"]))
    assert fine == [Verdict(label="even"), NOTHING]
    poisoned = verdicts_of_series(made, pd.Series(["2", "x", "4"]))
    assert poisoned[::2] == [Verdict(label="even")] * 2
    assert re.fullmatch(r"ValueError: .*'x' \(.*rules.py:3\)", poisoned[1].error or "")


def test_a_series_of_another_length_is_an_error_of_its_rows(tmp_path: Path):
    made = function(
        tmp_path,
        "import pandas as pd\ndef label(values: pd.Series): return pd.Series(['a', 'b', 'c'])",
    )
    said = verdicts_of_series(made, pd.Series(["1", "2"]))
    assert [one.error for one in said] == ["the function returned 3 labels for 1 values"] * 2


@pytest.mark.parametrize("nothing", ["None", "float('nan')", "pd.NA", "pd.NaT"])
def test_every_way_of_pandas_to_say_nothing_is_nothing(tmp_path: Path, nothing: str):
    made = function(
        tmp_path,
        "import pandas as pd\n"
        f"def label(values: pd.Series): return pd.Series([{nothing}, 'a'], dtype=object)",
    )
    assert verdicts_of_series(made, pd.Series(["1", "2"])) == [NOTHING, Verdict(label="a")]


MODEL = """
import threading
from dataclasses import dataclass

@dataclass
class Rule:
    word: str
    label: str

model = threading.Lock()  # cannot be pickled, as many a model
rules = [Rule("late", "slow"), Rule("lost", "gone")]

def label(row):
    with model:
        found = [rule.label for rule in rules if rule.word in row["value"]]
    if row["value"] == "poison":
        raise KeyError(row["routing_meta"]["no"])
    return {"label": found[0], "meta": row["routing_meta"]} if found else None
"""


def test_a_function_is_called_by_workers_that_cannot_import_it(spark: SparkSession, tmp_path: Path):
    made = function(tmp_path, MODEL)
    (tmp_path / "rules.py").unlink()
    rows = records(
        spark,
        message(1, value="it is late", routing_meta={"a": "b"}),
        message(2, value="fine"),
        message(3, value="poison", routing_meta={}),
        message(4, value="lost it"),
    )
    said = judged(rows.repartition(2), made).orderBy("offset").collect()
    found = [(row.offset, row.verdict_label, row.verdict_meta) for row in said]
    assert found == [(1, "slow", {"a": "b"}), (2, None, None), (3, None, None), (4, "gone", None)]
    assert [row.error for row in said] == [None, None, f"KeyError: 'no' ({made.path}:17)", None]
    assert [row.timestamp for row in said] == [row.timestamp for row in rows.collect()]
