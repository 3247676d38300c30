"""`penstock cache get`, `put`, `delete`, `incr` and `watch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.client import Client
from penstock.client.sync_handles import CacheHandle
from penstock.model.errors import NotFound
from tests.broker_process import SOURCE, BrokerProcess
from tests.cli.conftest import Run, run_penstock
from tests.cli.test_event import following

WATCH = ("cache", "watch", "--timeout", "20")


@pytest.fixture
def cache(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[CacheHandle]:
    """A cache of the test's own."""
    with Client(broker.url) as client:
        name: str = request.node.name
        client.create_cache("default", "default", name)
        yield client.cache(name)
        with suppress(NotFound):
            client.delete_cache("default", "default", name)


def test_a_value_is_put_got_and_deleted(penstock: Run, cache: CacheHandle) -> None:
    name = cache.path[2]
    done = penstock("cache", "put", name, "k", "hello", "--ttl", "60s")
    assert penstock("cache", "get", name, "k").out == "hello\n"
    shown = json.loads(penstock("cache", "get", name, "k", "--json").out)
    assert 0 < shown.pop("ttl_ms") <= 60_000
    version = shown.pop("version")
    assert shown == {"key": "k", "value": "aGVsbG8="}
    assert done.out == f"put k in cache default/default/{name}, version {version}\n"
    deleted = penstock("cache", "delete", name, "k")
    assert (deleted.code, deleted.out) == (0, f"deleted k in cache default/default/{name}\n")
    again = penstock("cache", "delete", name, "k")
    assert (again.code, "was not there" in again.out) == (0, True)


def test_nothing_under_a_key_is_exit_code_1(penstock: Run, cache: CacheHandle) -> None:
    name = cache.path[2]
    for option in ((), ("--json",), ("--raw",)):
        done = penstock("cache", "get", name, "k", *option)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"Error: there is nothing under k in cache default/default/{name}\n"


def test_bytes_that_are_no_text_are_marked_or_raw(
    broker: BrokerProcess, penstock: Run, cache: CacheHandle
) -> None:
    name = cache.path[2]
    cache.put("k", b"\x00\xff")
    assert penstock("cache", "get", name, "k").out == "base64:AP8=\n"
    command = [sys.executable, "-m", "penstock", "cache"]
    env = {"PYTHONPATH": str(SOURCE), "PENSTOCK_URL": broker.url}
    raw = subprocess.check_output([*command, "get", name, "k", "--raw"], env=env)
    assert raw == b"\x00\xff"
    subprocess.check_output([*command, "put", name, "copy"], env=env, input=raw)
    found = cache.get("copy")
    assert found is not None
    assert found.value == b"\x00\xff"


def test_a_value_may_come_from_stdin_whole(penstock: Run, cache: CacheHandle) -> None:
    assert penstock("cache", "put", cache.path[2], "k", "-", stdin="two\nlines\n").code == 0
    found = cache.get("k")
    assert found is not None
    assert found.value == b"two\nlines\n"


def test_conditions_are_kept_and_their_failure_is_exit_code_1(
    penstock: Run, cache: CacheHandle
) -> None:
    """felix-77, 78."""
    words = ("cache", "put", cache.path[2], "k")
    version = json.loads(penstock(*words, "one", "--if-not-exists", "--json").out)["version"]
    exists = penstock(*words, "two", "--if-not-exists")
    assert (exists.code, exists.err[:22]) == (1, "Error: ALREADY_EXISTS:")
    assert penstock(*words, "two", "--if-version", str(version)).code == 0
    stale = ("--if-version", str(version))
    for refused in (penstock(*words, "x", *stale), penstock("cache", "delete", *words[2:], *stale)):
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.startswith("Error: FAILED_PRECONDITION:")
    assert penstock("cache", "get", *words[2:]).out == "two\n"


def test_a_counter_is_counted_with_its_ttl(penstock: Run, cache: CacheHandle) -> None:
    """felix-79"""
    name = cache.path[2]
    assert penstock("cache", "incr", name, "n", "--ttl", "5m").out == "1\n"
    assert penstock("cache", "incr", name, "n", "--delta", "-3").out == "-2\n"
    assert json.loads(penstock("cache", "incr", name, "n", "--json").out) == {"number": -1}
    found = cache.get("n")
    assert found is not None
    assert 0 < (found.ttl_ms or 0) <= 300_000
    cache.put("text", "v")
    refused = penstock("cache", "incr", name, "text")
    assert (refused.code, refused.err[:27]) == (1, "Error: FAILED_PRECONDITION:")


