"""The connection waits for a broker that is away, and takes no half answer for a whole one."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructType

from penstock.model.errors import (
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from penstock.spark.broker import BrokerConnection, RetryTime
from penstock.spark.logs import TopicPartition
from penstock.spark.options import BrokerSettings, SourceSettings
from penstock.spark.planning import TaskSlice
from penstock.spark.reading import RowRequest, read
from tests.spark.canned import canned, json_answer, offsets_stream, rows_answer
from tests.spark.sources import free_port

AWAY = json_answer(503, b'{"error":"UNAVAILABLE","message":"the broker is stopping"}')
FULL = json_answer(
    429, b'{"error":"RESOURCE_EXHAUSTED","message":"full","limit":"x","retry_after_ms":1}'
)
WRONG = json_answer(404, b'{"error":"NOT_FOUND","message":"no such topic"}')


def test_a_broker_that_comes_back_answers():
    with canned(AWAY, FULL, b"", json_answer(200, b"{}")) as server:
        with BrokerConnection(server.settings(retry_s=20)) as broker:
            assert broker.call("GET", "/v1/topics") == b"{}"
        assert len(server.requests) == 4


def test_what_waiting_cannot_mend_is_raised_at_once():
    with canned(WRONG) as server:
        broker = BrokerConnection(server.settings(retry_s=60))
        with broker, pytest.raises(NotFound, match="no such topic"):
            broker.call("GET", "/v1/topics/x")


@pytest.mark.parametrize(("answer", "kind"), [(AWAY, Unavailable), (FULL, ResourceExhausted)])
def test_a_broker_that_stays_away_is_given_up_after_retry_seconds(answer: bytes, kind: Any):
    with (
        canned(*[answer] * 100) as server,
        BrokerConnection(server.settings(retry_s=0.3)) as broker,
    ):
        begun = time.monotonic()
        with pytest.raises(kind, match=r"tried for 0\.3 s \(option retrySeconds\)"):
            broker.call("GET", "/v1/topics")
        assert time.monotonic() - begun < 5


def test_nobody_there_is_said_with_the_address():
    url = f"http://127.0.0.1:{free_port()}"
    broker = BrokerConnection(BrokerSettings(url=url, retry_s=0.1))
    with broker, pytest.raises(Unavailable, match=f"no broker answers at {url}.*penstock serve"):
        broker.call("GET", "/v1/topics")


def test_a_wrong_token_is_said_at_once_and_not_shown():
    refusal = json_answer(401, b'{"error":"UNAUTHENTICATED","message":"no"}')
    with canned(refusal, refusal) as server:
        broker = BrokerConnection(server.settings(retry_s=60, token="s3cret"))
        with broker, pytest.raises(Unauthenticated, match="does not take the token") as failure:
            broker.call("GET", "/v1/topics")
        with pytest.raises(Unauthenticated):
            broker.rows("/v1/topics/x/partitions/0/records", {})
        assert "s3cret" not in str(failure.value) + repr(broker)
        assert b"Authorization: Bearer s3cret" in server.requests[0]
        assert b"Authorization: Bearer s3cret" in server.requests[1]


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure():
    kept = json_answer(200, b"{}").replace(b"connection: close\r\n", b"")
    with canned(kept, kept) as server, BrokerConnection(server.settings(retry_s=0)) as broker:
        assert broker.call("GET", "/v1/topics") == b"{}"
        assert broker.call("GET", "/v1/topics") == b"{}"


def test_a_copy_of_a_broker_connects_anew():
    with canned(json_answer(200, b"{}")) as server:
        broker = BrokerConnection(server.settings())
        with pickle.loads(pickle.dumps(broker)) as copy:
            assert copy.call("GET", "/") == b"{}"


def test_a_stream_that_breaks_off_is_never_taken_for_a_whole_one():
    whole = offsets_stream([0, 1, 2], [5, 6])
    answers = [rows_answer(whole[:size]) for size in range(len(whole))]
    with canned(*answers, rows_answer(whole)) as server:
        broker = BrokerConnection(server.settings())
        for _ in answers:
            with broker.rows("/rows", {}) as rows, pytest.raises(Unavailable, match="broke off"):
                list(rows)
        with broker.rows("/rows", {}) as rows:
            assert [batch.to_pylist() for batch in rows] == [
                [{"offset": 0}, {"offset": 1}, {"offset": 2}],
                [{"offset": 5}, {"offset": 6}],
            ]


def test_a_read_that_breaks_off_goes_on_behind_the_last_row_it_gave():
    first = offsets_stream([0, 1, 2])[:-8]
    rest = offsets_stream([5, 6], [9])
    with canned(rows_answer(first), AWAY, rows_answer(rest)) as server:
        rows = read_slice(server.settings(retry_s=20), TaskSlice(TopicPartition("t", 0), 0, 10, 6))
        assert rows == [0, 1, 2, 5, 6, 9]
        starts = [request.split(b"start=")[1].split(b"&")[0] for request in server.requests]
        assert starts == [b"0", b"3", b"3"]


def test_a_read_that_goes_forward_is_never_given_up():
    """Each of its breaks is within the bound, and all of them together are far beyond it."""
    answers = [rows_answer(offsets_stream([offset])[:-8]) for offset in range(30)]
    with canned(*answers, rows_answer(offsets_stream([30]))) as server:
        one = TaskSlice(TopicPartition("t", 0), 0, 40, 31)
        assert read_slice(server.settings(retry_s=0.2), one) == list(range(31))


def test_a_read_without_progress_is_given_up():
    with canned(*[rows_answer(b"")] * 100) as server:
        settings = server.settings(retry_s=0.2)
        with pytest.raises(Unavailable, match="option retrySeconds"):
            read_slice(settings, TaskSlice(TopicPartition("t", 0), 0, 10, 6))


def read_slice(settings: BrokerSettings, one: TaskSlice) -> list[int]:
    source = SourceSettings(url=settings.url, retry_s=settings.retry_s, topics=("t",))
    request = RowRequest(source, StructType().add("offset", LongType()))
    return [offset for batch in read(request, (one,)) for offset in batch["offset"].to_pylist()]


class Watch:
    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_patience_lasts_as_long_as_it_says_and_pauses_grow():
    watch = Watch()
    retry_time = RetryTime(30, lambda: watch.now, watch.sleep)
    with pytest.raises(Unavailable):
        wait_for_ever(retry_time, Unavailable("away"))
    assert watch.now == pytest.approx(130)
    assert watch.pauses[0] < 0.1 < max(watch.pauses) <= 2


def test_progress_renews_patience():
    watch = Watch()
    retry_time = RetryTime(5, lambda: watch.now, watch.sleep)
    with pytest.raises(Unavailable):
        wait_for_ever(retry_time, Unavailable("away"))
    retry_time.renew()
    retry_time.wait_after(Unavailable("away"))


def test_a_full_broker_is_not_asked_before_it_said():
    watch = Watch()
    retry_time = RetryTime(30, lambda: watch.now, watch.sleep)
    retry_time.wait_after(ResourceExhausted("full", limit="x", retry_after_ms=3000))
    assert watch.pauses == [3.0]


def test_a_debt_that_is_paid_back_is_waited_for():
    """Longer than the patience: a large batch may have used up the rate of a minute."""
    watch = Watch()
    retry_time = RetryTime(5, lambda: watch.now, watch.sleep)
    began, debt_ms = watch.now, 60_000
    while (left_ms := debt_ms - int((watch.now - began) * 1000)) > 0:
        retry_time.wait_after(refused_by_quota(left_ms))
    assert watch.now - began < 70


def test_a_quota_without_room_is_not_waited_for_for_ever():
    watch = Watch()
    retry_time = RetryTime(5, lambda: watch.now, watch.sleep)
    with pytest.raises(ResourceExhausted, match="retrySeconds"):
        wait_for_ever(retry_time, refused_by_quota(1000))
    assert watch.now == pytest.approx(105)


def refused_by_quota(retry_after_ms: int) -> ResourceExhausted:
    return ResourceExhausted("full", limit="x", reason="quota", retry_after_ms=retry_after_ms)


def wait_for_ever(retry_time: RetryTime, error: PenstockError) -> None:
    while True:
        retry_time.wait_after(error)
