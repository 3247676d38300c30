"""A broker that follows another one's registry, as two processes and more."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_process import PROMPT_S, BrokerProcess, eventually
from tests.contract.conftest import SMALL_SEGMENTS, assert_no_traceback
from tests.contract.test_registry import Place, assert_typed_error, make_place
from tests.contract.wire import Wire, encode
from tests.tls_proxy import Certificate, tls_proxy

SYNC_MS = 100
TOKEN = "s3cret-Token_0123456789"

Start = Callable[..., BrokerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a broker on a directory of its own. `at` is its port; `follows` another's."""
    made: list[BrokerProcess] = []

    def make(
        *flags: str, at: int = 0, follows: int = 0, memory: bool = False, **env: str
    ) -> BrokerProcess:
        env = {"PENSTOCK_REGISTRY_SYNC_MS": str(SYNC_MS)} | SMALL_SEGMENTS | env
        if follows:
            flags = (*flags, "--control-plane", f"http://127.0.0.1:{follows}")
        if at:
            flags = (*flags, "--port", str(at))
        directory = None if memory else tmp_path / str(len(made))
        process = BrokerProcess(directory, *flags, env=env)
        made.append(process)
        return process.start()

    try:
        yield make
        for process in made:
            assert_no_traceback(process)
    finally:
        for process in made:
            process.close()
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def port() -> int:
    """A port that can be used again and again."""
    return free_port()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number: int = taken.getsockname()[1]
        return number


def status(broker: BrokerProcess) -> dict[str, Any]:
    shown: dict[str, Any] = broker.client.get("/v1/registry").json()
    return shown


def entries(broker: BrokerProcess) -> list[Any]:
    """What two registries may have in common."""
    taken = broker.client.get("/v1/registry/snapshot").json()["entries"]
    own = {"id", "revision"}
    return sorted([{k: v for k, v in entry.items() if k not in own} for entry in taken], key=repr)


def synced(plane: BrokerProcess, follower: BrokerProcess) -> None:
    expected = entries(plane)
    eventually(lambda: entries(follower), lambda seen: seen == expected)


def connected(follower: BrokerProcess, *, is_so: bool = True) -> dict[str, Any]:
    return eventually(lambda: status(follower), lambda seen: seen["connected"] is is_so)


def follows_itself(broker: BrokerProcess) -> dict[str, Any]:
    return eventually(lambda: status(broker), lambda seen: "itself" in (seen["last_error"] or ""))


def publish(broker: BrokerProcess, place: Place, stream: str = "s") -> httpx.Response:
    url = f"{place.url}/streams/{stream}/publish"
    return broker.client.post(url, json={"payload": "aGk="})


def there(place: Place, broker: BrokerProcess) -> Place:
    """The same place on another broker."""
    return Place(broker.client, place.tenant, place.namespace)


# -- following -----------------------------------------------------------------------------------


def test_what_the_control_plane_has_and_gets_and_loses_is_followed(start: Start) -> None:
    """felix-90, 91."""
    plane = start()
    place = make_place(plane.client, "acme")
    place.create("streams", name="s", event_queue_depth=7)
    follower = start(follows=plane.port)
    assert entries(follower) == entries(plane), "a start syncs before the address is printed"
    assert publish(follower, place).status_code == 200
    place.create("streams", name="new")
    plane.client.patch(f"{place.url}/streams/s", json={"event_queue_depth": 9})
    plane.client.delete("/v1/tenants/default?cascade=true")
    synced(plane, follower)
    assert publish(follower, place, "new").status_code == 200
    shown = there(place, follower).get("streams/s")
    assert (shown["event_queue_depth"], shown["origins"]["event_queue_depth"]) == (9, "stream")
    plane.client.delete(f"{place.url}/streams/new")
    synced(plane, follower)
    message = assert_typed_error(publish(follower, place, "new"), 404, "NOT_FOUND")
    assert message == "stream not found: 'acme/prod/new'"


