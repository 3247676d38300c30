"""A broker starts only on NATS servers that promise enough, and says otherwise what to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cluster.jetstream import promise
from penstock.cluster.jetstream.addresses import read_addresses
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.jetstream.promise import ClusterPromise
from penstock.cluster.jetstream.services import JetStreamServices, NatsSettings
from tests.cluster.jetstream_world import JetStreamWorld, new_cluster_name
from tests.cluster.nats_servers import NatsServers, nats_servers

KIB = 1024
WAIT_S = 60.0
ONE_SERVER = frozenset({"replicas", "unread-sync"})

ACCOUNTS = """
accounts {
  JS { jetstream: enabled, users: [
    { user: all, password: sesame }
    { user: least, password: sesame, permissions: {
        publish: ["$JS.API.>", "$JS.FC.>", "$KV.>", "penstock.>"], subscribe: "_INBOX.>" } }
    { user: no-api, password: sesame, permissions: { publish: "x", subscribe: "_INBOX.>" } }
    { user: no-inbox, password: sesame, permissions: { publish: ">", subscribe: "x" } }
    { user: no-keys, password: sesame, permissions: { publish: "$JS.>", subscribe: ">" } }
    { user: no-log, password: sesame, permissions: { publish: ["$JS.>", "$KV.>"], subscribe: ">" } }
  ] }
  WITHOUT { users: [ { user: without, password: sesame } ] }
  SMALL { jetstream: { max_file: 1M }, users: [ { user: small, password: sesame } ] }
}
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """One server with several accounts, which syncs now and then."""
    folder = tmp_path_factory.mktemp("alone")
    with nats_servers(folder, 1, sync="2m", max_payload=256 * KIB, extra=ACCOUNTS) as running:
        yield running


async def opened(url: str, **settings: Any) -> ClusterPromise:
    """The promise of a cluster with one stream."""
    wanted: dict[str, Any] = {
        "addresses": read_addresses(url),
        "cluster": new_cluster_name(),
        "max_message_bytes": 128 * KIB,
        "accept": frozenset(),
    }
    services = JetStreamServices(NatsSettings(**wanted | settings), "b1")
    try:
        async with asyncio.timeout(WAIT_S):
            await services.open()
            await services.stream("shard-0", 1024 * KIB)
        return services.promise
    finally:
        await services.close()


def refusal(url: str, **settings: Any) -> ClusterRefused:
    with pytest.raises(ClusterRefused) as refused:
        asyncio.run(opened(url, **settings))
    assert "sesame" not in str(refused.value)
    return refused.value


def url_of(servers: NatsServers, user: str = "all", password: str = "sesame") -> str:
    return servers.url.replace("nats://", f"nats://{user}:{password}@")


def monitors_of(servers: NatsServers) -> tuple[str, ...]:
    return tuple(node.monitor_url for node in servers.nodes)


# -- replicas, sync, payload ----------------------------------------------------------------------


def test_three_synced_replicas_are_promised_when_all_monitors_say_so(servers: NatsServers) -> None:
    monitors = monitors_of(servers)
    promised = asyncio.run(opened(servers.url, monitors=monitors))
    assert promised == ClusterPromise(3, "always")


def test_without_all_monitors_the_operator_has_to_state_the_syncing(servers: NatsServers) -> None:
    refused = refusal(servers.url, monitors=monitors_of(servers)[:1])
    assert refused.name == "unread-sync"
    for word in ("n1", "n2", "Give the monitoring addresses", "`unread-sync`"):
        assert word in str(refused)
    stated = asyncio.run(opened(servers.url, accept=frozenset({"unread-sync"})))
    assert stated == ClusterPromise(3, "stated")


def test_one_server_is_refused_unless_fewer_replicas_are_accepted(alone: NatsServers) -> None:
    refused = refusal(url_of(alone), accept=frozenset({"unread-sync"}))
    assert refused.name == "replicas"
    assert "Run 3 servers with JetStream, or accept `replicas`" in str(refused)
    assert asyncio.run(opened(url_of(alone), accept=ONE_SERVER)) == ClusterPromise(1, "stated")


def test_servers_that_sync_now_and_then_are_refused_by_name_unless_accepted(
    alone: NatsServers,
) -> None:
    monitors = monitors_of(alone)
    for accepted in (frozenset({"replicas"}), ONE_SERVER):
        refused = refusal(url_of(alone), monitors=monitors, accept=accepted)
        assert refused.name == "sync"
        assert "n0 do not sync every write: set `sync_interval: always`" in str(refused)
    accept = frozenset({"replicas", "sync"})
    less = asyncio.run(opened(url_of(alone), monitors=monitors, accept=accept))
    assert less == ClusterPromise(1, "less")


