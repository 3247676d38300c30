"""The documents are complete and hang together: settings, routes, sentences, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.model.errors import PenstockError
from penstock.model.permissions import BUILT_IN_ROLES, PERMISSIONS
from penstock.model.tenancy import CacheConfig, StreamConfig
from penstock.server.message_actions import MESSAGES
from penstock.server.settings import Settings
from penstock.server.websocket.answers import FRAMES
from tests.docs.documents import DOCUMENTS, ROOT, anchors_of, first_cells, links_of
from tests.routes import NAMESPACE, all_routes

OPERATIONS = ROOT / "docs" / "operations.md"
HTTP_API = ROOT / "docs" / "http-api.md"
WRITES = ROOT / "docs" / "writes.md"
STREAMS = ROOT / "docs" / "streams.md"
DELIVERY = ROOT / "docs" / "delivery.md"
CACHE = ROOT / "docs" / "cache.md"
REGISTRY = ROOT / "docs" / "registry.md"
WEBSOCKET = ROOT / "docs" / "websocket.md"
JOURNAL = ROOT / "docs" / "journal.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"

ACCESS = ROOT / "docs" / "access.md"

REFERENCE = (HTTP_API, JOURNAL, WRITES, STREAMS, DELIVERY, CACHE, REGISTRY, WEBSOCKET, ACCESS)
"""Together they have every route; `…` at a path's beginning is that of a namespace."""

FELIX = {*range(1, 17), *range(18, 112), *range(114, 134)}
"""Sentences of the stream and cache contract that are promised."""
FELIX_LAST = 133
NOTHING_TO_TEST = {55, 71}
"""They say what is left open."""


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
    headings = [
        line.lstrip("# ").replace("`", "").replace("…/", f"{NAMESPACE}/")
        for page in REFERENCE
        for line in heading_lines(read(page))
    ]
    documented = [route for line in headings for route in line.split(", ") if "/v1/" in route]
    assert sorted(documented) == sorted(" ".join(route) for route in all_routes())


def test_every_message_of_the_websocket_is_in_its_reference():
    documented = first_cells(read(WEBSOCKET))
    assert {each.type for each in MESSAGES} <= documented
    pushed = {shape for each in MESSAGES for shape in each.pushes}
    assert {each.type for each in FRAMES if each.shape in pushed} <= documented


def test_every_setting_of_a_stream_or_cache_is_in_a_table():
    """felix-131"""
    renamed = {"retention_ms": "retention"}
    settings = {renamed.get(name, name) for name in StreamConfig.__struct_fields__}
    assert settings <= first_cells(read(STREAMS))
    assert set(CacheConfig.__struct_fields__) <= first_cells(read(REGISTRY))


def test_every_permission_and_role_is_in_a_table_with_what_it_allows():
    text = read(ACCESS)
    assert first_cells(text) >= {*PERMISSIONS, *BUILT_IN_ROLES}
    before: frozenset[str] = frozenset()
    for role, permissions in BUILT_IN_ROLES.items():
        (row,) = re.findall(rf"^\| `{role}` \| (.*) \|$", text, re.MULTILINE)
        named = set(re.findall(r"`(\w+)`", row)) & set(PERMISSIONS)
        assert before | named == permissions or row == "all", role
        before = permissions
    assert before == set(PERMISSIONS)


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


def test_the_guarantees_of_streams_and_caches_are_numbered_and_the_rest_is_named_as_not_built():
    text = read(GUARANTEES)
    numbers = [int(n) for n in re.findall(r"^- \*\*felix-(\d+)\*\* \S", text, re.MULTILINE)]
    assert numbers == sorted(FELIX)
    missing = {
        n for row in re.findall(r"^\| ([\d–, ]+) \|", text, re.MULTILINE) for n in spans(row)
    }
    assert missing == set(range(1, FELIX_LAST + 1)) - FELIX


def test_every_sentence_that_a_test_cites_exists():
    wrong = [
        f"{path.relative_to(ROOT)}: {contract}-{number}"
        for path in (ROOT / "tests").rglob("*.py")
        for contract, number in citations(path.read_text(encoding="utf-8"))
        if not 1 <= number <= {"driftq": 71, "felix": FELIX_LAST}[contract]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_promise_of_streams_and_caches_is_cited_by_a_test():
    cited = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for contract, number in citations(path.read_text(encoding="utf-8"))
        if contract == "felix"
    }
    assert sorted(FELIX - NOTHING_TO_TEST - cited) == []


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


def citations(text: str) -> list[tuple[str, int]]:
    """`felix-1`, and of `felix-1, 9 and 20 to 22` each."""
    found = []
    pattern = r"\b(driftq|felix)-(\d+(?:(?:, | and | to |–)\d+)*)"
    for contract, numbers in re.findall(pattern, text):
        for span in re.split(", | and ", numbers):
            found += [(contract, number) for number in spans(span.replace(" to ", "–"))]
    return found


def spans(text: str) -> list[int]:
    """The numbers of `17, 93–102`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("–")
        found += range(int(first), int(last or first) + 1)
    return found


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
    if isinstance(value, tuple):
        value = ", ".join(value)
    return str(value) if value else "none"


def heading_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def subclasses(kind: type[PenstockError]) -> set[type[PenstockError]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
