"""The headers that select a tenant and a namespace, and senders that are bound to theirs."""

from __future__ import annotations

import pytest

from penstock.model.errors import InvalidArgument, PermissionDenied
from penstock.model.names import full_name_in
from penstock.model.principals import Principal
from penstock.model.scopes import DEFAULT_SCOPE, SEPARATOR, Scope, split_name
from penstock.server.http.admission import Admission
from penstock.server.http.request_headers import NO_SCOPE, RequestScope, read_scope
from penstock.server.http.requests import Request

TENANT, NAMESPACE = b"x-penstock-tenant", b"x-penstock-namespace"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], NO_SCOPE),
        ([(TENANT, b"acme")], RequestScope(("acme", "default"), "acme")),
        ([(NAMESPACE, b"prod")], RequestScope(("default", "prod"), None, "prod")),
        (
            [(NAMESPACE, b"prod"), (TENANT, b" acme\t")],
            RequestScope(("acme", "prod"), "acme", "prod"),
        ),
        ([(TENANT, b"default")], RequestScope(DEFAULT_SCOPE, "default")),
    ],
)
def test_headers_select_a_scope(headers: list[tuple[bytes, bytes]], expected: RequestScope) -> None:
    assert read_scope(headers) == expected


def test_the_default_scope_is_one_object() -> None:
    """Names in it are not joined with anything, on the hot path of produce."""
    found = read_scope([(TENANT, b"default"), (NAMESPACE, b"default")])
    assert isinstance(found, RequestScope)
    assert found.scope is DEFAULT_SCOPE
    assert Admission(loopback_only=False).judge([], "1.0").notes.scope is DEFAULT_SCOPE


@pytest.mark.parametrize(
    "headers",
    [
        [(TENANT, b"")],
        [(TENANT, b"  ")],
        [(TENANT, b"a"), (TENANT, b"a")],
        [(NAMESPACE, b"\xff\xfe")],
        [(TENANT, b"a" + SEPARATOR.encode() + b"b")],
        [(TENANT, b"n" * 201)],
    ],
)
def test_a_wrong_header_is_refused_by_its_name(headers: list[tuple[bytes, bytes]]) -> None:
    refusal = read_scope(headers)
    assert isinstance(refusal, InvalidArgument)
    assert "X-Penstock-" in refusal.message
    verdict = Admission(loopback_only=False).judge([(b"host", b"localhost"), *headers], "1.1")
    assert verdict.refusal == refusal or isinstance(verdict.refusal, InvalidArgument)
    assert verdict.notes.scope is DEFAULT_SCOPE
    assert not verdict.is_welcome()


BOUND = Principal("worker", tenant_id="acme")
NARROW = Principal("worker", tenant_id="acme", namespace="prod")
ADMIN = Principal("root", is_admin=True)


@pytest.mark.parametrize(
    ("principal", "headers", "expected"),
    [
        (BOUND, [], ("acme", "default")),
        (BOUND, [(TENANT, b"acme"), (NAMESPACE, b"test")], ("acme", "test")),
        (NARROW, [], ("acme", "prod")),
        (NARROW, [(NAMESPACE, b"prod")], ("acme", "prod")),
        (ADMIN, [], DEFAULT_SCOPE),
        (ADMIN, [(TENANT, b"globex")], ("globex", "default")),
    ],
)
def test_a_principal_needs_no_headers_for_its_own(
    principal: Principal, headers: list[tuple[bytes, bytes]], expected: Scope
) -> None:
    found = read_scope(headers, principal)
    assert isinstance(found, RequestScope)
    assert found.scope == expected
    assert found.tenant == (None if principal is ADMIN and not headers else expected[0])


@pytest.mark.parametrize(
    ("principal", "headers"),
    [
        (BOUND, [(TENANT, b"globex")]),
        (BOUND, [(TENANT, b"default")]),
        (NARROW, [(NAMESPACE, b"test")]),
        (NARROW, [(TENANT, b"acme"), (NAMESPACE, b"default")]),
    ],
)
def test_a_principal_may_name_nothing_else(
    principal: Principal, headers: list[tuple[bytes, bytes]]
) -> None:
    assert isinstance(read_scope(headers, principal), PermissionDenied)


@pytest.mark.parametrize("name", ["orders", "dlq.orders", "a/b", "ünï"])
def test_a_full_name_comes_back_as_what_it_was_made_of(name: str) -> None:
    for scope in (DEFAULT_SCOPE, ("acme", "prod")):
        assert split_name(full_name_in(scope, f" {name} ")) == (scope, name)
    assert Request(b"GET", b"/", b"").full_name(name) == name


@pytest.mark.parametrize("raw", [None, "", " ", "a\x1fb", "a\x1eb", "acme\x1fprod\x1forders"])
def test_no_request_names_a_topic_of_another_scope(raw: str | None) -> None:
    with pytest.raises(InvalidArgument, match="topic"):
        Request(b"GET", b"/", b"").full_name(raw)
