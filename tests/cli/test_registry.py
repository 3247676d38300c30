"""`penstock tenant`, `namespace`, `stream` and `cache`."""

from __future__ import annotations

import json

from tests.cli.conftest import Run


def test_tenants_and_namespaces_are_created_listed_and_deleted(penstock: Run) -> None:
    created = penstock("tenant", "create", "acme")
    assert (created.code, created.out) == (0, "tenant acme is there\n")
    assert penstock("tenant", "create", "acme").code == 0
    assert "acme" in penstock("tenant", "list").out.splitlines()
    made = penstock("namespace", "create", "prod", "--tenant", "acme")
    assert made.out == "namespace acme/prod is there\n"
    assert penstock("namespace", "list", "-t", "acme").out == "prod\n"
    assert penstock("tenant", "describe", "acme").out == "tenant acme\n  namespace prod\n"
    refused = penstock("tenant", "delete", "acme", "--yes")
    assert refused.code == 1
    assert "FAILED_PRECONDITION" in refused.err
    assert penstock("tenant", "delete", "acme", "--cascade", "--yes").code == 0
    assert "acme" not in penstock("tenant", "list").out.splitlines()


def test_deleting_asks_first(penstock: Run) -> None:
    penstock("stream", "create", "precious")
    refused = penstock("stream", "delete", "precious", stdin="n\n")
    assert refused.code == 1
    assert "Delete stream default/default/precious" in refused.err
    assert "precious" in penstock("stream", "list").out.splitlines()
    assert penstock("stream", "delete", "precious", stdin="y\n").code == 0


def test_a_stream_is_created_described_changed_and_deleted(penstock: Run) -> None:
    """felix-125, 131."""
    refused = penstock("stream", "create", "orders", "--retention", "7d")
    assert refused.code == 1
    assert "retention needs a durable stream" in refused.err
    made = penstock("stream", "create", "orders", "--disconnect-slow-ms", "7s")
    assert (made.code, made.out) == (0, "stream default/default/orders is there\n")
    shown = penstock("stream", "describe", "orders").out
    assert "0 subscribers" in shown
    rows = {words[0]: words[1:] for line in shown.splitlines() if len(words := line.split()) > 2}
    assert rows["event_queue_depth"] == ["1024", "broker"]
    assert rows["event_queue_bytes"] == ["64", "MiB", "broker"]
    changed = penstock("stream", "change", "orders", "--event-queue-depth", "9", "--json")
    assert json.loads(changed.out)["event_queue_depth"] == 9
    assert rows["disconnect_slow_ms"][-1] == "stream"
    again = ("--reset", "event_queue_depth", "--reset", "disconnect_slow_ms")
    reset = json.loads(penstock("stream", "change", "orders", *again, "--json").out)
    assert (reset["event_queue_depth"], reset["disconnect_slow_ms"]) == (1024, 0)
    assert penstock("stream", "delete", "orders", "-y").code == 0
    gone = penstock("stream", "describe", "orders")
    assert gone.err == "Error: NOT_FOUND: stream not found: 'default/default/orders'\n"


def test_a_cache_is_created_described_changed_and_deleted(penstock: Run) -> None:
    """felix-72, 73, 74."""
    words = ("--max-bytes", "1GB", "--eviction-policy", "lru", "--durable", "--json")
    made = json.loads(penstock("cache", "create", "sessions", *words).out)
    assert (made["max_bytes"], made["eviction_policy"], made["durable"]) == (2**30, "lru", True)
    shown = penstock("cache", "describe", "sessions").out
    assert "1 GiB" in shown
    assert "0 entries, 0 bytes" in shown
    changed = penstock("cache", "change", "sessions", "--max-entries", "5", "--reset", "max_bytes")
    assert "max_entries" in changed.out
    assert json.loads(penstock("cache", "list", "--json").out)["caches"][-1]["max_entries"] == 5
    assert penstock("cache", "delete", "sessions", "--yes").code == 0
    assert "sessions" not in penstock("cache", "list").out.splitlines()


def test_a_change_that_says_nothing_or_two_things_is_refused(penstock: Run) -> None:
    nothing = penstock("stream", "change", "default")
    assert nothing.code == 2
    both = penstock(
        "stream", "change", "default", "--retention", "7d", "--reset", "retention"
    )  # fmt: skip
    assert both.code == 2
    assert "not both" in both.err


def test_the_scope_comes_from_the_environment_too(penstock: Run) -> None:
    env = {"PENSTOCK_TENANT": "default", "PENSTOCK_NAMESPACE": "nowhere"}
    unknown = penstock("stream", "list", env=env)
    assert (unknown.code, unknown.out) == (1, "")
    assert "unknown namespace 'nowhere'" in unknown.err
    assert penstock("stream", "list", "--namespace", "default", env=env).code == 0


def test_a_guarantee_that_the_storage_cannot_give_is_reported(penstock: Run) -> None:
    """felix-120"""
    refused = penstock("stream", "create", "sure", "--delivery", "at_least_once")
    assert refused.code == 1
    assert "would be lost" in refused.err


def test_a_retention_without_a_unit_is_refused(penstock: Run) -> None:
    """It would be milliseconds, and whoever means days would lose the events."""
    for words in (("stream", "create", "r"), ("stream", "change", "default")):
        refused = penstock(*words, "--retention", "5")
        assert refused.code == 2
        assert "5 of what? Say 5s, or 5ms" in refused.err
    refused = penstock("quota", "set", "default", "--stream-retention", "7")
    assert refused.code == 2
    assert "7 of what?" in refused.err
    assert penstock("stream", "change", "default", "--retention", "0").code == 0
    assert penstock("stream", "change", "default", "--disconnect-slow-ms", "0").code == 0


def test_a_byte_rate_without_a_time_says_what_to_write(penstock: Run) -> None:
    refused = penstock("quota", "set", "default", "--publish-bytes-limit", "1MB")
    assert refused.code == 2
    assert "Say 1MB/s" in refused.err


def test_durable_is_a_flag_of_streams_as_of_caches(penstock: Run) -> None:
    refused = penstock("stream", "create", "kept", "--durable")
    assert "would be lost" in refused.err


def test_a_limit_that_was_never_set_is_shown_as_none(penstock: Run) -> None:
    penstock("stream", "create", "unlimited")
    shown = penstock("stream", "describe", "unlimited").out
    rows = {words[0]: words[1:] for line in shown.splitlines() if len(words := line.split()) > 2}
    assert rows["retention_bytes"] == rows["retention"] == ["no", "limit", "default"]
