"""A follower without sockets: what it asks, what it makes of the answers, what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.opening import open_in_memory
from penstock.engine.scheduler import LoopScheduler
from penstock.model.errors import PenstockError, ResourceExhausted, Unavailable
from penstock.model.limits import Limits
from penstock.model.tenancy import Entry
from penstock.server.http.requests import Request
from penstock.server.registry import control_plane
from penstock.server.registry.control_plane import Follower, RemoteAnswer
from tests.engine.harness import Broker

PLANE = "http://plane:1"
ME = "me"


class Plane:
    """A control plane's side of the wire: a broker's registry, and every request that came."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.asked: list[httpx.Request] = []
        self.instance = "plane"
        self.follows: list[str] = []
        self.hook: Callable[[httpx.Request], Awaitable[httpx.Response | None]] | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.hook is not None and (answer := await self.hook(request)) is not None:
            return answer
        said = {"instance": self.instance, "follows": self.follows}
        registry = self.broker.engine.registry
        if request.url.path == "/v1/registry/snapshot":
            taken = self.broker.must(registry.snapshot)
            return _json(said | _built(taken))
        if request.url.path == "/v1/registry/changes":
            query = request.url.params
            news = self.broker.call(registry.changes, int(query["since"]), int(query["epoch"]))
            if isinstance(news, PenstockError):
                return httpx.Response(news.http_status, json={"error": news.code, "message": "no"})
            changes = [
                {"revision": each["entry"]["revision"], **each} for each in _built(news)["changes"]
            ]
            return _json(said | _built(news) | {"changes": changes})
        self.create(json.loads(request.content)["tenant_id"])
        return httpx.Response(201, json={"tenant_id": "made"})

    def create(self, tenant_id: str) -> None:
        entry = Entry(kind="tenant", tenant_id=tenant_id)
        self.broker.must(self.broker.engine.registry.create, entry)

    def delete(self, tenant_id: str) -> None:
        path = (tenant_id, "", "")
        self.broker.must(self.broker.engine.registry.delete, "tenant", path, True)

    def paths(self) -> list[str]:
        return [request.url.path.rpartition("/")[2] for request in self.asked]


