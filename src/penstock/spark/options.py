"""The options of format("penstock"): read once, on the driver, into typed settings.

Invariant: an option that is unknown, has no meaning for the operation or does not say what it must
is refused by its name, with what it takes; none is ignored. As Spark's own, options are found
whatever their case. The settings travel to the executors; a token is in them, and in no text made
of them. Must not know what the options are for.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_OFFSET
from penstock.model.names import ARCHIVE_GROUP, clean_name
from penstock.model.splits import MAX_SPLIT_ROWS

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_RETRY_S = 60.0
MAX_RETRY_S = 86_400.0
PATTERN_SIGNS = "*?["

ROWS_PER_PARTITION = 524_288
"""Eight whole batches of history. A task has a price of its own, whatever it reads."""

Use = Literal["read", "readStream", "write", "writeStream"]
LogName = Literal["records", "journal"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """Which broker, and how long one that does not answer is waited for."""

    url: str = DEFAULT_URL
    token: str = field(default="", repr=False)
    retry_s: float = DEFAULT_RETRY_S

    @classmethod
    def of(
        cls, url: str | None = None, token: str | None = None, retry_s: float = DEFAULT_RETRY_S
    ) -> BrokerSettings:
        """What is None is taken from the environment, as the options are."""
        chosen = {"url": url, "token": token}
        given = {name: value for name, value in chosen.items() if value is not None}
        return cls(**_read(given, _BROKER), retry_s=retry_s)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Where a read begins or ends: at a name, at a time, or at offsets by topic and partition.
    A place that `offsets` does not speak of has the default."""

    default: Literal["earliest", "latest"]
    time_ms: int | None = None
    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    position: int | None = None
    """The journal's, which has no partitions."""


EARLIEST = Bound(default="earliest")
LATEST = Bound(default="latest")


@dataclass(frozen=True, kw_only=True)
class SourceSettings(BrokerSettings):
    log: LogName = "records"
    topics: tuple[str, ...] = ()
    start: Bound = EARLIEST
    end: Bound = LATEST
    columns: tuple[str, ...] = ()
    max_rows_per_trigger: int | None = None
    min_partitions: int = 1
    rows_per_partition: int = ROWS_PER_PARTITION
    fail_on_data_loss: bool = True
    fail_on_deleted_topic: bool | None = None
    """None: as on any other loss."""
    group: str = ""
    pushdown: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use | None = None) -> SourceSettings:
        """`use` None: of a batch or a stream, as long as only the schema is asked for."""
        given = _named(options, _SOURCE, use)
        values = _read(given, _SOURCE)
        log: LogName = values.get("log", "records")
        for what, member in (("starting", "start"), ("ending", "end")):
            bound = _bound(what, values, log, EARLIEST if member == "start" else LATEST)
            if bound is not None:
                values[member] = bound
        _check_order(values.get("start", EARLIEST), values.get("end", LATEST))
        if log == "journal":
            _refuse(given, "topic", "log=journal has the events of all topics; filter its rows")
            if values.get("group", ARCHIVE_GROUP) != ARCHIVE_GROUP:
                raise InvalidArgument(
                    f"option group: of the journal the broker knows only {ARCHIVE_GROUP!r}, "
                    f"not {values['group']!r}"
                )
        elif "topics" not in values:
            raise InvalidArgument(f"option topic is required; it takes {_SOURCE['topic'].takes}")
        if use == "read" and values.get("start") == LATEST:
            raise InvalidArgument(
                "option startingOffsets: latest is where a batch read ends; it takes earliest or "
                "offsets (readStream takes latest too)"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class SinkSettings(BrokerSettings):
    topic: str = ""
    cache: str = ""
    """tenant/namespace/cache"""
    producer_id: str = ""
    txn: str = ""
    txn_batch: int | None = None
    """None: the only batch of its txn."""

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use) -> SinkSettings:
        given = _named(options, _SINK, use)
        if "topic" in given and "cache" in given:
            raise InvalidArgument("options topic and cache exclude each other: rows go to one")
        if "txnBatch" in given and "txn" not in given:
            raise InvalidArgument("option txnBatch counts the batches of a txn: name it too")
        return cls(**_read(given, _SINK))


# -- what an option says ---------------------------------------------------------------------------


class _Wrong(ValueError):
    """The value is not what the option takes; the text says more, if there is more to say."""


