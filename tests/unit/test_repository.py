"""The repository keeps its own house rules, so that no reviewer has to say them by hand."""

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
HOMELESS_NAME = re.compile(r"(^|_)(utils?|helpers?|common|managers?)(_|$)")
LEFT_UNDONE = re.compile(r"\b(TODO|FIXME)\b")

SOURCES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "src" / "penstock").rglob("*.py"))
}
TREES = {path: ast.parse(text, str(path)) for path, text in SOURCES.items()}


def test_every_module_opens_with_a_docstring():
    none_at_all(
        f"{path}:1: no docstring says what this module owns"
        for path, tree in TREES.items()
        if not ast.get_docstring(tree)
    )


def test_no_module_outgrows_its_limit():
    none_at_all(
        f"{path}:{lines}: {lines} lines, more than {MODULE_LINES_MAX}"
        for path, text in SOURCES.items()
        if (lines := len(text.splitlines())) > MODULE_LINES_MAX
    )


def test_no_function_outgrows_its_limit():
    none_at_all(
        f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    )


def test_every_module_is_named_for_a_noun_of_the_design():
    none_at_all(
        f"{path}: a name that would fit any code says nothing about this"
        for path in SOURCES
        if any(HOMELESS_NAME.search(part) for part in path.with_suffix("").parts)
    )


def test_no_safety_depends_on_an_assert_statement():
    none_at_all(
        f"{path}:{node.lineno}: python -O drops an assert; raise an error"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    )


def test_no_source_leaves_a_note_of_work_undone():
    none_at_all(
        f"{path}:{number}: {line.strip()}"
        for path, text in SOURCES.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if LEFT_UNDONE.search(line)
    )


def test_every_script_is_executable():
    commands = [path for path in (ROOT / "scripts").iterdir() if path.suffix in ("", ".sh")]
    none_at_all(
        f"{path.relative_to(ROOT)}: not executable (chmod +x)"
        for path in (ROOT / ".ci" / "run", *sorted(commands))
        if path.is_file() and not os.access(path, os.X_OK)
    )


def none_at_all(violations: Iterable[str]) -> None:
    """Fail with one line for each violation, which names its place."""
    if found := list(violations):
        pytest.fail("\n".join(found), pytrace=False)
