"""Declared resources: a plan over HTTP, and those of the configuration file at a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, StartFailed
from tests.contract.checks import new_name
from tests.contract.conftest import StartBroker


def apply(broker: BrokerProcess, **body: Any) -> dict[str, Any]:
    reply = broker.client.post("/v1/apply", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def actions(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(step["action"], step["kind"], step["name"]) for step in answer["steps"]]


def declaration(tenant: str, topic: str) -> dict[str, Any]:
    return {
        "tenants": [{"tenant_id": tenant, "namespaces": ["prod"]}],
        "streams": [{"tenant_id": tenant, "namespace": "prod", "name": "s", "lag_alert_events": 5}],
        "caches": [{"tenant_id": tenant, "namespace": "prod", "name": "c", "max_bytes": "1MB"}],
        "topics": [{"name": topic, "partitions": 3, "retention_ms": "7d", "max_attempts": 4}],
    }


def test_missing_resources_are_created_with_their_settings(broker: BrokerProcess) -> None:
    tenant, topic = new_name("tenant"), new_name()
    answer = apply(broker, **declaration(tenant, topic))
    assert answer["applied"] is True
    assert actions(answer) == [
        ("create", "tenant", tenant),
        ("create", "namespace", f"{tenant}/prod"),
        ("create", "stream", f"{tenant}/prod/s"),
        ("create", "cache", f"{tenant}/prod/c"),
        ("create", "topic", topic),
    ]
    place = f"/v1/tenants/{tenant}/namespaces/prod"
    assert broker.client.get(f"{place}/streams/s").json()["lag_alert_events"] == 5
    assert broker.client.get(f"{place}/caches/c").json()["max_bytes"] == 2**20
    made = broker.client.get(f"/v1/topics/{topic}").json()
    assert (made["retention_ms"], made["max_attempts"]) == (7 * 86_400_000, 4)
    assert len(made["partitions"]) == 3


def test_applying_twice_changes_nothing(broker: BrokerProcess) -> None:
    wanted = declaration(new_name("tenant"), new_name())
    apply(broker, **wanted)
    revision = broker.client.get("/v1/registry").json()["revision"]
    again = apply(broker, **wanted, changes=True)
    assert {action for action, _, _ in actions(again)} == {"keep"}
    assert broker.client.get("/v1/registry").json()["revision"] == revision


def test_a_dry_run_does_nothing(broker: BrokerProcess) -> None:
    topic = new_name()
    answer = apply(broker, topics=[{"name": topic}], dry_run=True)
    assert answer["applied"] is False
    assert actions(answer) == [("create", "topic", topic)]
    assert broker.client.get(f"/v1/topics/{topic}").status_code == 404


def test_a_difference_is_reported_and_changed_only_when_asked(broker: BrokerProcess) -> None:
    topic, cache = new_name(), new_name("cache")
    apply(broker, topics=[{"name": topic}], caches=[{"name": cache}])
    wanted = {
        "topics": [{"name": topic, "retention_bytes": "1MB"}],
        "caches": [{"name": cache, "max_entries": 10}],
    }
    expected = [
        ("change", "cache", f"default/default/{cache}"),
        ("change", "topic", topic),
    ]
    reported = apply(broker, **wanted)
    assert actions(reported) == expected
    assert reported["steps"][0]["changes"] == [{"setting": "max_entries", "from": 0, "to": 10}]
    assert broker.client.get(f"/v1/topics/{topic}").json()["retention_bytes"] == 0
    assert actions(apply(broker, **wanted, changes=True)) == expected
    assert broker.client.get(f"/v1/topics/{topic}").json()["retention_bytes"] == 2**20
    assert {action for action, _, _ in actions(apply(broker, **wanted))} == {"keep"}


def test_settings_that_are_not_declared_stay(broker: BrokerProcess) -> None:
    topic = new_name()
    apply(broker, topics=[{"name": topic, "max_attempts": 3, "retention_ms": 1000}])
    apply(broker, topics=[{"name": topic, "retention_ms": 2000}], changes=True)
    found = broker.client.get(f"/v1/topics/{topic}").json()
    assert (found["max_attempts"], found["retention_ms"]) == (3, 2000)


def test_a_conflict_refuses_all_changes(broker: BrokerProcess) -> None:
    topic, other = new_name(), new_name()
    apply(broker, topics=[{"name": topic, "partitions": 2}])
    wanted = {"topics": [{"name": topic, "partitions": 3}, {"name": other}]}
    plan = apply(broker, **wanted, dry_run=True)
    assert actions(plan) == [("conflict", "topic", topic), ("create", "topic", other)]
    assert "cannot change" in plan["steps"][0]["reason"]
    refused = broker.client.post("/v1/apply", json=wanted | {"changes": True})
    assert refused.status_code == 409
    assert topic in refused.json()["message"]
    assert broker.client.get(f"/v1/topics/{other}").status_code == 404


def test_durable_of_a_cache_is_a_conflict(broker: BrokerProcess) -> None:
    cache = new_name("cache")
    apply(broker, caches=[{"name": cache}])
    plan = apply(broker, caches=[{"name": cache, "durable": True}], dry_run=True)
    assert actions(plan) == [("conflict", "cache", f"default/default/{cache}")]


def test_a_namespace_that_is_neither_there_nor_declared_is_a_conflict(
    broker: BrokerProcess,
) -> None:
    tenant = new_name("tenant")
    plan = apply(broker, streams=[{"tenant_id": tenant, "name": "s"}], dry_run=True)
    assert actions(plan) == [("conflict", "stream", f"{tenant}/default/s")]
    assert plan["steps"][0]["reason"].startswith(
        f"there is no namespace 'default' of tenant {tenant!r}"
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            {"topics": [{"name": "a"}, {"name": "a "}]},
            "topic 'default/default/a' is declared twice",
        ),
        ({"caches": [{"name": "c"}, {"name": "c"}]}, "declared twice"),
        ({"topics": [{"partitions": 1}]}, "name is required"),
        ({"topics": [{"name": "a", "partitions": 0}]}, "partitions must be a whole number, 1 to"),
        (
            {"topics": [{"name": "a", "retention_ms": "soon"}]},
            "it takes milliseconds or a duration",
        ),
        ({"streams": [{"name": "s", "request_id": "x"}]}, "request_id"),
        ({"streams": [{"name": "s", "colour": "red"}]}, "colour"),
        ({"queues": []}, "queues"),
    ],
)
def test_a_wrong_declaration_is_400(
    broker: BrokerProcess, body: dict[str, Any], complaint: str
) -> None:
    reply = broker.client.post("/v1/apply", json=body)
    assert reply.status_code == 400, reply.text
    assert complaint in reply.json()["message"]


FILE = """
log_level = "info"

