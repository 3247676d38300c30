"""Options are read once, whatever their case, and refused by name with what they take."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.model.errors import InvalidArgument
from penstock.spark.bounds import EARLIEST, LATEST, Bound
from penstock.spark.options import BrokerSettings, CacheSettings, SinkSettings, SourceSettings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)


def source(use: Any = None, /, **options: str) -> SourceSettings:
    return SourceSettings.from_options({"topic": "orders"} | options, use)


def test_the_defaults_are_the_whole_topic_at_the_local_broker():
    settings = source("read")
    assert settings.url == "http://127.0.0.1:8080"
    assert settings.retry_s == 60
    assert (settings.start, settings.end) == (EARLIEST, LATEST)
    assert settings.rows_per_partition == 524_288
    assert settings.fail_on_data_loss


def test_options_are_found_whatever_their_case():
    given = {"TOPIC": "orders", "STARTINGOFFSETS": "Latest", "failondataloss": "FALSE"}
    settings = SourceSettings.from_options(given, "readStream")
    assert settings.start == LATEST
    assert not settings.fail_on_data_loss


def test_topics_are_names_and_patterns_with_commas_between():
    assert source(topic=" orders, jobs-*,orders ").topics == ("orders", "jobs-*")


@pytest.mark.parametrize(
    ("said", "bound"),
    [
        ({"startingOffsets": "earliest"}, EARLIEST),
        ({"startingOffsets": "latest"}, LATEST),
        (
            {"startingOffsets": '{"orders": {"0": 12, "3": 0}}'},
            Bound(default="earliest", offsets={"orders": {0: 12, 3: 0}}),
        ),
        ({"startingTimestamp": "1700000000000"}, Bound(default="earliest", time_ms=1700000000000)),
        (
            {"startingTimestamp": "2023-11-14T22:13:20Z"},
            Bound(default="earliest", time_ms=1700000000000),
        ),
        (
            {"startingTimestamp": "2023-11-15T00:13:20.5+02:00"},
            Bound(default="earliest", time_ms=1700000000500),
        ),
    ],
)
def test_where_a_read_begins_is_said_in_several_ways(said: dict[str, str], bound: Bound):
    assert source("readStream", **said).start == bound


def test_the_journal_has_one_position():
    options = {"log": "journal", "startingOffsets": "17", "endingOffsets": '{"journal": 20}'}
    settings = SourceSettings.from_options(options, "read")
    assert settings.start == Bound(default="earliest", position=17)
    assert settings.end == Bound(default="latest", position=20)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("url", "ftp://broker", "an address like"),
        ("url", "http://", "an address like"),
        ("url", "http://broker:99999", "an address like"),
        ("url", "http://me:secret@broker", "option token"),
        ("url", "http://a:1,http://me:secret@b", "option token"),
        ("url", "http://a:1,b:1", "an address like"),
        ("url", "http://a:1,https://b:1", "the same scheme"),
        ("token", "line\nbreak", "a header cannot carry"),
        ("topic", "", "a topic"),
        ("topic", "orders,,jobs", "a topic"),
        ("topic", "a" * 201, "longer than"),
        ("log", "events", "records or journal"),
        ("startingOffsets", "first", "earliest, latest or offsets"),
        ("startingOffsets", "[1]", "earliest, latest or offsets"),
        ("startingOffsets", '{"orders": 12}', "has no partitions for topic"),
        ("startingOffsets", '{"orders": {"x": 12}}', "earliest, latest or offsets"),
        ("startingOffsets", '{"orders": {"0": -1}}', "earliest, latest or offsets"),
        ("startingOffsets", '{"orders": {"0": true}}', "earliest, latest or offsets"),
        ("startingOffsets", "12", "a position of log=journal"),
        ("startingTimestamp", "yesterday", "RFC 3339"),
        ("startingTimestamp", "2025-01-31T12:00:00", "has no time zone"),
        ("startingTimestamp", "1969-01-01T00:00:00Z", "before 1970"),
        ("endingOffsets", "last", "earliest, latest or offsets"),
        ("endingTimestamp", "noon", "RFC 3339"),
        ("columns", "value,,key", "names of columns"),
        ("minPartitions", "0", "1 to 100000"),
        ("minPartitions", "two", "1 to 100000"),
        ("rowsPerPartition", "0", "1 to 10000000"),
        ("rowsPerPartition", "10000001", "1 to 10000000"),
        ("failOnDataLoss", "no", "true or false"),
        ("retrySeconds", "-1", "seconds, 0 to"),
        ("retrySeconds", "soon", "seconds, 0 to"),
        ("retrySeconds", "nan", "seconds, 0 to"),
        ("pushdown", "yes", "true or false"),
    ],
)
def test_a_bad_option_is_named_with_what_it_takes(option: str, value: str, said: str):
    with pytest.raises(InvalidArgument) as refusal:
        source("read", **{option: value})
    assert option in refusal.value.message
    assert said in refusal.value.message


@pytest.mark.parametrize(
    ("option", "value"), [("maxRowsPerTrigger", "0"), ("maxRowsPerTrigger", "x"), ("group", " ")]
)
def test_a_bad_option_of_a_stream_is_named(option: str, value: str):
    with pytest.raises(InvalidArgument, match=option):
        source("readStream", **{option: value})


@pytest.mark.parametrize(
    ("use", "option", "value", "home"),
    [
        ("readStream", "endingOffsets", "latest", "read"),
        ("readStream", "endingTimestamp", "0", "read"),
        ("readStream", "pushdown", "true", "read"),
        ("read", "maxRowsPerTrigger", "10", "readStream"),
        ("read", "group", "g", "readStream"),
    ],
)
def test_an_option_without_a_meaning_is_refused(use: Any, option: str, value: str, home: str):
    with pytest.raises(InvalidArgument, match=f"option {option} is for {home}, not for {use}"):
        source(use, **{option: value})


def test_an_unknown_option_is_refused_with_its_near_match():
    with pytest.raises(InvalidArgument, match="unknown option startOffsets; did you mean starting"):
        source(startOffsets="earliest")
    with pytest.raises(InvalidArgument, match="unknown option path; there are url, token"):
        source(path="orders")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "option topic, stream or cache is required"),
        ({"log": "journal", "topic": "orders"}, "option topic has no meaning with log=journal"),
        (
            {"log": "journal", "group": "g"},
            "option group: 'g' is not allowed; with log=journal it takes",
        ),
        ({"log": "journal", "startingOffsets": '{"orders": {"0": 1}}'}, "one position"),
        (
            {"topic": "orders", "startingOffsets": "earliest", "startingTimestamp": "0"},
            "exclude each other",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, str], said: str):
    with pytest.raises(InvalidArgument, match=said):
        SourceSettings.from_options(options)


def test_a_batch_does_not_begin_where_it_ends():
    with pytest.raises(InvalidArgument, match="startingOffsets"):
        source("read", startingOffsets="latest")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"startingOffsets": '{"orders": {"1": 12}}', "endingOffsets": '{"orders": {"1": 3}}'},
            "endingOffsets is below startingOffsets: topic 'orders' partition 1 would be read from "
            "12 to 3",
        ),
        (
            {"topic": "", "log": "journal", "startingOffsets": "20", "endingOffsets": "19"},
            "endingOffsets is below startingOffsets: the journal would be read from 20 to 19",
        ),
        (
            {"startingTimestamp": "2025-01-31T12:00:00Z", "endingTimestamp": "1738324799999"},
            "endingTimestamp is not after startingTimestamp",
        ),
        (
            {"startingTimestamp": "1738324800000", "endingTimestamp": "2025-01-31T12:00:00Z"},
            "endingTimestamp is not after startingTimestamp",
        ),
    ],
)
@pytest.mark.parametrize("use", [None, "read"])
def test_a_read_that_would_end_before_it_begins_is_refused(
    options: dict[str, str], said: str, use: Any
):
    given = {name: value for name, value in ({"topic": "orders"} | options).items() if value}
    with pytest.raises(InvalidArgument, match=said):
        SourceSettings.from_options(given, use)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ('{"orders": {"0": 5}}', '{"orders": {"0": 5}}'),
        ('{"orders": {"0": 5}}', '{"orders": {"1": 3}}'),
        ('{"orders": {"0": 5}}', '{"jobs": {"0": 3}}'),
        ('{"orders": {"0": 5}}', "latest"),
        ("earliest", '{"orders": {"0": 0}}'),
    ],
)
def test_a_read_whose_ends_are_in_order_or_not_known_yet_is_taken(starts: str, ends: str):
    source("read", topic="orders,jobs", startingOffsets=starts, endingOffsets=ends)


def test_the_environment_names_the_broker_and_options_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_URL", "https://broker:1/")
    monkeypatch.setenv("PENSTOCK_TOKEN", "from the environment")
    assert source().url == "https://broker:1"
    assert source(token="own").token == "own"
    cluster = BrokerSettings.of(url=" http://a:1/ , http://b:1")
    assert cluster.url == "http://a:1,http://b:1"
    settings = BrokerSettings.of(url="http://other", retry_s=2)
    assert settings.url == "http://other"
    assert settings.token == "from the environment"
    monkeypatch.setenv("PENSTOCK_URL", "nonsense")
    with pytest.raises(InvalidArgument, match="PENSTOCK_URL"):
        source()


def test_a_token_travels_and_is_never_shown():
    settings = pickle.loads(pickle.dumps(source(token="s3cret")))
    assert settings.token == "s3cret"
    assert "s3cret" not in f"{settings!r} {settings}"
    with pytest.raises(InvalidArgument) as refusal:
        source(token="s3cret\n")
    assert "s3cret" not in str(refusal.value)


def test_a_sink_takes_what_spark_adds_to_a_streaming_query():
    options = {"checkpointLocation": "/there", "queryName": "copy", "topic": "orders"}
    assert SinkSettings.from_options(options, "writeStream").topic == "orders"


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("write", {"topic": "a", "cache": "t/n/c"}, "give only one of the options topic and cache"),
        ("write", {"cache": "t/c"}, "tenant/namespace/cache"),
        ("write", {"producerId": "p"}, "option producerId is for writeStream"),
        ("writeStream", {"txn": "t"}, "option txn is for write, not for writeStream"),
        ("write", {"txnBatch": "1"}, "option txnBatch needs option txn, whose batches it numbers"),
        ("write", {"txn": "t", "txnBatch": "-1"}, "option txnBatch: '-1' is not allowed"),
        ("write", {"topics": "a"}, "did you mean topic"),
    ],
)
def test_a_bad_option_of_a_sink_is_named(use: Any, options: dict[str, str], said: str):
    with pytest.raises(InvalidArgument, match=said):
        SinkSettings.from_options(options, use)


# -- streams and caches ----------------------------------------------------------------------------


def test_a_stream_is_read_with_the_options_of_a_topic():
    given = {"stream": "orders, jobs-*", "startingOffsets": '{"orders": 12}', "columns": "payload"}
    settings = SourceSettings.from_options(given, "read")
    assert (settings.log, settings.topics) == ("events", ("orders", "jobs-*"))
    assert settings.start == Bound(default="earliest", offsets={"orders": {0: 12}})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stream": "s", "topic": "t"}, "options stream and topic exclude each other"),
        ({"stream": "s", "log": "journal"}, "options stream and log exclude each other"),
        ({"stream": "s", "startingOffsets": '{"s": {"0": 1}}'}, 'write {"s": 12}'),
        ({"topic": "t", "startingOffsets": '{"t": 5}'}, 'write {"t": {"0": 5}}'),
        (
            {"stream": "s", "startingOffsets": '{"s": 5}', "endingOffsets": '{"s": 4}'},
            "stream 's' would be read from 5 to 4",
        ),
        ({}, "option topic, stream or cache is required"),
    ],
)
def test_options_of_a_stream_that_make_no_sense_are_named(given: dict[str, str], text: str):
    with pytest.raises(InvalidArgument) as refused:
        SourceSettings.from_options(given, "read")
    assert text in refused.value.message


def test_a_cache_is_a_name_in_the_namespace_or_a_path():
    scope = {"tenant": "acme", "namespace": "prod"}
    assert CacheSettings.from_options({"cache": "c"}, "read").cache == "default/default/c"
    assert CacheSettings.from_options({"Cache": "c"} | scope, "read").cache == "acme/prod/c"
    assert CacheSettings.from_options({"cache": "a/b/c"} | scope, "read").cache == "a/b/c"
    assert SinkSettings.from_options({"cache": "c"} | scope, "write").cache == "acme/prod/c"
    assert SinkSettings.from_options({"stream": "s"} | scope, "write").stream == "acme/prod/s"


@pytest.mark.parametrize(
    ("use", "given", "text"),
    [
        ("readStream", {"cache": "c"}, "option cache is for read, not for readStream"),
        ("read", {"cache": "c", "startingOffsets": "5"}, "startingOffsets has no meaning with"),
        ("read", {"cache": "c", "stream": "s"}, "option stream has no meaning with cache"),
        ("read", {"cache": "a/b"}, "it takes a cache, as its name or as tenant/namespace/cache"),
        ("read", {"cache": "c", "colums": "key"}, "did you mean columns"),
    ],
)
def test_options_of_a_cache_that_make_no_sense_are_named(
    use: Any, given: dict[str, str], text: str
):
    with pytest.raises(InvalidArgument) as refused:
        CacheSettings.from_options(given, use)
    assert text in refused.value.message


def test_rows_go_to_one_target():
    with pytest.raises(InvalidArgument, match="give only one of the options topic and stream"):
        SinkSettings.from_options({"topic": "t", "stream": "s"}, "write")
    with pytest.raises(InvalidArgument, match="has a slash in it: tenant and namespace"):
        SinkSettings.from_options({"stream": "a/b/s"}, "write")
