"""The calls on tenants, namespaces, streams and caches themselves. No IO.

Settings have the names of the HTTP API. Durations and sizes may have a unit:
`disconnect_slow_ms="30s"`, `max_bytes="1GB"`. A change to None restores the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.client.calls import Call, encode, nothing, reader, segment
from penstock.client.results import (
    AppliedPlan,
    Cache,
    Namespace,
    RegistryStatus,
    Stream,
    Tenant,
    TenantQuota,
)

Setting = int | str | bool | None

# -- tenants and namespaces ----------------------------------------------------------------------


def create_tenant(tenant_id: str) -> Call[Tenant]:
    """Creates a tenant; one that exists is left as it is."""
    return Call("POST", "/v1/tenants", reader(Tenant), encode({"tenant_id": tenant_id}))


def list_tenants() -> Call[list[Tenant]]:
    """Returns all tenants, sorted."""
    read = reader(_Tenants)
    return Call("GET", "/v1/tenants", lambda body: read(body).tenants)


def describe_tenant(tenant_id: str) -> Call[Tenant]:
    """Returns the tenant. Raises NotFound if there is none."""
    return Call("GET", _tenant(tenant_id), reader(Tenant))


def delete_tenant(tenant_id: str, *, cascade: bool = False) -> Call[None]:
    """Deletes a tenant; with `cascade`, everything in it too."""
    return _delete(_tenant(tenant_id), cascade)


def create_namespace(tenant_id: str, namespace: str) -> Call[Namespace]:
    """Creates a namespace; one that exists is left as it is."""
    path = f"{_tenant(tenant_id)}/namespaces"
    return Call("POST", path, reader(Namespace), encode({"namespace": namespace}))


def list_namespaces(tenant_id: str) -> Call[list[Namespace]]:
    """Returns a tenant's namespaces, sorted."""
    read = reader(_Namespaces)
    return Call("GET", f"{_tenant(tenant_id)}/namespaces", lambda body: read(body).namespaces)


def describe_namespace(tenant_id: str, namespace: str) -> Call[Namespace]:
    """Returns the namespace. Raises NotFound if there is none."""
    return Call("GET", _namespace(tenant_id, namespace), reader(Namespace))


def delete_namespace(tenant_id: str, namespace: str, *, cascade: bool = False) -> Call[None]:
    """Deletes a namespace; with `cascade`, its streams and caches too."""
    return _delete(_namespace(tenant_id, namespace), cascade)


# -- streams -------------------------------------------------------------------------------------


def create_stream(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Stream]:
    """Creates a stream. One that exists with the same settings is left as it is; with other
    settings, raises AlreadyExists."""
    path = f"{_namespace(tenant_id, namespace)}/streams"
    return Call("POST", path, reader(Stream), _settings(settings | {"name": name}))


def list_streams(tenant_id: str, namespace: str) -> Call[list[Stream]]:
    """Returns a namespace's streams, sorted, with the settings in force."""
    read = reader(_Streams)
    path = f"{_namespace(tenant_id, namespace)}/streams"
    return Call("GET", path, lambda body: read(body).streams)


def describe_stream(tenant_id: str, namespace: str, name: str) -> Call[Stream]:
    """Returns a stream's settings in force and its number of subscribers."""
    return Call("GET", stream_path(tenant_id, namespace, name), reader(Stream))


def change_stream(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Stream]:
    """Changes the settings that are given; None restores the default."""
    path = stream_path(tenant_id, namespace, name)
    return Call("PATCH", path, reader(Stream), encode(settings))


def delete_stream(tenant_id: str, namespace: str, name: str) -> Call[None]:
    """Deletes a stream and ends its subscriptions."""
    return _delete(stream_path(tenant_id, namespace, name))


# -- caches --------------------------------------------------------------------------------------


def create_cache(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Cache]:
    """Creates a cache. One that exists with the same settings is left as it is; with other
    settings, raises AlreadyExists."""
    path = f"{_namespace(tenant_id, namespace)}/caches"
    return Call("POST", path, reader(Cache), _settings(settings | {"name": name}))


