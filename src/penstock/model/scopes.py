"""Scopes: the tenant and namespace that a name belongs to.

A topic's full name is what the engine knows it by. In the default namespace it is the name itself,
so that logs written before topics had namespaces mean the same. Elsewhere it is tenant, namespace
and name, joined by a control character that no name can contain. Users only ever see plain names:
the server makes full names from requests, and reports split them again.

The events of a durable stream are kept like the messages of a topic. That topic's full name begins
with a mark, so that it is neither a user's topic nor can be mistaken for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.model.tenancy import DEFAULT, Path

Scope = tuple[str, str]
"""Tenant and namespace."""

DEFAULT_SCOPE: Scope = (DEFAULT, DEFAULT)

SEPARATOR = "\x1f"
STREAM_MARK = "\x1e"


def full_name(scope: Scope, name: str) -> str:
    if scope == DEFAULT_SCOPE:
        return name
    return SEPARATOR.join((*scope, name))


def split_name(full: str) -> tuple[Scope, str]:
    """Returns the scope and the plain name of a full name."""
    if SEPARATOR not in full:
        return DEFAULT_SCOPE, full
    tenant, namespace, name = full.removeprefix(STREAM_MARK).split(SEPARATOR)
    return (tenant, namespace), name


def plain_name(full: str) -> str:
    return full.rpartition(SEPARATOR)[2]


def beside(full: str, name: str) -> str:
    """Returns the full name of `name` in the scope of another full name."""
    scope, separator, _ = full.rpartition(SEPARATOR)
    return f"{scope}{separator}{name}"


def is_plain(name: str) -> bool:
    """Returns False for a text that would name something in another scope."""
    return SEPARATOR not in name and STREAM_MARK not in name


def names_within(scope: Scope, full_names: Iterable[str]) -> Iterator[str]:
    """Returns the full names that are in the scope, without the logs of streams."""
    if scope == DEFAULT_SCOPE:
        return (full for full in full_names if SEPARATOR not in full)
    prefix = full_name(scope, "")
    return (full for full in full_names if full.startswith(prefix))


def shown_name(full: str) -> str:
    """Returns the name as reports of the broker show it: plain, with tenant and namespace before it
    if they are not the default."""
    scope, name = split_name(full)
    return name if scope == DEFAULT_SCOPE else "/".join((*scope, name))


def quoted(full: str) -> str:
    """Returns the plain name in quotes, for a text; in another than the default namespace with
    where it is."""
    scope, name = split_name(full)
    return repr(name) if scope == DEFAULT_SCOPE else f"{name!r} of {'/'.join(scope)}"


def stream_log_name(path: Path) -> str:
    """Returns the full name of the topic that keeps the events of a durable stream."""
    return STREAM_MARK + SEPARATOR.join(path)


def is_stream_log(full: str) -> bool:
    return full.startswith(STREAM_MARK)


def noun_of(full: str) -> str:
    """Returns the word by which a text names it: the log of a stream is the stream to users."""
    return "stream" if is_stream_log(full) else "topic"