def _built(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def _json(value: Any) -> httpx.Response:
    return httpx.Response(200, json=value)


def follow(plane: Plane, scenario: Callable[[Follower, EmbeddedEngine], Awaitable[None]]) -> None:
    """Runs the scenario with a follower that syncs only when it is told to."""

    async def run() -> None:
        engine = open_in_memory(Limits(), LoopScheduler(asyncio.get_running_loop()))
        follower = Follower(
            engine.registry, ME, PLANE, token="sesame", transport=httpx.MockTransport(plane)
        )
        try:
            await scenario(follower, engine)
        finally:
            await follower.close()
            engine.close()

    asyncio.run(run())


def tenants(engine: EmbeddedEngine) -> list[str]:
    found: list[list[Entry] | PenstockError] = []
    engine.registry.tenants(found.append)
    assert isinstance(found[0], list)
    return [entry.tenant_id for entry in found[0]]


def assert_failed(follower: Follower, failure: PenstockError) -> None:
    assert not follower.connected
    assert follower.last_error
    assert failure.message.endswith(follower.last_error)


def request(method: bytes = b"POST", query: bytes = b"") -> Request:
    asked = Request(method, b"/v1/tenants", query)
    asked.body = b'{"tenant_id": "new"}'
    return asked


async def forwarded(follower: Follower, asked: Request) -> RemoteAnswer | PenstockError:
    outcome: asyncio.Future[RemoteAnswer | PenstockError] = asyncio.Future()
    follower.forward(asked, outcome.set_result)
    return await outcome


# -- sync ----------------------------------------------------------------------------------------


def test_the_first_sync_takes_a_snapshot_and_the_next_ones_the_changes() -> None:
    """felix-91"""
    plane = Plane()
    plane.create("a")

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        assert await follower.sync() is None
        plane.create("b")
        plane.delete("a")
        assert await follower.sync() is None
        assert await follower.sync() is None
        assert tenants(engine) == ["b", "default"]

    follow(plane, scenario)
    assert plane.paths() == ["snapshot", "changes", "changes"]
    assert {asked.headers["authorization"] for asked in plane.asked} == {"Bearer sesame"}


def test_another_process_is_asked_for_a_snapshot_though_its_revisions_would_fit() -> None:
    """It may have lost what the one before it had said: its disk, or a copy of the past."""
    plane = Plane()
    plane.create("a")

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        plane.create("lost")
        await follower.sync()
        registry = plane.broker.state.registry
        registry.revision -= 1
        del registry.tenants["lost", "", ""]
        plane.create("other")
        plane.instance = "another"
        await follower.sync()
        assert tenants(engine) == ["a", "default", "other"]

    follow(plane, scenario)


@pytest.mark.parametrize("change", ["epoch", "older"])
def test_when_the_changes_are_no_longer_known_a_snapshot_is_taken(change: str) -> None:
    plane = Plane()
    plane.create("a")

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.create("b")
        if change == "epoch":
            plane.broker.state.registry.epoch += 1
        else:
            plane.broker.state.registry.changes.clear()
        assert await follower.sync() is None
        assert tenants(engine) == ["a", "b", "default"]

    follow(plane, scenario)
    assert plane.paths() == ["snapshot", "changes", "snapshot"]


def test_one_sync_runs_at_a_time_and_those_who_wait_share_the_next() -> None:
    plane = Plane()

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def hold(_: httpx.Request) -> None:
            is_asked.set()
            await may_answer.wait()

        plane.hook = hold
        first = asyncio.create_task(follower.sync())
        await is_asked.wait()
        others = [asyncio.create_task(follower.sync()) for _ in range(20)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(plane.asked) == 1
        may_answer.set()
        await asyncio.gather(first, *others)

    follow(plane, scenario)
    assert plane.paths() == ["snapshot", "changes"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, content=b"hello"),
        httpx.Response(200, json={"instance": "x"}),
        httpx.Response(200, json={"instance": "x", "follows": [], "epoch": 1, "revision": 1,
                                  "entries": [{"kind": "planet", "tenant_id": "t"}]}),
        httpx.Response(200, json={"instance": "x", "follows": [], "epoch": 1, "revision": 1,
                                  "entries": [{"kind": "namespace", "tenant_id": "t",
                                               "namespace": "an orphan"}]}),
        httpx.Response(404, json={"error": "NOT_FOUND", "message": "no such path"}),
        httpx.Response(500, content=b"<html>"),
        httpx.Response(302, headers={"location": "http://elsewhere"}),
    ],
    ids=["no json", "no snapshot", "no kind", "no parent", "404", "500", "elsewhere"],
)  # fmt: skip
def test_an_answer_that_is_no_registry_changes_nothing(answer: httpx.Response) -> None:
    plane = Plane()
    plane.create("a")

    async def wrongly(_: httpx.Request) -> httpx.Response:
        return answer

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.instance, plane.hook = "another", wrongly
        failure = await follower.sync()
        assert isinstance(failure, Unavailable)
        assert_failed(follower, failure)
        assert tenants(engine) == ["a", "default"]
        plane.hook = None
        assert await follower.sync() is None
        assert (follower.connected, follower.last_error) == (True, None)

    follow(plane, scenario)


def test_an_answer_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "MAX_ANSWER_BYTES", 1000)
    plane = Plane()

    async def endlessly(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b" " * 1001)

    plane.hook = endlessly

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        failure = await follower.sync()
        assert failure is not None
        assert "over 1000 bytes" in failure.message

    follow(plane, scenario)


def test_what_could_not_be_reconciled_is_tried_again() -> None:
    """The changes were asked for only once; they must not be forgotten."""
    plane = Plane()

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.create("a")
        engine.parts.ledger.failure = Unavailable("the disk is full")
        failure = await follower.sync()
        assert failure is not None
        assert "the disk is full" in failure.message
        engine.parts.ledger.failure = None
        assert await follower.sync() is None
        assert tenants(engine) == ["a", "default"]

    follow(plane, scenario)


# -- who follows whom ----------------------------------------------------------------------------


