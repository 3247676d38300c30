"""The project's documents as data: their marked blocks, their tables' first cells, their links.

A block that is checked has a mark on the line before its fence, which a reader of the rendered
page does not see:

    <!-- serves -->   starts the broker that the blocks behind it speak to; kills the one before
    <!-- runs -->     a shell or Python example, run as it is
    <!-- stays -->    the same, but it goes on while those behind it run, and one of them ends it
    <!-- prints -->   what the example before it prints; `…` stands for anything within a line,
                      in a line of its own for any lines
    <!-- speaks -->   a WebSocket's frames: `→` is sent, `←` is what comes, with `…` as above
    <!-- stops -->    here the broker is stopped with SIGTERM; it needs no block
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

Mark = Literal["serves", "runs", "stays", "prints", "speaks", "stops"]

_MARK = re.compile(r"\s*<!-- (serves|runs|stays|prints|speaks|stops) -->\s*")
_FENCE = re.compile(r"\s*(```+)\s*(\w*)\s*")
_LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"#+\s+(.+?)\s*")


class Block(NamedTuple):
    """A fenced block with a mark; `line` is where its text begins, for messages."""

    mark: Mark
    language: str
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Every marked block, in order. A mark without a fence behind it is an error."""
    found: list[Block] = []
    mark: Mark | None = None
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        fence = _FENCE.fullmatch(line)
        if mark is not None and fence is None:
            raise ValueError(f"line {number}: <!-- {mark} --> stands before no fenced block")
        if fence is not None:
            body = list(_until(lines, fence[1]))
            if mark is not None:
                found.append(Block(mark, fence[2], "\n".join(body) + "\n", number + 1))
            mark = None
        elif marked := _MARK.fullmatch(line):
            mark = marked[1]  # type: ignore[assignment]
            if mark == "stops":
                found.append(Block(mark, "", "", number))
                mark = None
    return found


def prose_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks, with their numbers."""
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        fence = _FENCE.fullmatch(line)
        if fence is None:
            yield number, line
        else:
            for _ in _until(lines, fence[1]):
                pass


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Targets of links that stay within the repository, with their lines."""
    for number, line in prose_of(text):
        for target in _LINK.findall(line):
            if not re.match(r"[a-z]+:", target):
                yield number, target


def anchors_of(text: str) -> set[str]:
    """What a link may name behind its `#`: each heading in lower case, words joined by `-`."""
    found = set()
    for _, line in prose_of(text):
        heading = _HEADING.fullmatch(line)
        if heading is not None:
            words = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(words.replace(" ", "-"))
    return found


def first_cells(text: str) -> set[str]:
    """Every name in code style in the first cell of a table's row."""
    found: set[str] = set()
    for _, line in prose_of(text):
        if line.startswith("|"):
            found.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def _until(lines: Iterator[tuple[int, str]], fence: str) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == fence:
            return
        yield line
    raise ValueError(f"a block that {fence} opens is never closed")
