"""The short way of a put: whenever it answers, the long way would have said the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cache_rules import decide_put, decide_replace, find_cache
from penstock.core.state import BrokerState
from penstock.model.caching import Put, Written
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.records import CacheStored
from penstock.model.tenancy import CacheConfig

PATH = ("default", "default", "default")
NOW_MS = 1_000_000

PUTS = st.builds(
    Put,
    path=st.just(PATH),
    key=st.sampled_from(["a", "b", "c"]),
    value=st.sampled_from([b"", b"1", b"12345", b"y" * 45, b"x" * 60]),
    ttl_ms=st.sampled_from([None] * 6 + [0, 10, 1000, -1]),
    if_not_exists=st.sampled_from([False] * 6 + [True]),
    if_version=st.sampled_from([None] * 6 + [0, 3]),
)
STEPS = st.lists(st.tuples(PUTS, st.sampled_from([0, 5, 600])), min_size=8, max_size=20)


@given(
    steps=STEPS,
    max_bytes=st.sampled_from([0, 700, 1050]),
    memory_bytes=st.sampled_from([700, 10_000]),
)
def test_a_replacement_has_the_record_of_a_put(
    steps: list[tuple[Put, int]], max_bytes: int, memory_bytes: int
) -> None:
    state = BrokerState(Limits(cache_memory_bytes=memory_bytes, max_message_bytes=50))
    cache = find_cache(state, PATH)
    cache.configure(CacheConfig(max_bytes=max_bytes))
    now_ms = NOW_MS
    for command, passed_ms in steps:
        now_ms += passed_ms
        short = decide_replace(state, cache, command, now_ms)
        try:
            decision = decide_put(state, command, now_ms)
        except PenstockError:
            assert short is None
            continue
        if short is not None:
            assert decision.records == [short]
            assert decision.outcome == Written(short.version)
        for record in decision.records:
            if isinstance(record, CacheStored):
                cache.store(record)
            else:
                cache.remove(record)


def test_most_puts_over_a_value_are_replacements() -> None:
    state = BrokerState(Limits())
    cache = find_cache(state, PATH)
    cache.store(CacheStored(cache.id, NOW_MS, "a", b"old", 1))
    assert decide_replace(state, cache, Put(PATH, "a", b"newer", 10), NOW_MS) is not None