def list_caches(tenant_id: str, namespace: str) -> Call[list[Cache]]:
    """Returns a namespace's caches, sorted, with the settings in force."""
    read = reader(_Caches)
    path = f"{_namespace(tenant_id, namespace)}/caches"
    return Call("GET", path, lambda body: read(body).caches)


def describe_cache(tenant_id: str, namespace: str, name: str) -> Call[Cache]:
    """Returns a cache's settings in force, and how much it holds."""
    return Call("GET", cache_path(tenant_id, namespace, name), reader(Cache))


def change_cache(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Cache]:
    """Changes the settings that are given; None restores the default."""
    return Call("PATCH", cache_path(tenant_id, namespace, name), reader(Cache), encode(settings))


def delete_cache(tenant_id: str, namespace: str, name: str) -> Call[None]:
    """Deletes a cache with all its entries and ends its watches."""
    return _delete(cache_path(tenant_id, namespace, name))


# -- quotas --------------------------------------------------------------------------------------


def describe_quota(tenant_id: str, namespace: str | None = None) -> Call[TenantQuota]:
    """Returns the limits and the use of a tenant or, with `namespace`, of a namespace."""
    return Call("GET", _quota(tenant_id, namespace), reader(TenantQuota))


def change_quota(
    tenant_id: str, namespace: str | None = None, **limits: Setting
) -> Call[TenantQuota]:
    """Changes the limits that are given; None removes a limit."""
    return Call("PATCH", _quota(tenant_id, namespace), reader(TenantQuota), encode(limits))


# -- declared resources --------------------------------------------------------------------------


def apply(
    resources: Mapping[str, Any], *, dry_run: bool = False, changes: bool = False
) -> Call[AppliedPlan]:
    """Creates the resources that are missing and, with `changes`, changes those that differ.

    `resources` has the lists `tenants`, `streams`, `caches` and `topics`, each with the members of
    `POST /v1/apply`. With `dry_run` only returns the plan. With `changes` and a conflict raises
    FailedPrecondition, and nothing is done.
    """
    body = dict(resources) | {"dry_run": dry_run, "changes": changes}
    return Call("POST", "/v1/apply", reader(AppliedPlan), encode(body))


# -- the registry itself -------------------------------------------------------------------------


def registry_status() -> Call[RegistryStatus]:
    """Returns whether the broker follows a control plane, its revision, and whether that works."""
    return Call("GET", "/v1/registry", reader(RegistryStatus))


class _Tenants(msgspec.Struct):
    tenants: list[Tenant]


class _Namespaces(msgspec.Struct):
    namespaces: list[Namespace]


class _Streams(msgspec.Struct):
    streams: list[Stream]


class _Caches(msgspec.Struct):
    caches: list[Cache]


def _tenant(tenant_id: str) -> str:
    return f"/v1/tenants/{segment(tenant_id)}"


def _namespace(tenant_id: str, namespace: str) -> str:
    return f"{_tenant(tenant_id)}/namespaces/{segment(namespace)}"


def _quota(tenant_id: str, namespace: str | None) -> str:
    at = _tenant(tenant_id) if namespace is None else _namespace(tenant_id, namespace)
    return f"{at}/quota"


def stream_path(tenant_id: str, namespace: str, name: str) -> str:
    return f"{_namespace(tenant_id, namespace)}/streams/{segment(name)}"


def cache_path(tenant_id: str, namespace: str, name: str) -> str:
    return f"{_namespace(tenant_id, namespace)}/caches/{segment(name)}"


def _delete(path: str, cascade: bool = False) -> Call[None]:
    return Call("DELETE", f"{path}?cascade=true" if cascade else path, nothing)


def _settings(settings: dict[str, Any]) -> bytes:
    """Encodes the settings that are not None."""
    return encode({name: value for name, value in settings.items() if value is not None})