def test_a_follower_says_whom_it_follows_and_how_it_goes(start: Start, port: int) -> None:
    plane = start(at=port)
    follower = start(follows=port)
    shown = connected(follower)
    assert shown["role"] == "follower"
    assert shown["control_plane"] == f"http://127.0.0.1:{port}"
    assert shown["last_error"] is None
    assert abs(shown["last_sync_ms"] - time.time() * 1000) < 5000
    plane.kill()
    away = connected(follower, is_so=False)
    assert away["last_error"]
    assert away["last_sync_ms"] >= shown["last_sync_ms"]
    assert f"follows http://127.0.0.1:{port}" in follower.stdout()


def test_an_outage_and_its_end_are_logged_once_each(start: Start, port: int) -> None:
    plane = start(at=port)
    follower = start(follows=port)
    connected(follower)
    plane.kill()
    connected(follower, is_so=False)
    follower.client.post("/v1/tenants", json={"tenant_id": "t"})
    time.sleep(5 * SYNC_MS / 1000)  # several syncs fail
    plane.start()
    connected(follower)
    time.sleep(3 * SYNC_MS / 1000)  # several succeed
    log = follower.stderr()
    assert log.count("cannot be followed") == 1
    assert log.count("the registry follows") == 2, "at the start, and after the outage"


# -- the control plane is away -------------------------------------------------------------------


@pytest.mark.parametrize("has_default", [True, False])
def test_a_follower_gives_up_its_own_default_when_it_first_meets_its_control_plane(
    start: Start, port: int, has_default: bool
) -> None:
    """felix-107: with all that was in it; what it has then is the control plane's, and stays."""
    follower = start(follows=port)
    place = Place(follower.client, "default", "default")
    entry = f"{place.url}/caches/default/entries/k"
    assert follower.client.put(entry, json={"value": "dg=="}).status_code == 200
    with follower.client.stream("GET", f"{place.url}/streams/default/subscribe") as feed:
        lines = feed.iter_lines()
        next(lines)
        plane = start(at=port)
        if not has_default:
            plane.client.delete("/v1/tenants/default?cascade=true")
        last = list(lines)[-1]
        assert "NOT_FOUND" in last
    synced(plane, follower)
    assert "caches of this broker alone are gone" in follower.stderr()
    found = follower.client.get(entry)
    if not has_default:
        assert found.status_code == 404
        return
    assert found.json()["value"] is None
    assert follower.client.put(entry, json={"value": "dg=="}).status_code == 200
    for broker in (plane, follower):
        broker.restart()
        revision = status(follower)["revision"]
        connected(follower)
        synced(plane, follower)
        assert status(follower)["revision"] == revision, "nothing was taken over again"


def test_without_the_control_plane_what_exists_goes_on(start: Start, port: int) -> None:
    """felix-105"""
    plane = start(at=port)
    place = make_place(plane.client, "acme")
    place.create("streams", name="s")
    place.create("caches", name="c", durable=True)
    follower = start(follows=port)
    plane.kill()
    connected(follower, is_so=False)
    before = entries(follower)
    entry = f"{place.url}/caches/c/entries/k"
    for kill in (False, True):
        with follower.client.stream("GET", f"{place.url}/streams/s/subscribe") as feed:
            lines = feed.iter_lines()
            next(lines)
            assert publish(follower, place).status_code == 200
            assert "aGk=" in next(lines)
        assert follower.client.put(entry, json={"value": "dg=="}).status_code == 200
        assert follower.client.get(entry).json()["value"] == "dg=="
        assert there(place, follower).get("streams")["streams"][0]["name"] == "s"
        follower.restart(kill=kill)
        assert entries(follower) == before, "it starts with what is in its own log"
    assert follower.client.get(entry).json()["value"] == "dg=="


