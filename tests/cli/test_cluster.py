"""`penstock cluster` against real brokers on NATS: what it shows, hands over and forgets; and the
demo, which starts and kills a cluster of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.cli.conftest import Ran, call_penstock
from tests.cluster.cluster_process import ClusterProcess, shared_nats

TOKEN = "the-token-of-these-tests"
TIMEOUT_S = 60.0
DEMO_S = 600.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """One with access control, so that there is an audit log."""
    directory = tmp_path_factory.mktemp("cluster")
    file = directory / "token"
    file.write_text(TOKEN)
    flags = ("--access-control", "--token-file", str(file))
    with ClusterProcess(shared_nats(), directory, *flags, count=2) as cluster:
        yield cluster


def call(cluster: ClusterProcess, *words: str, token: str = TOKEN) -> Ran:
    urls = ",".join(each.url for each in cluster.brokers if each.is_running())
    env = {"PENSTOCK_URL": urls} | ({"PENSTOCK_TOKEN": token} if token else {})
    return call_penstock("cluster", *words, env=env)


def hand_over(cluster: ClusterProcess, *words: str) -> Ran:
    """Calls a command that needs a standby. A broker that has just handed over reads the log again
    before it is one, and tells the others with its next announcement."""
    return eventually(
        lambda: call(cluster, *words),
        lambda ran: "caught up" not in ran.err,
        timeout_s=TIMEOUT_S,
    )


def test_status_shows_brokers_the_owner_the_log_and_what_a_success_means(
    cluster: ClusterProcess,
) -> None:
    owner, standby = cluster.owner(), cluster.standby()
    ran = call(cluster, "status")
    assert ran.code == 0, ran.err
    assert re.search(rf"^{owner.name} +owner +{owner.url} +[0-9.]+ +- +", ran.out, re.M)
    assert re.search(rf"^{standby.name} +standby +{standby.url} +[0-9.]+ +[0-9,]+ ", ran.out, re.M)
    assert f"shard 0 is owned by {owner.name}, epoch " in ran.out
    assert f"the log penstock-{cluster.name}_shard-0: frames 1 to " in ran.out
    assert len(re.findall(r"^n\d +(?:leader|follower) +current", ran.out, re.M)) == 3
    assert "2 of 3 NATS servers have stored its data and synced it to disk" in ran.out


def test_status_as_json_is_what_the_broker_says(cluster: ClusterProcess) -> None:
    found = json.loads(call(cluster, "status", "--json").out)
    assert {each["name"]: each["state"] for each in found["brokers"]} == {
        cluster.owner().name: "owner",
        cluster.standby().name: "standby",
    }
    assert found["shards"][0]["owner"] == cluster.owner().name
    assert [each["role"] for each in found["log"]["servers"]].count("leader") == 1
    assert found["log"]["bytes"] > 0


def test_the_plain_map_asks_nothing_of_nats(cluster: ClusterProcess) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    found = cluster.owner().client.get("/v1/cluster", headers=headers).json()
    assert (found["log"], found["log_error"]) == (None, "")


def test_move_hands_the_shard_to_the_broker_that_was_named(cluster: ClusterProcess) -> None:
    before, successor = cluster.owner(), cluster.standby()
    ran = hand_over(cluster, "move", "--to", successor.name)
    assert ran.code == 0, ran.err
    moved = rf"shard 0 has moved from {before.name} to {successor.name}, epoch \d+; the longest"
    assert re.match(rf"{moved} time without an answer was \d+ ms", ran.out)
    assert cluster.owner() is successor
    cluster.wait_until_whole()


def test_drain_lets_a_broker_own_nothing_and_says_if_it_owns_nothing(
    cluster: ClusterProcess,
) -> None:
    drained = cluster.owner()
    found = json.loads(hand_over(cluster, "drain", drained.name, "--json").out)
    assert found["before"][0]["owner"] == drained.name
    assert found["after"][0]["owner"] == cluster.owner().name != drained.name
    assert found["after"][0]["epoch"] == found["before"][0]["epoch"] + 1
    cluster.wait_until_whole()
    again = hand_over(cluster, "drain", drained.name)
    assert (again.code, again.out) == (0, "it owns nothing: nothing has to be handed over\n")


def test_what_cannot_be_done_is_said(cluster: ClusterProcess) -> None:
    owner, standby = cluster.owner().name, cluster.standby().name
    for words, said in (
        (
            ("move", "--to", "nobody"),
            f"'nobody' is no standby that has caught up; there is: {standby}",
        ),
        (("move", "--to", owner), f"{owner} owns the shard already"),
        (("drain", "nobody"), "no live broker of this cluster has the name 'nobody'"),
        (("remove", standby), f"broker '{standby}' is live; stop it first"),
        (("remove", owner), f"broker '{owner}' is live; stop it first"),
        (("remove", "nobody"), "no broker 'nobody' has ever announced itself"),
    ):
        ran = call(cluster, *words)
        assert (ran.code, said in ran.err) == (1, True), ran.err
    eventually(
        lambda: call(cluster, "move", "--to", "nobody").err,
        lambda err: f"'nobody' is no standby that has caught up; there is: {standby}" in err,
        timeout_s=TIMEOUT_S,
    )


def test_without_the_permission_nothing_is_handed_over(cluster: ClusterProcess) -> None:
    owner, root = cluster.owner(), {"Authorization": f"Bearer {TOKEN}"}
    made = owner.client.post("/v1/tokens", headers=root, json={"principal": "someone"}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    for method, path, body in (
        ("POST", "/v1/cluster/move", {"to": cluster.standby().name}),
        ("POST", "/v1/cluster/drain", {"broker": owner.name}),
        ("DELETE", "/v1/cluster/brokers/gone", None),
    ):
        reply = owner.client.request(method, path, headers=headers, json=body)
        assert reply.status_code == 403, reply.text
    assert cluster.owner() is owner


def test_every_command_is_in_the_audit_log(cluster: ClusterProcess) -> None:
    successor, drained = cluster.standby().name, cluster.owner().name
    for words in (("drain", drained), ("move", "--to", drained)):
        ran = hand_over(cluster, *words)
        assert (ran.code, "has moved" in ran.out) == (0, True), ran
        cluster.wait_until_whole()
    env = {"PENSTOCK_URL": cluster.owner().url, "PENSTOCK_TOKEN": TOKEN}
    rows = [json.loads(line) for line in call_penstock("audit", "--json", env=env).out.splitlines()]
    seen = [
        (row["action"], row["resource"]) for row in rows if row["action"].startswith("cluster.")
    ]
    assert seen[-2:] == [
        ("cluster.drain", f"broker:{drained}"),
        ("cluster.move", f"broker:{drained}"),
    ]
    assert successor != drained


def test_a_broker_that_is_gone_is_shown_until_it_is_removed(cluster: ClusterProcess) -> None:
    lost = cluster.standby()
    lost.kill()

    def states() -> dict[str, str]:
        found = json.loads(call(cluster, "status", "--json").out)
        return {each["name"]: each["state"] for each in found["brokers"]}

    eventually(states, lambda found: found.get(lost.name) == "gone", timeout_s=TIMEOUT_S)
    ran = call(cluster, "remove", lost.name)
    assert ran.code == 0, ran.err
    eventually(states, lambda found: lost.name not in found, timeout_s=TIMEOUT_S)
    lost.start()
    cluster.wait_until_whole()


def test_a_broker_without_a_cluster_says_so(broker: BrokerProcess) -> None:
    env = {"PENSTOCK_URL": broker.url}
    ran = call_penstock("cluster", "status", env=env)
    assert (ran.code, "is not part of a cluster" in ran.err) == (1, True)
    ran = call_penstock("cluster", "move", "--to", "b2", env=env)
    assert (ran.code, "is not part of a cluster" in ran.err) == (1, True)
    assert httpx.get(f"{broker.url}/v1/cluster", trust_env=False).json()["brokers"] == []


# -- the demo --------------------------------------------------------------------------------------


def start_demo(folder: Path) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    env = inherited | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "cluster", "demo"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def running_below(folder: Path) -> list[str]:
    """The command lines of processes that name the folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_the_demo_kills_its_parts_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    try:
        out, err = demo.communicate(timeout=DEMO_S)
    finally:
        demo.kill()
    assert (demo.returncode, err) == (0, ""), out
    for victim in ("the owner, b", "a NATS follower, nats-", "the NATS leader, nats-"):
        assert f"killing {victim}" in out
    assert len(re.findall(r"nobody answered for [\d,]+ ms; b\d owns the shard", out)) == 3
    assert re.search(r"^\d[\d,]+ messages were acknowledged$", out, re.M)
    assert "lost: 0, stored twice: 0, never delivered: 0" in out
    assert list(tmp_path.iterdir()) == []
    assert running_below(tmp_path) == []


def test_ctrl_c_ends_everything_that_the_demo_has_started(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    try:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("starting 3 NATS servers")
        eventually(lambda: len(running_below(tmp_path)), lambda n: n >= 3, timeout_s=TIMEOUT_S)
        time.sleep(0.2)  # Anywhere within the start of the servers.
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=TIMEOUT_S)
    finally:
        demo.kill()
    assert demo.returncode == 1
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert running_below(tmp_path) == []


def test_the_demo_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ran = call_penstock("cluster", "demo", env={"PATH": str(tmp_path)})
    assert ran.code == 1
    assert "pip install 'penstock[nats]'" in ran.err
