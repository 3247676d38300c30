"""ARCHITECTURE.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.documents import ROOT

SOURCE = ROOT / "src" / "penstock"

_NAME = r"`[A-Za-z_][\w.]*`"
_STEP = re.compile(rf"`(?P<file>[\w/]+\.py)`(?:\s+→\s+(?P<names>{_NAME}(?:,\s+{_NAME})*))?")


def test_every_file_and_function_of_the_walks_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    steps = list(_STEP.finditer(text))
    assert sum(each["names"] is not None for each in steps) > 80
    wrong = []
    for step in steps:
        # The page names files below src/penstock, or from the repository's root.
        path = next((base / step["file"] for base in (SOURCE, ROOT) if is_file(base, step)), None)
        if path is None:
            wrong.append(f"there is no file {step['file']}")
            continue
        for name in re.findall(r"`([\w.]+)`", step["names"] or ""):
            if name not in defined_in(path):
                wrong.append(f"{step['file']} has no {name}")
    assert not wrong, "\n".join(wrong)


def is_file(base: Path, step: re.Match[str]) -> bool:
    return (base / step["file"]).is_file()


@cache
def defined_in(path: Path) -> set[str]:
    """Returns the functions and classes of a module, its methods, and members as `Class.member`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    found.add(f"{node.name}.{member.target.id}")
    return found