def test_without_the_control_plane_nothing_is_created_changed_or_deleted(
    start: Start, port: int
) -> None:
    """felix-106"""
    plane = start(at=port)
    place = make_place(plane.client, "acme")
    place.create("streams", name="s")
    follower = start(follows=port)
    plane.kill()
    before = entries(follower)
    stream = f"{place.url}/streams/s"
    for method, path, body in (
        ("POST", "/v1/tenants", {"tenant_id": "t", "request_id": "mine"}),
        ("POST", f"{place.url}/streams", {"name": "t", "request_id": "mine"}),
        ("POST", f"{place.url}/caches", {"name": "t", "request_id": "mine"}),
        ("PATCH", stream, {"event_queue_depth": 5, "request_id": "mine"}),
        ("DELETE", stream, None),
        ("DELETE", "/v1/tenants/acme?cascade=true", None),
    ):
        began = time.monotonic()
        reply = follower.client.request(method, path, json=body)
        more = {} if body is None else {"request_id": "mine"}
        message = assert_typed_error(reply, 503, "UNAVAILABLE", **more)
        assert "control plane" in message
        assert "nothing was changed" in message
        assert time.monotonic() - began < PROMPT_S
    assert entries(follower) == before
    plane.start()
    synced(plane, follower)
    assert entries(follower) == before, "nor is any of it done later"


def test_when_the_control_plane_is_back_the_follower_catches_up(start: Start, port: int) -> None:
    """felix-107: creations and deletions, without a restart."""
    plane = start(at=port)
    gone, kept = make_place(plane.client, "gone"), make_place(plane.client, "kept")
    for place in (gone, kept):
        place.create("streams", name="s")
    follower = start(follows=port)
    plane.terminate()
    connected(follower, is_so=False)
    plane.flags = ()  # on another port: the follower does not see what happens
    plane.start()
    plane.client.delete("/v1/tenants/gone?cascade=true")
    added = make_place(plane.client, "added")
    added.create("streams", name="s")
    assert publish(follower, gone).status_code == 200
    assert publish(follower, added).status_code == 404
    plane.terminate()
    plane.flags = ("--port", str(port))
    plane.start()
    synced(plane, follower)
    assert publish(follower, gone).status_code == 404
    assert publish(follower, kept).status_code == 200
    assert publish(follower, added).status_code == 200
    assert connected(follower)["last_error"] is None


def test_a_control_plane_that_forgot_everything_is_followed_too(start: Start, port: int) -> None:
    """Its revisions begin anew: the follower must not take them for a continuation."""
    plane = start(at=port, memory=True)
    make_place(plane.client, "before")
    make_place(plane.client, "and")
    follower = start(follows=port)
    plane.kill()
    plane.start()
    make_place(plane.client, "after")
    make_place(plane.client, "again")
    synced(plane, follower)
    names = [each["tenant_id"] for each in follower.client.get("/v1/tenants").json()["tenants"]]
    assert names == ["after", "again", "default"]


def test_what_is_made_anew_while_the_follower_is_down_begins_empty_there(
    start: Start, port: int
) -> None:
    """felix-67: another tenant of the same name must not see what the first one left."""
    plane = start(at=port)
    place = make_place(plane.client, "acme")
    place.create("caches", name="c", durable=True)
    follower = start(follows=port)
    entry = f"{place.url}/caches/c/entries/k"
    assert follower.client.put(entry, json={"value": "c2VjcmV0"}).status_code == 200
    follower.terminate()
    plane.client.delete("/v1/tenants/acme?cascade=true")
    make_place(plane.client, "acme").create("caches", name="c", durable=True)
    follower.start()
    synced(plane, follower)
    assert follower.client.get(entry).json()["value"] is None


# -- changes that a follower is asked for --------------------------------------------------------