def test_a_server_that_takes_too_small_messages_is_refused(alone: NatsServers) -> None:
    refused = refusal(url_of(alone), accept=ONE_SERVER, max_message_bytes=256 * KIB)
    assert "Raise max_payload on every server, or lower max_message_bytes" in str(refused)
    at_most = 256 * KIB - 256
    promised = asyncio.run(opened(url_of(alone), accept=ONE_SERVER, max_message_bytes=at_most))
    assert promised.replicas == 1


def test_one_server_of_three_with_a_smaller_max_payload_is_found_by_its_monitor() -> None:
    sizes = {"n0": 16 * KIB, "n1": 8 * KIB, "n2": 16 * KIB}
    with pytest.raises(ClusterRefused, match="server n1 has a max_payload of 8192 bytes"):
        promise.check_payload(sizes, 10 * KIB)
    promise.check_payload(sizes, 8 * KIB)


@pytest.mark.parametrize("name", ["", "Sync", "all"])
def test_only_what_has_a_name_can_be_accepted(name: str) -> None:
    with pytest.raises(ClusterRefused, match=r"there is no .* to accept.*`sync`: servers that"):
        promise.check_names([name])
    assert promise.check_names(["sync", "sync"]) == {"sync"}


@pytest.mark.parametrize(
    "monitor",
    [
        "http://user:sesame@127.0.0.1:1",
        "127.0.0.1:8222",
        "http://[::1",
        "ftp://127.0.0.1:1/x",
        "http://127.0.0.1:99999999",
        "http://a..b/",
        "",
    ],
)
def test_a_monitoring_address_that_does_not_answer_is_refused_without_its_secrets(
    alone: NatsServers, monitor: str
) -> None:
    refused = refusal(url_of(alone), monitors=(monitor,), accept=ONE_SERVER)
    assert "Give the address of `http_port`" in str(refused)


def test_the_port_for_clients_is_no_monitoring_address(alone: NatsServers) -> None:
    monitor = f"http://127.0.0.1:{alone.nodes[0].client_port}"
    refused = refusal(url_of(alone), monitors=(monitor,), accept=ONE_SERVER)
    assert "does not answer as one" in str(refused)


# -- what the account may do ---------------------------------------------------------------------


def test_a_user_with_the_least_permissions_can_do_everything(alone: NatsServers) -> None:
    promised = asyncio.run(opened(url_of(alone, "least"), accept=ONE_SERVER))
    assert promised == ClusterPromise(1, "stated")


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("no-api", "$JS.API.STREAM.INFO"),
        ("no-inbox", "_INBOX"),
        ("no-keys", "$KV.penstock-"),
        ("no-log", "penstock."),
    ],
)
def test_a_user_without_a_permission_is_refused_and_told_which(
    alone: NatsServers, user: str, subject: str
) -> None:
    text = str(refusal(url_of(alone, user), accept=ONE_SERVER))
    assert subject in text.split(". Permit")[0]
    assert "Permit its user to publish to `$JS.API.>`" in text


def test_an_account_without_jetstream_is_refused(alone: NatsServers) -> None:
    text = str(refusal(url_of(alone, "without"), accept=ONE_SERVER))
    assert "Add `jetstream: enabled` to the account" in text


def test_an_account_with_too_little_storage_is_refused(alone: NatsServers) -> None:
    text = str(refusal(url_of(alone, "small"), accept=ONE_SERVER))
    assert "allow them more (max_file_store, or the account's limits)" in text


def test_servers_without_jetstream_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.cluster.jetstream.setup.PATIENCE_S", 0.5)
    with nats_servers(tmp_path, 1, has_jetstream=False) as plain:
        text = str(refusal(plain.url, accept=ONE_SERVER))
    assert "add `jetstream { store_dir: ..., sync_interval: always }`" in text


