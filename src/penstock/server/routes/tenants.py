"""Tenants and their namespaces: create, list, describe and delete them."""

from __future__ import annotations

import msgspec

from penstock.model.limits import Limits
from penstock.model.tenancy import Entry
from penstock.server.registry.entries import entry_path
from penstock.server.registry.exchange import (
    RegistryRequest,
    changing,
    create,
    deleting,
    describing,
    reading,
    send_list,
)
from penstock.server.routes.entry_endpoints import (
    EXAMPLE_AT,
    NAMESPACE,
    TENANT,
    TENANTS,
    create_endpoint,
    delete_endpoint,
    describe_endpoint,
    list_endpoint,
)
from penstock.server.websocket.messages import Body, NamespaceName, TenantId


class TenantBody(Body):
    tenant_id: TenantId = None


class NamespaceBody(Body):
    namespace: NamespaceName = None


class TenantAnswer(msgspec.Struct):
    """`revision` is the registry's at the entry's last change."""

    tenant_id: str
    created_ms: int
    revision: int


class NamespaceAnswer(msgspec.Struct):
    tenant_id: str
    namespace: str
    created_ms: int
    revision: int


class TenantList(msgspec.Struct):
    tenants: list[TenantAnswer]


class NamespaceList(msgspec.Struct):
    namespaces: list[NamespaceAnswer]


_tenant_decoder = msgspec.json.Decoder(TenantBody)
_namespace_decoder = msgspec.json.Decoder(NamespaceBody)


def _tenant_answer(entry: Entry, _: Limits) -> TenantAnswer:
    return TenantAnswer(entry.tenant_id, entry.created_ms, entry.revision)


def _namespace_answer(entry: Entry, _: Limits) -> NamespaceAnswer:
    return NamespaceAnswer(entry.tenant_id, entry.namespace, entry.created_ms, entry.revision)


@changing
def create_tenant(exchange: RegistryRequest) -> None:
    tenant, _, _ = entry_path(exchange.body(_tenant_decoder).tenant_id)
    create(exchange, Entry(kind="tenant", tenant_id=tenant), _tenant_answer)


@changing
def create_namespace(exchange: RegistryRequest) -> None:
    tenant, namespace, _ = exchange.path(exchange.body(_namespace_decoder).namespace)
    wanted = Entry(kind="namespace", tenant_id=tenant, namespace=namespace)
    create(exchange, wanted, _namespace_answer)


@reading
def list_tenants(exchange: RegistryRequest) -> None:
    exchange.registry.tenants(send_list(exchange, "tenant", _tenant_answer, TenantList))


@reading
def list_namespaces(exchange: RegistryRequest) -> None:
    done = send_list(exchange, "namespace", _namespace_answer, NamespaceList)
    exchange.registry.children("tenant", exchange.path(), done)


_TENANT = {"tenant_id": "acme", **EXAMPLE_AT}
_NAMESPACE = {"tenant_id": "acme", "namespace": "prod", **EXAMPLE_AT}

ENDPOINTS = (
    list_endpoint(TENANTS, list_tenants, "tenants", TenantList, _TENANT),
    create_endpoint(
        TENANTS,
        create_tenant,
        "tenant",
        TenantBody,
        {"tenant_id": "acme"},
        (TenantAnswer, _TENANT),
    ),
    describe_endpoint(
        TENANT, describing("tenant", _tenant_answer), "tenant", (TenantAnswer, _TENANT)
    ),
    delete_endpoint(
        TENANT,
        deleting("tenant"),
        "tenant",
        "409 if it has namespaces, unless cascade is true.",
        may_cascade=True,
    ),
    list_endpoint(f"{TENANT}/namespaces", list_namespaces, "namespaces", NamespaceList, _NAMESPACE),
    create_endpoint(
        f"{TENANT}/namespaces",
        create_namespace,
        "namespace",
        NamespaceBody,
        {"namespace": "prod"},
        (NamespaceAnswer, _NAMESPACE),
    ),
    describe_endpoint(
        NAMESPACE,
        describing("namespace", _namespace_answer),
        "namespace",
        (NamespaceAnswer, _NAMESPACE),
    ),
    delete_endpoint(
        NAMESPACE,
        deleting("namespace"),
        "namespace",
        "409 if it has streams or caches, unless cascade is true.",
        may_cascade=True,
    ),
)
