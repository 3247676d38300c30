"""The documents are complete and hang together: settings, routes, sentences, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.model.errors import PenstockError
from penstock.server.routes import ROUTES
from penstock.server.settings import Settings
from penstock.server.topic_routes import topic_route
from tests.docs.documents import DOCUMENTS, ROOT, anchors_of, first_cells, links_of

OPERATIONS = ROOT / "docs" / "operations.md"
HTTP_API = ROOT / "docs" / "http-api.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"

NAMED_PATHS = ["/v1/topics/{topic}", "/v1/topics/{topic}/groups/{group}"]
"""Paths with names in them are not in the table; the table's function for them knows them too."""


def test_every_setting_is_in_the_operators_table():
    documented = first_cells(read(OPERATIONS))
    assert set(Settings.__struct_fields__) <= documented


def test_every_default_in_the_operators_table_is_the_one_in_force():
    wrong = [
        f"{name}: the page says {said!r}, the code {spelled(default, name)!r}"
        for name, said in defaults_in(read(OPERATIONS)).items()
        if said != spelled(default := getattr(Settings(), name), name)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_route_has_its_heading_in_the_reference():
    headings = [line.lstrip("# ").replace("`", "") for line in heading_lines(read(HTTP_API))]
    documented = {route for line in headings for route in line.split(", ")}
    methods_of = {path.decode(): methods for path, methods in ROUTES.items()}
    methods_of |= {path: topic_route(path.encode()) or {} for path in NAMED_PATHS}
    routes = {
        f"{method.decode()} {path}" for path, methods in methods_of.items() for method in methods
    }
    assert routes <= documented
    assert {line for line in documented if "/v1/" in line} <= routes


def test_every_error_code_is_in_the_reference():
    codes = {error.code for error in subclasses(PenstockError)}
    assert codes <= first_cells(read(HTTP_API))


def test_every_metric_is_in_the_operators_table():
    source = (ROOT / "src/penstock/server/metrics.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"(penstock_\w+)"', source))
    assert names, "the metrics are named somewhere else now"
    documented = {re.sub(r"_total$", "", name) for name in first_cells(read(OPERATIONS))}
    assert names <= documented


def test_the_guarantees_are_numbered_from_1_to_71():
    numbers = re.findall(r"^- \*\*driftq-(\d+)\*\* \S", read(GUARANTEES), re.MULTILINE)
    assert list(map(int, numbers)) == list(range(1, 72))


def test_every_sentence_that_a_test_cites_exists():
    cited = {
        (path.relative_to(ROOT), int(number))
        for path in (ROOT / "tests").rglob("*.py")
        for number in re.findall(r"\bdriftq-(\d+)\b", path.read_text(encoding="utf-8"))
    }
    assert [f"{path}: driftq-{number}" for path, number in cited if not 1 <= number <= 71] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_link_within_the_repository_leads_somewhere(page: Path):
    dangling = [
        f"{page.name}:{line}: {target}"
        for line, target in links_of(read(page))
        if not leads_somewhere(page, target)
    ]
    assert not dangling, "\n".join(dangling)


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = (page.parent / name) if name else page
    if not path.exists():
        return False
    return not anchor or anchor in anchors_of(read(path))


def defaults_in(text: str) -> dict[str, str]:
    """Of rows that begin with a setting: its name and the default that the second cell says."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        name = cells[1].strip("`") if len(cells) > 3 else ""
        if name in Settings.__struct_fields__:
            found[name] = cells[2].strip("`")
    return found


def spelled(value: object, name: str) -> str:
    """A default as the page writes it: sizes in their unit, nothing as `none`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if name.endswith("_bytes") and value and value % size == 0:
                return f"{value // size} {unit}"
        return f"{value:,}" if value >= 10_000 else str(value)
    return str(value) if value else "none"


def heading_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def subclasses(kind: type[PenstockError]) -> set[type[PenstockError]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
