"""`penstock quota`: show and set."""

from __future__ import annotations

import json

from tests.cli.conftest import Run


def test_a_quota_is_set_shown_and_reset(penstock: Run) -> None:
    """felix-102."""
    penstock("tenant", "create", "limited")
    limits = ("--publish-rate-limit", "50/s", "--backlog-bytes", "1MB", "--cache-memory", "2048")
    changed = penstock("quota", "set", "limited", *limits)
    assert changed.code == 0, changed.err
    assert changed.out.startswith("quota of limited\n")
    shown = json.loads(penstock("quota", "show", "limited", "--json").out)
    found = {name: limit for name, limit in shown["limits"].items() if limit is not None}
    assert found == {"publish_rate_limit": 50, "backlog_bytes": 2**20, "cache_memory": 2048}
    words = ("--reset", "backlog_bytes", "--reset", "cache_memory", "--json")
    reset = json.loads(penstock("quota", "set", "limited", *words).out)
    assert [name for name, limit in reset["limits"].items() if limit] == ["publish_rate_limit"]


def test_a_wrong_quota_is_one_line(penstock: Run) -> None:
    refused = penstock("quota", "set", "default", "--publish-rate-limit", "fast")
    assert refused.code == 1
    assert "it takes a number per second, or a rate such as" in refused.err
    assert penstock("quota", "show", "nobody").code == 1