[[tenants]]
tenant_id = "acme"
namespaces = ["prod"]

[[streams]]
tenant_id = "acme"
namespace = "prod"
name = "ticks"

[[topics]]
name = "tasks"
partitions = 2
retention_ms = "{retention}"
"""


def test_a_start_creates_declared_resources_and_reports_differences(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(FILE.format(retention="1d"))
    broker = start_broker("--config", str(file))
    assert broker.client.get("/v1/topics").json() == {"topics": ["tasks"]}
    url = "/v1/tenants/acme/namespaces/prod/streams/ticks"
    assert broker.client.get(url).status_code == 200
    file.write_text(FILE.format(retention="2d"))
    broker.restart()
    assert "'tasks' differs" in broker.stderr()
    assert "--apply changes it" in broker.stderr()
    day_ms = 86_400_000
    assert broker.client.get("/v1/topics/tasks").json()["retention_ms"] == day_ms
    broker.terminate()
    broker = start_broker("--config", str(file), "--apply")
    assert broker.client.get("/v1/topics/tasks").json()["retention_ms"] == 2 * day_ms


def test_a_start_with_apply_is_refused_when_a_change_is_impossible(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(FILE.format(retention="1d"))
    start_broker("--config", str(file)).terminate()
    file.write_text(FILE.format(retention="1d").replace("partitions = 2", "partitions = 4"))
    with pytest.raises(StartFailed, match="the number of partitions cannot change"):
        start_broker("--config", str(file), "--apply")
    broker = start_broker("--config", str(file))
    assert "cannot change" in broker.stderr()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[[topics]]\nname = "t"\ncolour = "red"', "colour"),
        ("[[topics]]\npartitions = 2", "name is required"),
        ("topics = 3", "topics"),
    ],
)
def test_a_wrong_declaration_in_the_file_stops_the_start(
    start_broker: StartBroker, tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    with pytest.raises(StartFailed, match=complaint):
        start_broker("--config", str(file), memory=True)


def test_a_follower_declares_only_topics(broker: BrokerProcess, start_broker: StartBroker) -> None:
    follower = start_broker("--control-plane", broker.url)
    refused = follower.client.post("/v1/apply", json={"caches": [{"name": "c"}]})
    assert refused.status_code == 409
    assert "control plane" in refused.json()["message"]
    apply(follower, topics=[{"name": "tasks"}])
    assert follower.client.get("/v1/topics").json() == {"topics": ["tasks"]}
