"""Errors in a TOML file that declares resources, in the words of that file.

Says which table and which key is wrong, and what was probably meant. Must not know what the tables
mean, nor what exists already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.options import unknown_name

_PATH = re.compile(r" - at `\$\.(?P<table>\w+)\[(?P<index>\d+)\](\.(?P<key>\w+))?.*`$")
_TYPE = re.compile(r"`([^`]*)`")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "datetime": "a time",
}
_OTHER_NAMES = {
    ("streams", "retention_ms"): "retention",
    ("topics", "retention"): "retention_ms",
    ("topics", "durable"): "retention_ms; every topic is durable",
}
"""Keys that another table has, with what they are called in this one."""


def check_tables(
    tables: Mapping[str, Any], rows: Mapping[str, type[msgspec.Struct]], source: str
) -> None:
    """Raises InvalidArgument for a table that is no [[list]] of tables, and for an unknown key.
    `rows` has the struct of an entry for each table."""
    for table, entries in tables.items():
        if not isinstance(entries, list):
            raise InvalidArgument(
                f"{source}: write [[{table}]], once for each, instead of [{table}]"
            )
        known = [field.name for field in msgspec.structs.fields(rows[table])]
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry, dict):
                raise InvalidArgument(f"{source}: {table} is a list of tables: write [[{table}]]")
            for key in entry:
                if key not in known or key == "request_id":
                    where = f"{source}: {_place(table, number, entry)}"
                    raise InvalidArgument(f"{where}: {_unknown(table, key, known)}")


def _unknown(table: str, key: str, known: list[str]) -> str:
    other = _OTHER_NAMES.get((table, key))
    if other is not None:
        return f"unknown key {key}; {table} have {other}"
    return unknown_name(key, [name for name in known if name != "request_id"], "key")


def wrong_value(
    error: msgspec.ValidationError, tables: Mapping[str, Any], source: str
) -> InvalidArgument:
    """Returns the error for a value of the wrong type."""
    text = str(error)
    found = _PATH.search(text)
    if found is None:
        return InvalidArgument(f"{source}: {text}")
    index = int(found["index"])
    place = _place(found["table"], index + 1, tables[found["table"]][index])
    key = f", {found['key']}" if found["key"] else ""
    return InvalidArgument(f"{source}: {place}{key}: {_TYPE.sub(_plain, text[: found.start()])}")


def _plain(types: re.Match[str]) -> str:
    names = [name.strip() for name in types[1].split("|")]
    return " or ".join(_TYPES.get(name, name) for name in names if name != "null")


def _place(table: str, number: int, entry: Mapping[str, Any]) -> str:
    """Names an entry by its number and, if it has one, its name."""
    name = next((entry[key] for key in ("name", "namespace", "tenant_id") if key in entry), None)
    return f"[[{table}]] number {number}" + (f" ({name})" if isinstance(name, str) else "")