def _url(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise _Wrong from None
    if parts.username is not None or parts.password is not None:
        raise _Wrong("credentials do not belong in it; use the option token")
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise _Wrong
    if parts.query or parts.fragment or not (text.isascii() and text.isprintable()):
        raise _Wrong
    return text.strip().rstrip("/")


def _token(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise _Wrong("it has characters that a header cannot carry")
    return text


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise _Wrong
    return tuple(dict.fromkeys(words))


def _topics(text: str) -> tuple[str, ...]:
    return tuple(_name(word) for word in _words(text))


def _name(text: str) -> str:
    try:
        return clean_name(text, "it")
    except PenstockError as error:
        raise _Wrong(error.message) from None


def _cache(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 3:
        raise _Wrong
    return "/".join(_name(part) for part in parts)


def _switch(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise _Wrong
    return text.strip().lower() == "true"


def _count(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = _whole(text)
        if not 1 <= number <= most:
            raise _Wrong
        return number

    return parse


def _whole(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise _Wrong
    return int(digits)


def _batch_number(text: str) -> int:
    return _offset(_whole(text))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise _Wrong from None
    if not 0 <= seconds <= MAX_RETRY_S:
        raise _Wrong
    return seconds


def _log_name(text: str) -> str:
    if text.strip().lower() not in ("records", "journal"):
        raise _Wrong
    return text.strip().lower()


def _moment(text: str) -> int:
    """Milliseconds since 1970."""
    if text.strip().isdigit():
        return _whole(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _Wrong from None
    if moment.tzinfo is None:
        raise _Wrong("a time without a zone may mean several moments: add Z or +02:00")
    ms = round(moment.timestamp() * 1000)
    if ms < 0:
        raise _Wrong("it is before 1970")
    return ms


def _offsets(text: str) -> str | int | dict[str, dict[int, int]]:
    """A name, the journal's position, or offsets by topic and partition."""
    word = text.strip()
    if word.lower() in ("earliest", "latest"):
        return word.lower()
    if word.isdigit():
        return _offset(_whole(word))
    try:
        said = json.loads(word)
    except ValueError:
        raise _Wrong from None
    if isinstance(said, dict) and set(said) == {"journal"} and isinstance(said["journal"], int):
        return _offset(said["journal"])
    if not isinstance(said, dict):
        raise _Wrong
    return {topic: _partitions(topic, partitions) for topic, partitions in said.items()}


def _partitions(topic: str, partitions: object) -> dict[int, int]:
    if not isinstance(partitions, dict):
        raise _Wrong(f"topic {topic!r} needs its partitions, like {{{json.dumps(topic)}: {{}}}}")
    return {_whole(partition): _offset(offset) for partition, offset in partitions.items()}


def _offset(offset: object) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= 2**63 - 1:
        raise _Wrong
    return offset


def _bound(what: str, values: dict[str, Any], log: LogName, usual: Bound) -> Bound | None:
    """Takes the two options that say the same thing out of the values."""
    time_ms = values.pop(f"{what}_timestamp", None)
    said = values.pop(f"{what}_offsets", None)
    option = f"option {what}Offsets"
    if time_ms is not None and said is not None:
        raise InvalidArgument(f"{option} and {what}Timestamp exclude each other: give one of them")
    if time_ms is not None:
        return Bound(default=usual.default, time_ms=time_ms)
    if said is None:
        return None
    if isinstance(said, str):
        return EARLIEST if said == "earliest" else LATEST
    if isinstance(said, int):
        if log != "journal":
            raise InvalidArgument(f"{option}: a single number is a position of log=journal")
        return Bound(default=usual.default, position=said)
    if log == "journal":
        raise InvalidArgument(f"{option}: log=journal has one position, like 123, and no topics")
    return Bound(default=usual.default, offsets=said)


def _check_order(start: Bound, end: Bound) -> None:
    """A read that ends before it begins would have no rows, and nothing to say why. One from an
    offset to the same is whole: who reads on from where they are may find nothing new."""
    if start.time_ms is not None and end.time_ms is not None and end.time_ms <= start.time_ms:
        raise InvalidArgument(
            "option endingTimestamp is not after startingTimestamp: there can be no rows"
        )
    for place, first, last in _said_of_both(start, end):
        if last < first:
            raise InvalidArgument(
                f"option endingOffsets is below startingOffsets: {place} would be read from "
                f"{first} to {last}"
            )


def _said_of_both(start: Bound, end: Bound) -> Iterator[tuple[str, int, int]]:
    if start.position is not None and end.position is not None:
        yield "the journal", start.position, end.position
    for topic, partitions in start.offsets.items():
        ends = end.offsets.get(topic, {})
        for number in sorted(partitions.keys() & ends.keys()):
            yield f"topic {topic!r} partition {number}", partitions[number], ends[number]


# -- which options there are -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """`to` is the member of the settings, `uses` the operations that have it."""

    to: str
    parse: Callable[[str], Any]
    takes: str
    uses: tuple[Use, ...]
    env: str = ""


_READ: tuple[Use, ...] = ("read", "readStream")
_WRITE: tuple[Use, ...] = ("write", "writeStream")
_OFFSETS_TAKE = 'earliest, latest or offsets like {"orders":{"0":12}}, of log=journal a position'
_MOMENT_TAKES = "a time in RFC 3339, like 2025-01-31T12:00:00Z, or milliseconds since 1970"

_BROKER = {
    "url": _Option("url", _url, f"an address like {DEFAULT_URL}", _READ + _WRITE, "PENSTOCK_URL"),
    "token": _Option("token", _token, "the broker's token", _READ + _WRITE, "PENSTOCK_TOKEN"),
    "retrySeconds": _Option(
        "retry_s", _seconds, f"seconds, 0 to {MAX_RETRY_S:.0f}", _READ + _WRITE
    ),
}
_SOURCE = _BROKER | {
    "topic": _Option(
        "topics", _topics, "a topic, several with commas between, or a pattern like orders-*", _READ
    ),
    "log": _Option("log", _log_name, "records or journal", _READ),
    "startingOffsets": _Option("starting_offsets", _offsets, _OFFSETS_TAKE, _READ),
    "startingTimestamp": _Option("starting_timestamp", _moment, _MOMENT_TAKES, _READ),
    "endingOffsets": _Option("ending_offsets", _offsets, _OFFSETS_TAKE, ("read",)),
    "endingTimestamp": _Option("ending_timestamp", _moment, _MOMENT_TAKES, ("read",)),
    "columns": _Option("columns", _words, "names of columns with commas between", _READ),
    "maxRowsPerTrigger": _Option(
        "max_rows_per_trigger", _count(MAX_OFFSET), "a whole number from 1 on", ("readStream",)
    ),
    "minPartitions": _Option(
        "min_partitions", _count(100_000), "a whole number, 1 to 100000", _READ
    ),
    "rowsPerPartition": _Option(
        "rows_per_partition",
        _count(MAX_SPLIT_ROWS),
        f"a whole number, 1 to {MAX_SPLIT_ROWS}",
        _READ,
    ),
    "failOnDataLoss": _Option("fail_on_data_loss", _switch, "true or false", _READ),
    "failOnDeletedTopic": _Option(
        "fail_on_deleted_topic", _switch, "true or false", ("readStream",)
    ),
    "group": _Option("group", _name, "the name of a group", ("readStream",)),
    "pushdown": _Option("pushdown", _switch, "true or false", ("read",)),
}
_SINK = _BROKER | {
    "topic": _Option("topic", _name, "a topic", _WRITE),
    "cache": _Option("cache", _cache, "tenant/namespace/cache", _WRITE),
    "producerId": _Option("producer_id", _name, "a name", ("writeStream",)),
    "txn": _Option("txn", _name, "a name", ("write",)),
    "txnBatch": _Option("txn_batch", _batch_number, "a whole number from 0 on", ("write",)),
}

_OF_SPARK = frozenset({"checkpointlocation", "queryname"})
"""Options of a streaming query that Spark shows to its sink as well."""


def _named(
    options: Mapping[str, str], known: Mapping[str, _Option], use: Use | None
) -> dict[str, str]:
    """The options by their own spelling; each has a meaning for the operation."""
    spelling = {name.lower(): name for name in known}
    given: dict[str, str] = {}
    for key, value in options.items():
        if use == "writeStream" and key.lower() in _OF_SPARK:
            continue
        name = spelling.get(key.lower())
        if name is None:
            raise InvalidArgument(_unknown(key, spelling))
        if use is not None and use not in known[name].uses:
            raise InvalidArgument(f"option {name} is for {known[name].uses[0]}, not for {use}")
        given[name] = value
    return given


def _unknown(key: str, spelling: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key.lower(), spelling, n=1)
    if near:
        return f"unknown option {key}; did you mean {spelling[near[0]]}?"
    return f"unknown option {key}; there are {', '.join(spelling.values())}"


def _read(given: Mapping[str, str], known: Mapping[str, _Option]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, option in known.items():
        origin = f"option {name}"
        text = given.get(name)
        if text is None and os.environ.get(option.env):
            origin, text = option.env, os.environ[option.env]
        if text is None:
            continue
        try:
            values[option.to] = option.parse(text)
        except _Wrong as wrong:
            shown = "" if name in ("token", "url") else f" {text!r}"
            why = f": {wrong}" if str(wrong) else ""
            raise InvalidArgument(
                f"{origin}{shown} does not fit{why}; it takes {option.takes}"
            ) from None
    return values


def _refuse(given: Mapping[str, str], name: str, why: str) -> None:
    if name in given:
        raise InvalidArgument(f"option {name} has no meaning here: {why}")