def test_what_a_follower_is_asked_to_create_is_there_and_here_at_once(start: Start) -> None:
    """felix-106: creation is the control plane's business; its answer is the answer."""
    plane = start()
    follower = start(follows=plane.port, PENSTOCK_REGISTRY_SYNC_MS="60000")
    place = make_place(follower.client, "acme")
    for number in range(10):
        name = f"s{number}"
        created = place.create("streams", name=name, event_queue_depth=5, request_id=number)
        assert created.status_code == 201
        assert created.json()["request_id"] == number
        assert publish(follower, place, name).status_code == 200, "at once, not a sync later"
        assert publish(plane, place, name).status_code == 200
    again = place.create("streams", name="s0", event_queue_depth=5)
    assert again.status_code == 200
    changed = follower.client.patch(f"{place.url}/streams/s0", json={"event_queue_depth": 6})
    assert (changed.status_code, changed.json()["event_queue_depth"]) == (200, 6)
    assert place.get("streams/s0")["event_queue_depth"] == 6
    assert follower.client.delete(f"{place.url}/streams/s0").status_code == 204
    assert publish(follower, place, "s0").status_code == 404
    assert publish(plane, place, "s0").status_code == 404


def test_a_refusal_of_the_control_plane_is_the_followers(start: Start) -> None:
    plane = start()
    follower = start(follows=plane.port)
    place = make_place(follower.client, "acme")
    place.create("streams", name="s")
    other = place.create("streams", name="s", event_queue_depth=5, request_id="r")
    assert_typed_error(other, 409, "ALREADY_EXISTS", request_id="r")
    wrong = place.create("streams", name="t", event_queue_depth=0)
    assert_typed_error(wrong, 400, "INVALID_ARGUMENT")
    weak = place.create("streams", name="t", delivery="exactly_once", durable=False)
    assert_typed_error(weak, 400, "INVALID_ARGUMENT")
    unknown = follower.client.delete("/v1/tenants/nobody")
    assert_typed_error(unknown, 404, "NOT_FOUND")
    assert_typed_error(follower.client.delete(place.url), 409, "FAILED_PRECONDITION")
    assert_typed_error(follower.client.post("/v1/tenants", content=b"{"), 400, "INVALID_ARGUMENT")
    assert follower.client.delete(f"{place.url}?cascade=true").status_code == 204


def test_many_changes_at_once_are_all_made_and_answered_in_order(start: Start) -> None:
    plane = start()
    follower = start(follows=plane.port)
    with Wire(follower.port) as wire:
        for number in range(40):
            body = b'{"tenant_id": "t%d"}' % number
            wire.send(encode(follower.port, "POST", "/v1/tenants", body))
        replies = [wire.read() for _ in range(40)]
    assert [reply.status for reply in replies] == [201] * 40
    assert [reply.json()["tenant_id"] for reply in replies] == [f"t{n}" for n in range(40)]
    synced(plane, follower)


def test_a_control_plane_that_hangs_holds_up_nobody_else(start: Start) -> None:
    """felix-105, 106: it is answered in time, and what waits for it is bounded."""
    plane = start()
    place = make_place(plane.client, "acme")
    place.create("streams", name="s")
    follower = start(follows=plane.port)
    assert plane.process is not None
    plane.process.send_signal(signal.SIGSTOP)
    wires = [Wire(follower.port) for _ in range(80)]
    try:
        body = b'{"tenant_id": "t"}'
        for wire in wires:
            wire.send(encode(follower.port, "POST", "/v1/tenants", body))
        assert publish(follower, place).status_code == 200
        answered = [wire for wire in wires if wire.has_input()]
        assert len(answered) < len(wires), "the publish waited until the others were refused"
        answers = [wire.read() for wire in wires]
    finally:
        plane.process.send_signal(signal.SIGCONT)
        for wire in wires:
            wire.__exit__(None, None, None)
    assert [answer.status for answer in answers].count(429) == 80 - 64
    assert [answer.status for answer in answers].count(503) == 64
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.json()["limit"] == "forwarded"
    assert int(refused.headers["retry-after"]) >= 1
    connected(follower)


def test_a_follower_stops_in_time_while_the_control_plane_hangs(start: Start) -> None:
    plane = start()
    follower = start(follows=plane.port)
    assert plane.process is not None
    plane.process.send_signal(signal.SIGSTOP)
    try:
        with Wire(follower.port) as wire:
            wire.send(encode(follower.port, "POST", "/v1/tenants", b'{"tenant_id": "t"}'))
            time.sleep(0.2)  # it is on its way
            assert follower.terminate(timeout_s=5) == 0
    finally:
        plane.process.send_signal(signal.SIGCONT)


