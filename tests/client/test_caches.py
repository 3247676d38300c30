"""Caches through both clients, against a real broker."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable

import pytest

from penstock.client import (
    AsyncClient,
    CacheCheck,
    CacheDelete,
    CacheIncr,
    CachePut,
    CacheValue,
    Client,
    WatchEvent,
    caches,
    streams,
)
from penstock.client.aio_handles import AsyncCacheHandle, AsyncStreamHandle
from penstock.client.calls import Call
from penstock.client.sync_handles import CacheHandle, StreamHandle
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    TooLarge,
    VersionMismatch,
)
from tests.broker_process import BrokerProcess, eventually, wait_until

BINARY = bytes(range(256))
WAIT_S = 10.0
"""So that what does not come fails a test instead of holding it up."""


@pytest.fixture
def cache(client: Client, request: pytest.FixtureRequest) -> CacheHandle:
    """A cache of the test's own."""
    name: str = request.node.name
    client.create_cache("default", "default", name)
    return client.cache(name)


def test_what_is_put_is_got_until_it_is_deleted(cache: CacheHandle) -> None:
    """felix-51, 56."""
    assert cache.get("k") is None
    first = cache.put("k", "one")
    second = cache.put("k", BINARY)
    assert second > first
    assert cache.get("k") == CacheValue(BINARY, second)
    assert cache.delete("k") is True
    assert cache.delete("k") is False
    assert cache.get("k") is None


def test_values_are_bytes_of_any_kind(cache: CacheHandle) -> None:
    """felix-132: a value that is too large is refused, not cut."""
    for value in (b"", b"\n", BINARY, b"x" * 8 * 2**20):
        cache.put("k", value)
        found = cache.get("k")
        assert found is not None
        assert found.value == value
    with pytest.raises(TooLarge, match="max_message_bytes"):
        cache.put("k", b"x" * (8 * 2**20 + 1))


@pytest.mark.parametrize("key", ["..", ".", " ", "a/b", "?x=1", "%2e", "ü\u2028", "incr", "#"])
def test_any_text_is_a_key(cache: CacheHandle, key: str) -> None:
    cache.put(key, "v")
    assert cache.incr(f"{key}{key}") == 1
    found = cache.get(key)
    assert found is not None
    assert found.value == b"v"
    assert set(cache.get_many([key])) == {key}
    assert cache.delete(key)
    assert cache.get_many([key]) == {}
    with pytest.raises(InvalidArgument):
        cache.put(f"{key}\n", "v")


def test_many_are_got_at_once_and_those_not_there_left_out(cache: CacheHandle) -> None:
    versions = {key: cache.put(key, key) for key in ("a", "b")}
    assert cache.get_many(["b", "nothing", "a"]) == {
        "a": CacheValue(b"a", versions["a"]),
        "b": CacheValue(b"b", versions["b"]),
    }
    assert cache.get_many([]) == {}


def test_a_value_with_a_ttl_is_gone_after_it(cache: CacheHandle) -> None:
    """felix-58, 59, 62, 65."""
    cache.put("stays", "v", ttl_ms=60_000)
    cache.put("stays", "v")
    cache.put("at once", "v", ttl_ms=0)
    assert cache.get("at once") is None
    cache.put("soon", "v", ttl_ms=300)
    ends = time.monotonic() + 0.3
    found = cache.get("soon")
    assert found is not None
    assert 0 < (found.ttl_ms or 0) <= 300
    wait_until(ends)
    assert cache.get("soon") is None
    kept = cache.get("stays")
    assert kept is not None
    assert kept.ttl_ms is None


def test_if_not_exists_is_won_once(cache: CacheHandle) -> None:
    """felix-77"""
    cache.put("k", "first", if_not_exists=True)
    with pytest.raises(AlreadyExists):
        cache.put("k", "second", if_not_exists=True)
    found = cache.get("k")
    assert found is not None
    assert found.value == b"first"


def test_if_version_is_what_was_read_or_nothing_changes(cache: CacheHandle) -> None:
    """felix-78: 0 is the version of nothing."""
    version = cache.put("k", "one", if_version=0)
    cache.put("k", "two", if_version=version)
    for ask in (
        lambda: cache.put("k", "three", if_version=version),
        lambda: cache.delete("k", if_version=version),
        lambda: cache.put("k", "three", if_version=0),
    ):
        with pytest.raises(VersionMismatch):
            ask()
    found = cache.get("k")
    assert found is not None
    assert found.value == b"two"
    assert cache.delete("k", if_version=found.version)