def test_deleting_a_key_never_deletes_the_cache(penstock: Run, cache: CacheHandle) -> None:
    """A script whose key is missing is asked, and has no answer; an empty one is refused."""
    name = cache.path[2]
    cache.put("k", "v")
    asked = penstock("cache", "delete", name)
    assert asked.code == 1
    assert f"Delete cache default/default/{name}" in asked.err
    empty = penstock("cache", "delete", name, "")
    assert (empty.code, "a key is required" in empty.err) == (1, True)
    dots = penstock("cache", "delete", name, "..")
    assert (dots.code, "was not there" in dots.out) == (0, True)
    assert penstock("cache", "delete", name, "k", "--yes").code == 2
    assert penstock("cache", "delete", name, "--yes", "--if-version", "3").code == 2
    assert cache.get("k") is not None


def test_a_watch_prints_changes_as_they_come(
    broker: BrokerProcess, penstock: Run, cache: CacheHandle
) -> None:
    """felix-80"""
    name = cache.path[2]
    first = cache.put("k", "before")
    words = (*WATCH, name, "--since-version", "0", "--max", "5")
    with following(broker.url, *words) as watcher:
        # The gap tells that the watch has begun.
        gap = watcher.out.readline().decode()
        assert gap == f"{first}  gap  changes after version 0 may be missing\n"
        penstock("cache", "put", name, "k", "one")
        cache.put("k", b"\xff")
        cache.delete("k")
        penstock("cache", "incr", name, "n")
        lines = watcher.out.read().decode().splitlines()
        assert watcher.process.wait(10) == 0
    assert lines == [
        f"{first + 1}  put  k  one",
        f"{first + 2}  put  k  base64:/w==",
        f"{first + 3}  delete  k",
        f"{first + 4}  put  n  1",
    ]


@pytest.mark.parametrize("words", [("user/1",), ("--prefix", "user/")], ids=["key", "prefix"])
def test_a_watch_is_of_a_key_or_a_prefix(
    broker: BrokerProcess, cache: CacheHandle, words: tuple[str, ...]
) -> None:
    first = cache.put("x", "v")
    options = ("--since-version", "0", "--max", "2", "--json")
    with following(broker.url, *WATCH, cache.path[2], *words, *options) as watcher:
        gap = json.loads(watcher.out.readline())
        assert gap == {"event": "gap", "version": first, "from_version": 0}
        cache.put("other", "v")
        cache.put("user/1", "v")
        event = json.loads(watcher.out.read())
    assert event == {"event": "put", "version": first + 2, "key": "user/1", "value": "dg=="}


def test_a_watch_ends_with_its_timeout_its_cache_or_ctrl_c(
    broker: BrokerProcess, penstock: Run, cache: CacheHandle
) -> None:
    name = cache.path[2]
    done = penstock("cache", "watch", name, "--timeout", "0.3", "--include", "expire")
    assert (done.code, done.out, done.err) == (0, "", "")
    cache.put("x", "v")
    for end in ("ctrl-c", "delete"):
        with following(broker.url, *WATCH, name, "--since-version", "0") as watcher:
            assert b"gap" in watcher.out.readline()
            if end == "ctrl-c":
                watcher.process.send_signal(2)
                assert watcher.process.wait(10) == 0
                assert watcher.err.read() == b""
            else:
                penstock("cache", "delete", name, "--yes")
                assert watcher.process.wait(10) == 1
                assert watcher.err.read().startswith(b"Error: NOT_FOUND: ")


@pytest.mark.parametrize(
    "words",
    [
        ("get", "default"),
        ("get", "default", "k", "--raw", "--json"),
        ("put", "default"),
        ("put", "default", "k", "v", "--ttl", "soon"),
        ("put", "default", "k", "v", "--ttl", "-1"),
        ("put", "default", "k", "v", "--if-version", "-1"),
        ("incr", "default", "k", "--delta", "much"),
        ("watch", "default", "k", "--prefix", "k"),
        ("watch", "default", "--include", "put"),
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_be_is_exit_code_2(penstock: Run, words: tuple[str, ...]) -> None:
    done = penstock("cache", *words)
    assert (done.code, done.out) == (2, "")


def test_a_duration_that_is_none_is_explained(penstock: Run) -> None:
    done = penstock("cache", "put", "default", "k", "v", "--ttl", "soon")
    assert "'soon' is not allowed; it takes a duration such as 250ms, 60s" in done.err
    done = penstock("cache", "put", "default", "k", "v", "--ttl", "60")
    assert "60 of what? Say 60s, or 60ms" in done.err


def test_without_a_broker_is_exit_code_1() -> None:
    for words in (("get", "c", "k"), ("put", "c", "k", "v"), ("incr", "c", "k"), ("watch", "c")):
        done = run_penstock("cache", *words, "--url", "http://127.0.0.1:1")
        assert done.code == 1
        assert done.err.startswith("Error: UNAVAILABLE: no broker answers")
