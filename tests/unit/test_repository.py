"""The repository keeps its own house rules, so that no reviewer has to say them by hand."""

import ast
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
HOMELESS_NAME = re.compile(r"(^|_)(utils?|helpers?|common|managers?)(_|$)")
NO_OPENINGS = {"What", "Who", "Of", "Where", "That", "Whom", "Which", "Those"}
"""A docstring starts with a verb or a noun phrase, not with one of these."""

MIRRORS = {
    # What the SDK returns mirrors the broker's own noun.
    "Begun",
    "Cache",
    "Group",
    "Health",
    "NamedSubscription",
    "Partition",
    "Produced",
    "Topic",
    # The engine implements the interface in api/; the SDK has its own side of it.
    "EventBatch",
    "Subscription",
    "Watch",
}
"""Class names in more than one module, because they are the same thing on two sides."""

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


def test_every_docstring_starts_with_a_verb_or_a_noun():
    none_at_all(
        f"{path}:{line}: a docstring starts with a verb or a noun, not {opening!r}: {text}"
        for path, tree in TREES.items()
        for line, text in docstrings(tree)
        if (opening := re.split(r"\W", text, maxsplit=1)[0]) in NO_OPENINGS
    )


def test_no_class_name_means_two_things():
    places: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                module = path.relative_to("src/penstock").as_posix()
                places.setdefault(node.name, set()).add(module)
    shared = {name for name, modules in places.items() if len(modules) > 1}
    none_at_all(
        f"class {name} is in {', '.join(sorted(places[name]))}; rename one, or add it to MIRRORS"
        for name in sorted(shared - MIRRORS)
    )
    none_at_all(f"{name} is in one module only; remove it" for name in sorted(MIRRORS - shared))


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


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The first line of every docstring, those of variables too, with its line number."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and text.strip():
                    yield statement.lineno, text.strip().splitlines()[0]


def none_at_all(violations: Iterable[str]) -> None:
    """Fail with one line for each violation, which names its place."""
    if found := list(violations):
        pytest.fail("\n".join(found), pytrace=False)
