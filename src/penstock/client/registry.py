"""Every operation on tenants, namespaces, streams and caches as a call. No IO.

Settings are named as on the wire, and durations and sizes may have a unit:
`disconnect_slow_ms="30s"`, `max_bytes="1GB"`. To a change, None is the default again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.client.calls import Call, encode, nothing, reader, segment
from penstock.client.results import Cache, Namespace, RegistryStatus, Stream, Tenant

Setting = int | str | bool | None

# -- tenants and namespaces ----------------------------------------------------------------------


def create_tenant(tenant_id: str) -> Call[Tenant]:
    """Creates a tenant; one that exists is left as it is."""
    return Call("POST", "/v1/tenants", reader(Tenant), encode({"tenant_id": tenant_id}))


def list_tenants() -> Call[list[Tenant]]:
    """All tenants, sorted."""
    read = reader(_Tenants)
    return Call("GET", "/v1/tenants", lambda body: read(body).tenants)


def describe_tenant(tenant_id: str) -> Call[Tenant]:
    """The tenant; NotFound when there is none."""
    return Call("GET", _tenant(tenant_id), reader(Tenant))


def delete_tenant(tenant_id: str, *, cascade: bool = False) -> Call[None]:
    """Deletes a tenant; with `cascade`, all that is in it too."""
    return _delete(_tenant(tenant_id), cascade)


def create_namespace(tenant_id: str, namespace: str) -> Call[Namespace]:
    """Creates a namespace; one that exists is left as it is."""
    path = f"{_tenant(tenant_id)}/namespaces"
    return Call("POST", path, reader(Namespace), encode({"namespace": namespace}))


def list_namespaces(tenant_id: str) -> Call[list[Namespace]]:
    """A tenant's namespaces, sorted."""
    read = reader(_Namespaces)
    return Call("GET", f"{_tenant(tenant_id)}/namespaces", lambda body: read(body).namespaces)


def describe_namespace(tenant_id: str, namespace: str) -> Call[Namespace]:
    """The namespace; NotFound when there is none."""
    return Call("GET", _namespace(tenant_id, namespace), reader(Namespace))


def delete_namespace(tenant_id: str, namespace: str, *, cascade: bool = False) -> Call[None]:
    """Deletes a namespace; with `cascade`, its streams and caches too."""
    return _delete(_namespace(tenant_id, namespace), cascade)


# -- streams -------------------------------------------------------------------------------------


def create_stream(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Stream]:
    """Creates a stream; one that exists with the same settings is left as it is, with others it
    is AlreadyExists."""
    path = f"{_namespace(tenant_id, namespace)}/streams"
    return Call("POST", path, reader(Stream), _settings(settings | {"name": name}))


def list_streams(tenant_id: str, namespace: str) -> Call[list[Stream]]:
    """A namespace's streams, sorted, with the settings in force."""
    read = reader(_Streams)
    path = f"{_namespace(tenant_id, namespace)}/streams"
    return Call("GET", path, lambda body: read(body).streams)


def describe_stream(tenant_id: str, namespace: str, name: str) -> Call[Stream]:
    """A stream's settings in force, and how many subscribe to it."""
    return Call("GET", stream_path(tenant_id, namespace, name), reader(Stream))


def change_stream(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Stream]:
    """Changes the settings that are named; None is the default again."""
    path = stream_path(tenant_id, namespace, name)
    return Call("PATCH", path, reader(Stream), encode(settings))


def delete_stream(tenant_id: str, namespace: str, name: str) -> Call[None]:
    """Deletes a stream; its subscriptions end."""
    return _delete(stream_path(tenant_id, namespace, name))


# -- caches --------------------------------------------------------------------------------------


def create_cache(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Cache]:
    """Creates a cache; one that exists with the same settings is left as it is, with others it
    is AlreadyExists."""
    path = f"{_namespace(tenant_id, namespace)}/caches"
    return Call("POST", path, reader(Cache), _settings(settings | {"name": name}))


def list_caches(tenant_id: str, namespace: str) -> Call[list[Cache]]:
    """A namespace's caches, sorted, with the settings in force."""
    read = reader(_Caches)
    path = f"{_namespace(tenant_id, namespace)}/caches"
    return Call("GET", path, lambda body: read(body).caches)


def describe_cache(tenant_id: str, namespace: str, name: str) -> Call[Cache]:
    """A cache's settings in force, and what it holds."""
    return Call("GET", cache_path(tenant_id, namespace, name), reader(Cache))


def change_cache(tenant_id: str, namespace: str, name: str, **settings: Setting) -> Call[Cache]:
    """Changes the settings that are named; None is the default again."""
    return Call("PATCH", cache_path(tenant_id, namespace, name), reader(Cache), encode(settings))


def delete_cache(tenant_id: str, namespace: str, name: str) -> Call[None]:
    """Deletes a cache with all that it holds; its watches end."""
    return _delete(cache_path(tenant_id, namespace, name))


# -- the whole -----------------------------------------------------------------------------------


def registry_status() -> Call[RegistryStatus]:
    """Whose registry the broker has, where it stands, and how following goes."""
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


def stream_path(tenant_id: str, namespace: str, name: str) -> str:
    return f"{_namespace(tenant_id, namespace)}/streams/{segment(name)}"


def cache_path(tenant_id: str, namespace: str, name: str) -> str:
    return f"{_namespace(tenant_id, namespace)}/caches/{segment(name)}"


def _delete(path: str, cascade: bool = False) -> Call[None]:
    return Call("DELETE", f"{path}?cascade=true" if cascade else path, nothing)


def _settings(settings: dict[str, Any]) -> bytes:
    """What is None was not said."""
    return encode({name: value for name, value in settings.items() if value is not None})
