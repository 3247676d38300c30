"""Resources that a file or a request declares: tenants, quotas, streams, caches and topics.

An error in a TOML file says which table and which key is wrong, and what was probably meant. Must
not know what exists already, nor how a declaration is carried out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_PARTITIONS
from penstock.model.names import clean_name
from penstock.model.options import check_number, unknown_name
from penstock.model.tenancy import DEFAULT, Kind, Path
from penstock.server.members import Count, Name, StrictBody, optional, required
from penstock.server.registry.entries import BytesText, DurationText, EntryName, entry_path
from penstock.server.routes.cache_settings import CacheSettingsBody
from penstock.server.routes.quotas import QuotaBody
from penstock.server.routes.stream_settings import StreamSettingsBody
from penstock.server.routes.topics import (
    AfterArchive,
    MaxAttempts,
    Partitions,
    RetryBackoff,
    RetryMaxBackoff,
)
from penstock.server.settings import RESOURCE_TABLES, config_file, read_file

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


TenantName = Annotated[Name | None, optional("The tenant's name; default when omitted.")]
NamespaceOf = Annotated[Name | None, optional("The namespace's name; default when omitted.")]


class DeclaredTenant(StrictBody):
    tenant_id: Annotated[Name | None, required("The tenant's name: 1 to 200 bytes of UTF-8.")] = (
        None
    )
    namespaces: Annotated[tuple[Name, ...], optional("The names of its namespaces.")] = ()


class DeclaredStream(StreamSettingsBody):
    request_id: None = None
    tenant_id: TenantName = None
    namespace: NamespaceOf = None
    name: EntryName = None


class DeclaredCache(CacheSettingsBody):
    request_id: None = None
    tenant_id: TenantName = None
    namespace: NamespaceOf = None
    name: EntryName = None


class DeclaredTopic(StrictBody):
    tenant_id: TenantName = None
    namespace: NamespaceOf = None
    name: Annotated[Name | None, required("The topic's name: 1 to 200 bytes of UTF-8.")] = None
    partitions: Annotated[
        Partitions | None, optional("How many partitions, 1 to 1,024; a new topic has 1.")
    ] = None
    retention_ms: Annotated[
        Count | DurationText | None,
        optional("How long finished messages are kept. May have a unit, such as 7d; 0 is for ever"),
    ] = None
    retention_bytes: Annotated[
        Count | BytesText | None,
        optional("How many bytes of finished messages are kept. May have a unit; 0 is all."),
    ] = None
    after_archive: AfterArchive = None
    max_attempts: MaxAttempts = None
    retry_backoff_ms: RetryBackoff = None
    retry_max_backoff_ms: RetryMaxBackoff = None


class DeclaredQuota(QuotaBody):
    request_id: None = None
    tenant_id: Annotated[Name | None, required("The tenant's name.")] = None
    namespace: Annotated[
        Name | None, optional("The namespace's name; omitted, the quota is the tenant's.")
    ] = None


class DeclaredResources(StrictBody):
    tenants: Annotated[tuple[DeclaredTenant, ...], optional("Tenants with their namespaces.")] = ()
    quotas: Annotated[tuple[DeclaredQuota, ...], optional("Quotas of tenants or namespaces.")] = ()
    streams: Annotated[tuple[DeclaredStream, ...], optional("Streams and their settings.")] = ()
    caches: Annotated[tuple[DeclaredCache, ...], optional("Caches and their settings.")] = ()
    topics: Annotated[tuple[DeclaredTopic, ...], optional("Topics and their settings.")] = ()

    def has_entries(self) -> bool:
        """Returns whether it declares entries of the registry."""
        return bool(self.tenants or self.quotas or self.streams or self.caches)


DeclaredEntry = DeclaredStream | DeclaredCache | DeclaredQuota | None


def read_resources(config: str) -> DeclaredResources:
    """Returns the resources that the configuration file declares, if there is a file."""
    path = config_file(config)
    found = read_file(path) if path else {}
    tables = {name: found[name] for name in RESOURCE_TABLES if name in found}
    return resources_of(tables, f"config {path}")


_ROWS: dict[str, type[msgspec.Struct]] = {
    "tenants": DeclaredTenant,
    "quotas": DeclaredQuota,
    "streams": DeclaredStream,
    "caches": DeclaredCache,
    "topics": DeclaredTopic,
}


def resources_of(tables: dict[str, Any], source: str) -> DeclaredResources:
    """Reads the tables of a TOML file. An error begins with `source`."""
    check_tables(tables, _ROWS, source)
    try:
        return msgspec.convert(tables, DeclaredResources)
    except msgspec.ValidationError as error:
        raise wrong_value(error, tables, source) from error


def check_unique(declared: DeclaredResources) -> None:
    """Refuses a resource that is declared twice: the declarations could contradict each other."""
    paths = Counter(
        [
            *(("tenant", entry_path(each.tenant_id)) for each in declared.tenants),
            *(("quota", _quota_key(each)[1]) for each in declared.quotas),
            *(("stream", _entry_path(each)) for each in declared.streams),
            *(("cache", _entry_path(each)) for each in declared.caches),
            *(("topic", topic_path(each)) for each in declared.topics),
        ]
    )
    if paths.total() > MAX_BATCH_ITEMS:
        raise InvalidArgument(f"more than {MAX_BATCH_ITEMS} resources are declared")
    for (kind, path), count in paths.items():
        if count > 1:
            name = "/".join(part for part in path if part)
            raise InvalidArgument(f"{kind} {name!r} is declared twice")


def entries_of(declared: DeclaredResources) -> dict[tuple[Kind, Path], DeclaredEntry]:
    """Returns the declared entries of the registry, parents first. The body of a tenant or
    namespace is its quota."""
    found: dict[tuple[Kind, Path], DeclaredEntry] = {}
    for tenant in declared.tenants:
        found["tenant", entry_path(tenant.tenant_id)] = None
        for namespace in tenant.namespaces:
            found["namespace", entry_path(tenant.tenant_id, namespace)] = None
    for quota in declared.quotas:
        found[_quota_key(quota)] = quota
    for stream in declared.streams:
        found["stream", _entry_path(stream)] = stream
    for cache in declared.caches:
        found["cache", _entry_path(cache)] = cache
    return found


def only_quotas(declared: DeclaredResources) -> set[tuple[Kind, Path]]:
    """Returns tenants and namespaces that have a quota but are not declared themselves."""
    entries = entries_of(DeclaredResources(tenants=declared.tenants))
    return {_quota_key(quota) for quota in declared.quotas} - entries.keys()


def _quota_key(quota: DeclaredQuota) -> tuple[Kind, Path]:
    if quota.namespace is None:
        return "tenant", entry_path(quota.tenant_id)
    return "namespace", entry_path(quota.tenant_id, quota.namespace)


def _entry_path(body: DeclaredStream | DeclaredCache | DeclaredTopic) -> Path:
    return entry_path(body.tenant_id or DEFAULT, body.namespace or DEFAULT, body.name)


def topic_path(topic: DeclaredTopic) -> Path:
    if topic.partitions is not None:
        check_number("partitions", topic.partitions, 1, MAX_PARTITIONS)
    clean_name(topic.name, "name")
    return _entry_path(topic)
