"""Full names of topics: made from scopes, and split again."""

from __future__ import annotations

import pytest

from penstock.model.scopes import (
    DEFAULT_SCOPE,
    Scope,
    full_name,
    is_stream_log,
    plain_name,
    split_name,
    stream_log_name,
)


@pytest.mark.parametrize("scope", [DEFAULT_SCOPE, ("acme", "prod"), ("acme", "default")])
@pytest.mark.parametrize("name", ["orders", "dlq.orders", "a/b", "default"])
def test_a_full_name_splits_into_its_scope_and_name(scope: Scope, name: str) -> None:
    full = full_name(scope, name)
    assert split_name(full) == (scope, name)
    assert plain_name(full) == name
    assert not is_stream_log(full)


def test_a_name_in_the_default_namespace_is_its_own_full_name() -> None:
    assert full_name(DEFAULT_SCOPE, "orders") == "orders"


def test_equal_names_of_two_tenants_have_different_full_names() -> None:
    names = {full_name((tenant, "prod"), "orders") for tenant in ("acme", "globex")}
    assert len(names | {"orders"}) == 3


@pytest.mark.parametrize("tenant", ["default", "acme"])
def test_the_log_of_a_stream_is_no_topic_of_its_namespace(tenant: str) -> None:
    full = stream_log_name((tenant, "default", "orders"))
    assert is_stream_log(full)
    assert full != full_name((tenant, "default"), "orders")
    assert split_name(full) == ((tenant, "default"), "orders")