def test_of_racing_writers_each_step_has_one(broker: BrokerProcess, cache: CacheHandle) -> None:
    """felix-78: eight threads append 10 letters each by compare-and-swap, and none is lost."""
    cache.put("k", "")
    failures: list[PenstockError] = []

    def append(letter: str) -> None:
        with Client(broker.url) as client:
            mine = client.cache(cache.path[2])
            left = 10
            while left:
                found = mine.get("k")
                if found is None:
                    return
                try:
                    mine.put("k", found.value + letter.encode(), if_version=found.version)
                    left -= 1
                except VersionMismatch as error:
                    failures.append(error)

    together(append, "abcdefgh")
    found = cache.get("k")
    assert found is not None
    assert sorted(found.value.decode()) == sorted("abcdefgh" * 10)
    assert failures


def together(target: Callable[[str], None], names: str) -> None:
    threads = [threading.Thread(target=target, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_counter_keeps_the_time_it_began_with(cache: CacheHandle) -> None:
    """felix-133: so that a rate limit's window ends."""
    cache.incr("n", ttl_ms=60_000)
    cache.incr("n", ttl_ms=600_000)
    found = cache.get("n")
    assert found is not None
    assert found.value == b"2"
    assert 0 < (found.ttl_ms or 0) <= 60_000


def test_what_is_no_number_is_not_counted(cache: CacheHandle) -> None:
    cache.put("k", "text")
    with pytest.raises(FailedPrecondition) as failure:
        cache.incr("k")
    assert type(failure.value) is FailedPrecondition
    cache.put("k", str(2**63 - 1))
    with pytest.raises(FailedPrecondition):
        cache.incr("k")


def test_a_transaction_is_done_whole_or_not_at_all(client: Client, cache: CacheHandle) -> None:
    """felix-81"""
    other = client.cache("default")
    other.put("theirs", "v")
    version = cache.put("a", "1")
    checks = [CacheCheck("a", version=version), CacheCheck("theirs", exists=True, cache="default")]
    steps = [
        CachePut("b", "2", ttl_ms=60_000),
        CacheDelete("theirs", cache="default"),
        CacheIncr("n", 3),
    ]
    put, deleted, counted = cache.txn(checks, steps)
    assert cache.get_many(["b"])["b"] == CacheValue(b"2", put.version)
    assert (deleted.deleted, counted.number) == (True, 3)
    assert other.get("theirs") is None
    with pytest.raises(VersionMismatch):
        cache.txn([CacheCheck("b", exists=False)], [CachePut("a", "x"), CacheIncr("n")])
    with pytest.raises(FailedPrecondition):
        cache.txn([], [CachePut("c", "text"), CacheIncr("n"), CacheIncr("c")])
    assert cache.get("c") is None
    assert cache.incr("n") == 4


def test_entries_of_other_scopes_are_other_entries(client: Client, cache: CacheHandle) -> None:
    """felix-66, 67, 68, 69, 87, 88, 92."""
    name = cache.path[2]
    client.create_tenant("elsewhere")
    client.create_namespace("elsewhere", "default")
    client.create_cache("elsewhere", "default", name)
    theirs = client.cache(name, tenant_id="elsewhere")
    cache.put("k", "ours")
    assert theirs.get("k") is None
    theirs.put("k", "theirs")
    theirs.delete("k")
    assert cache.get("k") is not None
    unknown = {
        "unknown tenant 'x'": client.cache("c", tenant_id="x"),
        "unknown namespace 'y'": client.cache("c", namespace="y"),
        "cache scope not found": client.cache("nowhere"),
    }
    for text, handle in unknown.items():
        for ask in (
            lambda h=handle: h.get("k"),
            lambda h=handle: h.get_many(["k"]),
            lambda h=handle: h.put("k", "v"),
            lambda h=handle: h.delete("k"),
            lambda h=handle: h.incr("k"),
            lambda h=handle: h.txn([], [CacheDelete("k")]),
            handle.watch(key="k").open,
        ):
            with pytest.raises(NotFound, match=text):
                ask()


# -- watches -------------------------------------------------------------------------------------


def test_a_watch_sees_each_change_of_its_key_in_order(cache: CacheHandle) -> None:
    """felix-80: and none from before, none of other keys."""
    before = cache.put("k", "before")
    with cache.watch(key="k", wait_s=WAIT_S) as watch:
        assert watch.version == before
        assert watch.watch_id
        cache.put("k2", "other")
        one = cache.put("k", BINARY)
        cache.delete("k")
        two = cache.incr("k")
        events = [next(watch) for _ in range(3)]
    assert events[0] == WatchEvent("put", one, "k", BINARY)
    assert [event.event for event in events] == ["put", "delete", "put"]
    assert (events[2].value, two) == (b"1", 1)
    assert watch.ended


def test_a_watch_of_a_prefix_misses_nothing_that_many_write(
    broker: BrokerProcess, cache: CacheHandle
) -> None:
    """felix-80: the versions that writers were given are those of the events, in order."""
    written: list[int] = []

    def write(name: str) -> None:
        with Client(broker.url) as client:
            mine = client.cache(cache.path[2])
            written.extend(mine.put(f"user/{name}{number}", name) for number in range(50))

    with cache.watch(prefix="user/", wait_s=1.0) as watch:
        together(write, "abcd")
        seen = [event.version for event in watch]
    assert seen == sorted(written)
    assert seen == list(range(watch.version + 1, watch.version + 201))


def test_a_watch_that_comes_late_is_told_of_the_gap(cache: CacheHandle) -> None:
    first = cache.put("k", "v")
    last = cache.put("k", "w")
    with cache.watch(prefix="", since_version=first, wait_s=WAIT_S) as watch:
        assert next(watch) == WatchEvent("gap", last, from_version=first)
        cache.put("k", "x")
        assert next(watch).value == b"x"
    with cache.watch(prefix="", since_version=watch.version + 1, wait_s=0.2) as watch:
        assert list(watch) == []


def test_a_watch_that_is_too_far_behind_has_a_gap_and_goes_on(cache: CacheHandle) -> None:
    """felix-80: what is missing is said, and what was there is in order."""
    value = b"x" * 100_000
    with cache.watch(prefix="", wait_s=1.0) as watch:
        for number in range(1300):
            cache.put(f"k{number}", value)
        cover = watch.version
        kinds = set()
        for event in watch:
            kinds.add(event.event)
            if event.event == "gap":
                assert event.from_version == cover
            else:
                assert event.version == cover + 1
            cover = event.version
    assert kinds == {"put", "gap"}
    assert cover == watch.version + 1300


def test_expiry_is_sent_to_watchers_that_asked_for_it(cache: CacheHandle) -> None:
    with (
        cache.watch(key="k", include=["expire", "evict"], wait_s=WAIT_S) as told,
        cache.watch(key="k", wait_s=0.3) as untold,
    ):
        cache.put("k", "v", ttl_ms=50)
        assert next(told).event == "put"
        eventually(lambda: cache.get("k"), lambda found: found is None)
        assert next(told).event == "expire"
        assert [event.event for event in untold] == ["put"]


def test_a_watch_names_a_key_or_a_prefix(cache: CacheHandle) -> None:
    for wrong in (cache.watch(), cache.watch(key="k", prefix="k"), cache.watch(key="")):
        with pytest.raises(InvalidArgument):
            wrong.open()


def test_a_deleted_cache_ends_its_watches_with_an_error(client: Client, cache: CacheHandle) -> None:
    with cache.watch(prefix="", wait_s=WAIT_S) as watch:
        cache.put("k", "v")
        client.delete_cache(*cache.path)
        assert next(watch).event == "put"
        with pytest.raises(NotFound, match="deleted"):
            next(watch)


# -- the async client ----------------------------------------------------------------------------


def test_the_async_client_has_caches_too(broker: BrokerProcess, cache: CacheHandle) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            mine = client.cache(cache.path[2])
            async with mine.watch(prefix="", wait_s=0.3) as watch:
                assert watch.watch_id
                version = await mine.put("k", BINARY, ttl_ms=60_000)
                found = await mine.get("k")
                assert found is not None
                assert (found.value, found.version) == (BINARY, version)
                assert set(await mine.get_many(["k", "l"])) == {"k"}
                numbers = await asyncio.gather(*(mine.incr("n") for _ in range(5)))
                assert sorted(numbers) == [1, 2, 3, 4, 5]
                with pytest.raises(AlreadyExists):
                    await mine.put("k", "v", if_not_exists=True)
                await mine.txn([CacheCheck("k", exists=True)], [CacheDelete("k")])
                assert await mine.delete("k") is False
                events = [event.event async for event in watch]
            assert events == ["put"] * 6 + ["delete"]
            assert watch.version == version - 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("module", "kinds", "count"),
    [
        (streams, (StreamHandle, AsyncStreamHandle), 5),
        (caches, (CacheHandle, AsyncCacheHandle), 6),
    ],
)
def test_both_handles_offer_every_operation(module: object, kinds: tuple[type], count: int) -> None:
    operations = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and str(inspect.signature(function).return_annotation).startswith(Call.__name__)
        # Those of deliveries are methods of the event and of its subscription.
        and not name.endswith(("_event", "_events"))
    }
    assert len(operations) == count
    for name, function in operations.items():
        _, *expected = inspect.signature(function).parameters.values()
        for kind in kinds:
            method = getattr(kind, name)
            _, *offered = inspect.signature(method).parameters.values()
            assert offered == expected, name
            assert (method.__name__, bool(method.__doc__)) == (name, True)
