"""The endpoints that tenants, namespaces, streams and caches have in common, described once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.model.access import ResourceKind
from penstock.server.access import EndpointAccess, Filtered, HandlerNeeds, Needs
from penstock.server.http.dispatch import Handler
from penstock.server.members import optional
from penstock.server.routes.endpoint import DONE, Answer, Endpoint

TENANTS = "/v1/tenants"
TENANT = TENANTS + "/{tenant_id}"
NAMESPACE = TENANT + "/namespaces/{namespace}"

EXAMPLE_AT = {"created_ms": 1_767_225_600_000, "revision": 5}


_KINDS: dict[str, ResourceKind] = {
    "tenant": "tenant",
    "namespace": "namespace",
    "stream": "stream",
    "cache": "cache",
}


def _creates(kind: ResourceKind) -> EndpointAccess:
    """Returns what a creation needs. A tenant has no rules before it exists, so creating one needs
    the permission to change the broker's registry."""
    if kind == "tenant":
        return Needs("registry", "broker")
    return HandlerNeeds("registry" if kind == "namespace" else "manage", kind)


def _deletes(kind: ResourceKind) -> EndpointAccess:
    if kind == "tenant":
        return Needs("registry", "broker")
    return Needs("registry" if kind == "namespace" else "manage", kind)


class CascadeQuery(msgspec.Struct):
    cascade: Annotated[bool | None, optional("true: deletes its contents too.")] = None


def list_endpoint(path: str, handler: Handler, what: str, shape: Any, example: Any) -> Endpoint:
    return Endpoint(
        route=f"GET {path}",
        handler=handler,
        access=Filtered(_KINDS[what.removesuffix("s")]),
        tag="Tenants",
        summary=f"List {what}",
        answers={200: Answer("Sorted by name.", shape, {what: [example]})},
        errors=(503,) if path == TENANTS else (400, 404, 503),
    )


def create_endpoint(
    path: str, handler: Handler, what: str, body: Any, example: Any, answer: tuple[Any, Any]
) -> Endpoint:
    """`answer` is the shape and an example."""
    return Endpoint(
        route=f"POST {path}",
        handler=handler,
        access=_creates(_KINDS[what]),
        tag="Tenants",
        summary=f"Create a {what}",
        body=body,
        example=example,
        answers={
            201: Answer("Created.", *answer),
            200: Answer("It existed already, with the same settings.", *answer),
        },
        errors=(400, 404, 409, 413, 429, 503),
    )


def describe_endpoint(
    path: str, handler: Handler, what: str, answer: tuple[Any, Any], text: str = ""
) -> Endpoint:
    return Endpoint(
        route=f"GET {path}",
        handler=handler,
        access=Needs("read", _KINDS[what]),
        tag="Tenants",
        summary=f"Describe a {what}",
        text=text,
        answers={200: Answer(f"The {what}.", *answer)},
        errors=(400, 404, 503),
    )


def change_endpoint(
    path: str, handler: Handler, what: str, body: Any, example: Any, answer: tuple[Any, Any]
) -> Endpoint:
    return Endpoint(
        route=f"PATCH {path}",
        handler=handler,
        access=Needs("manage", _KINDS[what]),
        tag="Tenants",
        summary=f"Change a {what}'s settings",
        text="Changes the settings that are named; null sets the default again.",
        body=body,
        example=example,
        answers={200: Answer("The new settings.", *answer)},
        errors=(400, 404, 409, 413, 429, 503),
    )


def delete_endpoint(
    path: str, handler: Handler, what: str, text: str, *, may_cascade: bool = False
) -> Endpoint:
    return Endpoint(
        route=f"DELETE {path}",
        handler=handler,
        access=_deletes(_KINDS[what]),
        tag="Tenants",
        summary=f"Delete a {what}",
        text=text,
        query=(CascadeQuery,) if may_cascade else (),
        answers=DONE,
        errors=(400, 404, 409, 429, 503) if may_cascade else (400, 404, 429, 503),
    )
