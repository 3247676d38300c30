"""Access rules and roles in the SDK."""

from __future__ import annotations

import asyncio

import pytest

from penstock.client import AsyncClient, Client
from penstock.model.errors import NotFound
from tests.broker_process import BrokerProcess


def test_rules_and_roles(client: Client) -> None:
    """felix-97"""
    role = client.set_role("sdk-worker", ["consume", "read"])
    assert role.permissions == ["consume", "read"]
    assert role in client.list_roles()
    rule = client.grant_access(["sdk-worker"], principal="sdk", resource="topic:jobs*")
    assert client.list_access_rules(principal="sdk") == [rule]
    decision = client.check_access("consume", "topic:jobs-1", principal="sdk")
    assert decision.allowed
    assert decision.rule == rule
    assert not client.check_access("consume", "topic:other", principal="sdk").allowed
    client.revoke_access(rule.id)
    assert client.list_access_rules(principal="sdk") == []
    client.remove_role("sdk-worker")
    with pytest.raises(NotFound):
        client.revoke_access(rule.id)


def test_the_async_client_has_the_same(broker: BrokerProcess) -> None:
    async def run() -> bool:
        async with AsyncClient(broker.url) as client:
            rule = await client.grant_access(["read"], role="sdk-team")
            decision = await client.check_access(
                "read", "topic:x", principal="sdk", roles=["sdk-team"]
            )
            await client.revoke_access(rule.id)
            return decision.allowed

    assert asyncio.run(run())


def test_without_access_control_a_sender_may_do_everything(client: Client) -> None:
    decision = client.check_access("produce", "topic:x")
    assert (decision.allowed, decision.reason) == (True, "there is no access control")
