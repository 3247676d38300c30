"""Hooks for Schemathesis: leave out requests whose merit or fault a schema cannot express.

Schemathesis loads this module by the variable SCHEMATHESIS_HOOKS. Each rule says what it is that
the schema cannot say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import schemathesis

_SPANS = (("start", "end"), ("from", "to"))


_WITH_SCOPE = ("/v1/topics", "/v1/produce")


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """All routes have their tenant and namespace from the same lines of code, before they are
    handled. So these headers are tried on two paths: names that nobody has would keep all other
    requests from being handled at all."""
    for path, methods in raw_schema["paths"].items():
        for operation in () if path in _WITH_SCOPE else methods.values():
            operation["parameters"] = [
                each
                for each in operation.get("parameters", [])
                if not each["name"].startswith("X-Penstock-")
            ]


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    query = case.query if isinstance(case.query, Mapping) else {}
    values = list(_values(case.body))
    return (
        _has_one_form(case, query)
        and _is_forwards(query)
        and _has_the_name_it_needs(case, query)
        and _knows_its_columns(query)
        and not _names_another_scope(query)
        # 1.0 is an integer to a schema, and not to the broker.
        and not any(isinstance(value, float) for _, value in values)
        and not any(_depends_on_state(name, value) for name, value in values)
        and not _names_another_partition(case.path_parameters or {})
        and not any(name == "checks" and _is_ambiguous(value) for name, value in values)
    )


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Schemathesis makes valid header values of letters and digits only, which no ETag is: it
    sends 0 where it means a valid one. Put that into quotes."""
    for name in ("If-Match", "If-None-Match"):
        if case.headers and case.headers.get(name) == "0":
            case.headers[name] = '"0"'


def _has_one_form(case: Any, query: Mapping[str, Any]) -> bool:
    """A query is read where there is no body, and may be right. With raw=true a body is bytes, and
    any are right; without it, what only a raw request may have in its query is refused. A piece
    goes to a topic, a stream or a cache, and a row of the journal is about one of them. A nack that
    makes a dead letter has no delay."""
    has_body_form = case.operation.body is not None and len(case.operation.body) > 0
    if has_body_form and not isinstance(case.body, Mapping | list):
        return False
    if has_body_form and _takes_raw(case) and any(name != "raw" for name in query):
        return False
    if sum(bool(query.get(name)) for name in ("topic", "stream", "cache")) > 1:
        return False
    if query.get("resource_kind") and (query.get("topic") or query.get("stream")):
        return False
    if case.operation.path == "/v1/access/rules" and isinstance(case.body, Mapping):
        return _is_for_one(case.body)
    if any(_is_dead_later(value) for _, value in _values(case.body)):
        return False
    return str(query.get("raw", "")).lower() not in ("true", "1")


def _is_dead_later(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("dead")) and "delay_ms" in value


def _is_for_one(rule: Mapping[str, Any]) -> bool:
    """A rule is for a principal or for a role, and for one tenant; one for the broker has none."""
    given = {name for name, value in rule.items() if isinstance(value, str) and value.strip()}
    tenant = rule.get("tenant_id")
    if isinstance(tenant, str) and tenant.strip().endswith("*"):
        return False
    resource = rule.get("resource")
    if isinstance(resource, str) and resource.strip() == "broker":
        return False
    patterns = [each for each in (resource, rule.get("namespace")) if isinstance(each, str)]
    if any("*" in pattern.strip()[:-1] for pattern in patterns):
        return False
    return len(given & {"principal", "role"}) == 1


def _has_the_name_it_needs(case: Any, query: Mapping[str, Any]) -> bool:
    """Owner, lease and prefetch of a subscription need its name."""
    if not case.operation.path.endswith("/subscribe") or query.get("name"):
        return True
    return not {"owner", "lease_ms", "prefetch"} & query.keys()


def _takes_raw(case: Any) -> bool:
    return any(parameter.name == "raw" for parameter in case.operation.query)


def _is_forwards(query: Mapping[str, Any]) -> bool:
    """A range ends behind its start, which is the oldest row that is kept if it is left out."""
    for start, end in _SPANS:
        if end in query and not _is_ordered(query.get(start), query[end]):
            return False
    return True


def _is_ordered(first: Any, last: Any) -> bool:
    try:
        return int(first) <= int(last)
    except (TypeError, ValueError):
        return False


def _knows_its_columns(query: Mapping[str, Any]) -> bool:
    """The names of columns are a list in one text."""
    return not query.get("columns")


def _names_another_scope(query: Mapping[str, Any]) -> bool:
    """A stream or cache may have its tenant and namespace before its name; a producer's rows must
    stay in its own."""
    return any("/" in str(query.get(name, "")) for name in ("stream", "cache"))


def _depends_on_state(name: str, value: Any) -> bool:
    """Whether a partition exists or a deadline has passed is not in the schema; nor that streams
    keep nothing yet, so that what only a durable one could do is refused."""
    if name == "sequence":
        return value is not None
    if name == "delivery":
        return value not in (None, "at_most_once")
    return bool(value) and name in (
        "deadline", "partition_override", "partition", "retention", "retention_bytes", "durable",
        "producer_id",
    )  # fmt: skip


def _names_another_partition(names: Mapping[str, Any]) -> bool:
    """Every topic has a partition 0. Whether it has others is not in the schema."""
    partition = str(names.get("partition", ""))
    return partition.isdecimal() and int(partition) > 0


def _is_ambiguous(value: Any) -> bool:
    """A check of a transaction has either a version or whether the key exists, not none or both."""
    return isinstance(value, Mapping) and (
        (value.get("version") is None) == (value.get("exists") is None)
    )


def _values(body: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a body with the name of its member."""
    yield name, body
    if isinstance(body, Mapping):
        for member, value in body.items():
            yield from _values(value, member)
    elif isinstance(body, list):
        for value in body:
            yield from _values(value, name)
