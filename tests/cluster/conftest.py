"""Sealing on the disk in memory."""

from __future__ import annotations

import pytest

from tests.engine.inline_sealing import PATCHES


@pytest.fixture(autouse=True)
def sealing_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, replacement in PATCHES:
        monkeypatch.setattr(module, name, replacement)