# -- who follows whom ----------------------------------------------------------------------------


def test_a_follower_can_be_followed(start: Start) -> None:
    first = start()
    second = start(follows=first.port)
    third = start(follows=second.port)
    place = make_place(third.client, "acme")
    place.create("streams", name="s")
    assert publish(third, place).status_code == 200, "at once"
    assert publish(second, place).status_code == 200
    assert publish(first, place).status_code == 200
    first.client.delete("/v1/tenants/default?cascade=true")
    synced(first, third)
    assert entries(second) == entries(first)


def test_a_broker_that_is_its_own_control_plane_says_so_and_goes_on(
    start: Start, port: int
) -> None:
    broker = start(at=port, follows=port)
    shown = follows_itself(broker)
    assert shown["connected"] is False
    reply = broker.client.post("/v1/tenants", json={"tenant_id": "t"})
    assert "itself" in assert_typed_error(reply, 503, "UNAVAILABLE")
    time.sleep(3 * SYNC_MS / 1000)  # several syncs
    assert status(broker)["revision"] == shown["revision"]
    assert broker.stderr().count("it is this broker itself") == 1
    assert " ERROR " in broker.stderr()
    assert publish(broker, Place(broker.client, "default", "default"), "default").status_code == 200


def test_two_that_follow_each_other_say_so_and_change_nothing(start: Start, port: int) -> None:
    """Each would take what the other had, and the other what it had, for ever."""
    other_port = free_port()
    first = start(at=port)
    make_place(first.client, "one")
    second = start(at=other_port)
    make_place(second.client, "two")
    for broker, follows in ((first, other_port), (second, port)):
        broker.terminate()
        broker.flags = (*broker.flags, "--control-plane", f"http://127.0.0.1:{follows}")
    for broker in (first, second):
        broker.start()
    for broker in (first, second):
        follows_itself(broker)
    standing = [status(broker)["revision"] for broker in (first, second)]
    for broker in (first, second):
        reply = broker.client.post("/v1/tenants", json={"tenant_id": "t"})
        assert_typed_error(reply, 503, "UNAVAILABLE")
    time.sleep(5 * SYNC_MS / 1000)  # several syncs
    assert [status(broker)["revision"] for broker in (first, second)] == standing


# -- tokens --------------------------------------------------------------------------------------


def test_the_control_planes_token_is_sent_and_never_shown(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    plane = start("--token-file", str(file))
    follower = start("--control-plane-token-file", str(file), "--log-level", "debug",
                     "--log-format", "json", follows=plane.port)  # fmt: skip
    assert connected(follower)["last_error"] is None
    assert follower.client.post("/v1/tenants", json={"tenant_id": "t"}).status_code == 201
    assert TOKEN not in follower.stdout() + follower.stderr()
    assert TOKEN not in follower.client.get("/v1/registry").text


def test_a_wrong_token_is_the_operators_mistake_and_not_the_clients(start: Start) -> None:
    plane = start(PENSTOCK_TOKEN=TOKEN)
    follower = start(follows=plane.port)
    shown = connected(follower, is_so=False)
    assert "401" in shown["last_error"]
    reply = follower.client.post("/v1/tenants", json={"tenant_id": "t"})
    assert "401" in assert_typed_error(reply, 503, "UNAVAILABLE")
    assert "401" in follower.stderr()


def test_a_control_plane_may_have_a_certificate_that_ssl_cert_file_names(
    start: Start, certificate: Certificate
) -> None:
    plane = start()
    with tls_proxy(plane.port, certificate) as url:
        follower = start("--control-plane", url, SSL_CERT_FILE=str(certificate.file))
        connected(follower)
        synced(plane, follower)


def test_something_that_is_no_broker_is_not_followed(start: Start, http_router: Any) -> None:
    follower = start("--control-plane", http_router.url)
    shown = connected(follower, is_so=False)
    assert shown["last_error"]
    assert len(follower.client.get("/v1/tenants").json()["tenants"]) == 1