@pytest.mark.parametrize(("instance", "follows"), [(ME, []), ("b", [ME]), ("b", ["c", ME, "d"])])
def test_nobody_follows_themselves_over_however_many_others(
    instance: str, follows: list[str]
) -> None:
    plane = Plane()
    plane.instance, plane.follows = instance, follows
    plane.create("a")

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        failure = await follower.sync()
        assert failure is not None
        assert "itself" in failure.message
        assert tenants(engine) == ["default"]
        outcome = await forwarded(follower, request())
        assert isinstance(outcome, Unavailable)
        assert follower.follows[-1] == ME, "what others are told does not grow"
        assert follower.follows.count(ME) == 1
        plane.instance, plane.follows = "b", []
        assert await follower.sync() is None, "it is over when it is over"
        assert tenants(engine) == ["a", "default"]

    follow(plane, scenario)
    assert all(asked.method == "GET" for asked in plane.asked)


def test_a_chain_without_end_is_refused() -> None:
    plane = Plane()
    plane.follows = [str(number) for number in range(1000)]

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        assert await follower.sync() is not None
        assert len(follower.follows) <= 16

    follow(plane, scenario)


def test_a_change_that_has_been_here_before_is_not_forwarded_again() -> None:
    plane = Plane()

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        outcome = await forwarded(follower, request(query=b"via=other,me"))
        assert isinstance(outcome, Unavailable)
        assert "follow each other" in outcome.message
        passed = await forwarded(follower, request(query=b"via=other&cascade=true"))
        assert isinstance(passed, RemoteAnswer)

    follow(plane, scenario)
    posts = [asked for asked in plane.asked if asked.method == "POST"]
    assert posts[0].url.params["cascade"] == "true"
    assert posts[0].url.params.get_list("via")[0] == "other,me"
    assert len(posts) == 1


# -- changes -------------------------------------------------------------------------------------


def test_a_change_is_here_before_it_is_answered() -> None:
    plane = Plane()

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        outcome = await forwarded(follower, request())
        assert isinstance(outcome, RemoteAnswer)
        assert outcome.status == 201
        assert tenants(engine) == ["default", "new"]

    follow(plane, scenario)


def test_a_forwarded_change_that_is_not_synced_yet_is_reported() -> None:
    plane = Plane()

    async def refuse_to_tell(asked: httpx.Request) -> httpx.Response | None:
        return httpx.Response(503) if asked.method == "GET" else None

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.hook = refuse_to_tell
        outcome = await forwarded(follower, request())
        assert isinstance(outcome, Unavailable)
        assert "has made the change" in outcome.message

    follow(plane, scenario)


@pytest.mark.parametrize("status", [401, 403, 500, 502, 302])
def test_an_answer_that_is_not_for_the_client_is_503(status: int) -> None:
    plane = Plane()

    async def refuse(asked: httpx.Request) -> httpx.Response | None:
        body = {"error": "X", "message": "the reason"}
        return httpx.Response(status, json=body) if asked.method == "POST" else None

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.hook = refuse
        outcome = await forwarded(follower, request())
        assert isinstance(outcome, Unavailable)
        assert f"{status}: the reason" in outcome.message

    follow(plane, scenario)


def test_a_broken_connection_says_that_the_change_may_have_been_made() -> None:
    plane = Plane()

    async def break_off(asked: httpx.Request) -> httpx.Response | None:
        if asked.method == "POST":
            raise httpx.ReadError("reset")
        return None

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        plane.hook = break_off
        outcome = await forwarded(follower, request())
        assert isinstance(outcome, Unavailable)
        assert "it may have made the change" in outcome.message

    follow(plane, scenario)


def test_what_is_on_its_way_is_bounded_and_all_of_it_is_answered_at_the_end() -> None:
    plane = Plane()

    async def hang(asked: httpx.Request) -> httpx.Response | None:
        if asked.method == "POST":
            await asyncio.sleep(60)
        return None

    plane.hook = hang
    outcomes: list[Any] = []

    async def scenario(follower: Follower, engine: EmbeddedEngine) -> None:
        await follower.sync()
        for _ in range(control_plane.MAX_FORWARDED):
            follower.forward(request(), outcomes.append)
        with pytest.raises(ResourceExhausted):
            follower.forward(request(), outcomes.append)
        await asyncio.sleep(0)
        assert outcomes == []

    follow(plane, scenario)
    assert len(outcomes) == control_plane.MAX_FORWARDED
    assert all(isinstance(each, Unavailable) for each in outcomes)
