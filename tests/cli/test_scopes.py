"""--tenant and --namespace of the commands on topics and messages."""

from __future__ import annotations

from tests.cli.conftest import Run

ACME = ("--tenant", "acme", "--namespace", "prod")


def test_commands_on_topics_take_a_tenant_and_a_namespace(penstock: Run) -> None:
    penstock("tenant", "create", "acme")
    penstock("namespace", "create", "prod", "--tenant", "acme")
    assert penstock("topic", "create", "scoped", *ACME).out == "created topic scoped, 1 partition\n"
    assert "scoped" not in penstock("topic", "list").out
    environment = {"PENSTOCK_TENANT": "acme", "PENSTOCK_NAMESPACE": "prod"}
    assert penstock("topic", "list", env=environment).out == "scoped\n"
    assert penstock("produce", "scoped", "hello", "-t", "acme", "-n", "prod").code == 0
    words = ("consume", "scoped", "--group", "g", "--max", "1", "--timeout", "5", "--ack")
    assert "hello" in penstock(*words, *ACME).out
    assert "\ng " in penstock("topic", "describe", "scoped", *ACME).out
    missing = penstock("produce", "scoped", "hello")
    assert missing.code == 1
    assert "unknown topic 'scoped';" in missing.err


def test_a_namespace_with_topics_is_deleted_with_cascade_only(penstock: Run) -> None:
    penstock("tenant", "create", "leaving")
    penstock("namespace", "create", "n", "--tenant", "leaving")
    assert penstock("topic", "create", "t", "-t", "leaving", "-n", "n").code == 0
    refused = penstock("namespace", "delete", "n", "--tenant", "leaving", "--yes")
    assert refused.code == 1
    assert "has 1 topics; use cascade" in refused.err
    words = ("namespace", "delete", "n", "--tenant", "leaving", "--yes", "--cascade")
    assert penstock(*words).code == 0
