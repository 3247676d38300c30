"""docs/storage-format.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from penstock.model.records import Record
from penstock.storage.frames import FRAME_HEADER_BYTES, FRAME_MAGIC
from penstock.storage.segments import FORMAT_VERSION, SEGMENT_HEADER_BYTES, SEGMENT_MAGIC

DOCUMENT = (Path(__file__).parents[2] / "docs" / "storage-format.md").read_text()


def test_the_table_of_records_matches_the_model() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.+) \|$", DOCUMENT, re.MULTILINE)
    documented = [(int(tag), name, re.findall(r"`(\w+)`", fields)) for tag, name, fields in rows]
    kinds = get_args(Record)
    expected = [(k.__struct_config__.tag, k.__name__, list(k.__struct_fields__)) for k in kinds]
    assert documented == sorted(expected)


def test_the_numbers_of_the_layout_match_the_code() -> None:
    assert f"Format version {FORMAT_VERSION}." in DOCUMENT
    assert f"header block of {SEGMENT_HEADER_BYTES:,} bytes" in DOCUMENT
    assert f"magic `{SEGMENT_MAGIC.decode()}`" in DOCUMENT
    assert f"magic `{FRAME_MAGIC.hex(' ').upper()}`" in DOCUMENT
    assert f"| {FRAME_HEADER_BYTES} | | payload" in DOCUMENT