def test_a_wrong_password_is_told_once_and_never_shown(
    alone: NatsServers, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait() -> None:
        url = url_of(alone, password="wrong-sesame")
        services = JetStreamServices(NatsSettings(read_addresses(url), "c", KIB), "b1")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(services.open(), 1.5)
        await services.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(wait())
    told = [each.getMessage() for each in caplog.records if each.name == "penstock.cluster"]
    assert len(told) == 1
    assert "it does not know the user, password or token of its address" in told[0]
    assert "sesame" not in caplog.text


# -- whose streams ---------------------------------------------------------------------------------


def test_two_clusters_on_one_account_do_not_mix(jetstream: JetStreamWorld) -> None:
    one = jetstream.broker(behind_proxy=False)
    other = JetStreamWorld(jetstream.servers)
    try:
        theirs = other.broker(behind_proxy=False)
        jetstream.call(one.stream.append, 1, b"ours")
        other.call(theirs.stream.append, 1, b"theirs")
        jetstream.call(one.keys.put, "k", b"ours", 0)
        assert other.call(theirs.keys.get, "k") is None
        assert one.services.cluster_id != theirs.services.cluster_id
        assert other.call(theirs.stream.look_up, 1).data == b"theirs"
    finally:
        other.close()


def test_a_cluster_whose_bucket_is_gone_is_refused(jetstream: JetStreamWorld) -> None:
    broker = jetstream.broker(behind_proxy=False)
    jetstream.run(jetstream.delete_stream(broker, f"KV_penstock-{jetstream.cluster}"))
    with pytest.raises(ClusterRefused, match=r"is not of this cluster.*bring it back, or remove"):
        jetstream.broker(behind_proxy=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"discard": "old"}, "discard is 'old', not 'new'"),
        ({"max_age": 10**12}, "max_age is 1000000000000, not 0"),
        ({"max_msgs": 1000}, "max_msgs is 1000, not -1"),
        ({"subjects": ["mine"]}, "has other subjects than its own"),
        ({"metadata": {}}, "is not of this cluster"),
        ({"num_replicas": 1}, "has 1 replicas, not 3: edit it with"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_stream_that_somebody_changed_is_refused_and_left_as_it_is(
    jetstream: JetStreamWorld, change: dict[str, Any], told: str
) -> None:
    first = jetstream.broker(behind_proxy=False)
    api = first.services.connection
    name = first.stream.place.name

    async def config() -> dict[str, Any]:
        answer: Any = await api.ask(f"$JS.API.STREAM.INFO.{name}".encode(), b"", 10.0)
        found: dict[str, Any] = msgspec.json.decode(answer.data)["config"]
        return found

    async def edit() -> Any:
        body = msgspec.json.encode(await config() | change)
        return await api.ask(f"$JS.API.STREAM.UPDATE.{name}".encode(), body, 10.0)

    answer = msgspec.json.decode(jetstream.run(edit()).data)
    assert "error" not in answer, answer
    with pytest.raises(ClusterRefused, match=told):
        jetstream.broker(behind_proxy=False)
    kept = jetstream.run(config())
    kept["metadata"] = {k: v for k, v in kept["metadata"].items() if k[:5] != "_nats"}
    assert kept | change == kept


def test_a_stream_may_have_another_size_than_it_was_made_with(jetstream: JetStreamWorld) -> None:
    small = jetstream.broker(behind_proxy=False, max_bytes=1024 * KIB)
    large = jetstream.broker(behind_proxy=False, max_bytes=2048 * KIB)
    assert large.stream.place == small.stream.place
    assert jetstream.bounds(large.stream).room_bytes <= 1024 * KIB


def test_brokers_that_start_at_once_make_one_stream(jetstream: JetStreamWorld) -> None:
    async def start() -> list[Any]:
        connected = [jetstream.connect() for _ in range(4)]
        brokers = await asyncio.gather(*connected)
        made = [each.services.stream("shard-0", 1024 * KIB) for each in brokers]
        for broker, stream in zip(brokers, await asyncio.gather(*made), strict=True):
            broker.stream = stream
        return list(brokers)

    brokers = jetstream.run(start())
    assert len({each.stream.place for each in brokers}) == 1
    assert len({each.services.cluster_id for each in brokers}) == 1


@pytest.mark.parametrize("cluster", ["", "A", "a.b", "a b", "-a", "a-", "x" * 65, "a*", "ü"])
def test_a_cluster_name_that_fits_no_subject_is_refused(cluster: str) -> None:
    async def make() -> None:
        JetStreamServices(NatsSettings(read_addresses("nats://a"), cluster, KIB), "b1")

    with pytest.raises(ClusterRefused, match="1 to 64 of a-z, 0-9 and -"):
        asyncio.run(make())
