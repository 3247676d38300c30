"""The options of format("penstock"): read once, on the driver, into typed settings.

Invariant: an option that is unknown, has a wrong value or has no meaning for the operation is
refused by its name; none is ignored. Names are case-insensitive, as Spark's own are. The
settings travel to the executors with the token in them, but no text made of them shows the token.
Must not know what the options are for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_OFFSET
from penstock.model.names import ARCHIVE_GROUP
from penstock.model.options import (
    CACHE,
    NAME,
    TIME_MS,
    TOPIC,
    TRUE_OR_FALSE,
    Kind,
    Option,
    WrongValue,
    choice,
    list_of,
    number,
    unknown_name,
    whole_number,
)
from penstock.model.splits import MAX_SPLIT_ROWS
from penstock.model.tenancy import DEFAULT

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_RETRY_S = 60.0
MAX_RETRY_S = 86_400.0
PATTERN_SIGNS = "*?["

ROWS_PER_PARTITION = 524_288
"""Eight whole batches of history: a task costs something, however little it reads."""

Use = Literal["read", "readStream", "write", "writeStream"]
LogName = Literal["records", "journal"]


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """The broker's address, how long to wait for a broker that does not answer, and the tenant and
    namespace of topics, which are the default ones if they are empty."""

    url: str = DEFAULT_URL
    token: str = field(default="", repr=False)
    retry_s: float = DEFAULT_RETRY_S
    tenant: str = ""
    namespace: str = ""

    @classmethod
    def of(
        cls,
        url: str | None = None,
        token: str | None = None,
        retry_s: float = DEFAULT_RETRY_S,
        *,
        tenant: str | None = None,
        namespace: str | None = None,
    ) -> BrokerSettings:
        """Takes what is None from the environment, as the options do."""
        chosen = {"url": url, "token": token, "tenant": tenant, "namespace": namespace}
        given = {name: value for name, value in chosen.items() if value is not None}
        return cls(**_read(given, _BROKER), retry_s=retry_s)

    def named_scope(self) -> dict[str, str]:
        """Returns the tenant and namespace that are not the default ones, for the offsets in a
        checkpoint."""
        named = {"tenant": self.tenant, "namespace": self.namespace}
        return {what: name for what, name in named.items() if name not in ("", DEFAULT)}

    def check_scope(self, offset: Mapping[str, Any]) -> None:
        """Raises if the offset is of a query that read the topics of somebody else: they may have
        the same names."""
        read = {what: offset[what] for what in ("tenant", "namespace") if what in offset}
        if read != self.named_scope():
            of = "/".join(read.get(what, DEFAULT) for what in ("tenant", "namespace"))
            raise InvalidArgument(
                f"the checkpoint is of a query that read {of}; with another tenant or namespace, "
                "use a checkpoint, or a lake, of its own"
            )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The start or the end of a read: a time, offsets by topic and partition, or `default`, which
    is also used for partitions that `offsets` does not have."""

    default: Literal["earliest", "latest"]
    time_ms: int | None = None
    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    position: int | None = None
    """A position in the journal, which has no partitions."""


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
    """The same as `fail_on_data_loss` if it is None."""
    group: str = ""
    pushdown: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use | None = None) -> SourceSettings:
        """`use` is None while Spark asks only for the schema."""
        given = _named(options, _SOURCE, use)
        values = _read(given, _SOURCE)
        log: LogName = values.get("log", "records")
        for what, member in (("starting", "start"), ("ending", "end")):
            bound = _bound(what, values, log, EARLIEST if member == "start" else LATEST)
            if bound is not None:
                values[member] = bound
        _check_order(values.get("start", EARLIEST), values.get("end", LATEST))
        if log == "journal":
            if "topic" in given:
                raise InvalidArgument(
                    "option topic has no meaning with log=journal, which has the events of all "
                    "topics: filter its rows"
                )
            if values.get("group", ARCHIVE_GROUP) != ARCHIVE_GROUP:
                raise InvalidArgument(
                    f"option group: {values['group']!r} is not allowed; with log=journal it takes "
                    f"{ARCHIVE_GROUP!r} only"
                )
            if "group" in values and (values.get("tenant") or values.get("namespace")):
                raise InvalidArgument(
                    "option group has no meaning with log=journal and tenant or namespace: the "
                    "broker knows one archived position for the rows of all tenants"
                )
        elif "topics" not in values:
            raise _SOURCE["topic"].missing()
        if use == "read" and values.get("start") == LATEST:
            raise InvalidArgument(
                "option startingOffsets: 'latest' is where a batch read ends; it takes earliest "
                "or offsets (readStream takes latest too)"
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
    """If it is None, the txn has one batch only."""

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use) -> SinkSettings:
        given = _named(options, _SINK, use)
        if "topic" in given and "cache" in given:
            raise InvalidArgument("options topic and cache exclude each other: rows go to one")
        if "txnBatch" in given and "txn" not in given:
            raise InvalidArgument("option txnBatch counts the batches of a txn: name it too")
        return cls(**_read(given, _SINK))


# -- kinds of values -------------------------------------------------------------------------------


def _url(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise WrongValue from None
    if parts.username is not None or parts.password is not None:
        raise WrongValue("has credentials in it: give the token in the option token")
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise WrongValue
    if parts.query or parts.fragment or not (text.isascii() and text.isprintable()):
        raise WrongValue
    return text.strip().rstrip("/")


def _token(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise WrongValue("has characters that a header cannot carry")
    return text


def _column_name(text: str) -> str:
    if not text:
        raise WrongValue
    return text


def _offsets(text: str) -> str | int | dict[str, dict[int, int]]:
    """`earliest`, `latest`, the journal's position, or offsets by topic and partition."""
    word = text.strip()
    if word.lower() in ("earliest", "latest"):
        return word.lower()
    if word.isdigit():
        return _offset(int(word))
    try:
        given = json.loads(word)
    except ValueError:
        raise WrongValue from None
    if not isinstance(given, dict):
        raise WrongValue
    if set(given) == {"journal"} and isinstance(given["journal"], int):
        return _offset(given["journal"])
    return {topic: _partitions(topic, partitions) for topic, partitions in given.items()}


def _partitions(topic: str, partitions: object) -> dict[int, int]:
    if not isinstance(partitions, dict):
        raise WrongValue(
            f"has no partitions for topic {topic!r}: write {{{json.dumps(topic)}: {{}}}}"
        )
    return {_NUMBER.parse(partition): _offset(offset) for partition, offset in partitions.items()}


def _offset(offset: object) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= 2**63 - 1:
        raise WrongValue
    return offset


_NUMBER = whole_number(0, 2**63 - 1)


def _bound(what: str, values: dict[str, Any], log: LogName, usual: Bound) -> Bound | None:
    """Takes the two options that can set a bound out of the values."""
    time_ms = values.pop(f"{what}_timestamp", None)
    offsets = values.pop(f"{what}_offsets", None)
    option = f"option {what}Offsets"
    if time_ms is not None and offsets is not None:
        raise InvalidArgument(f"{option} and {what}Timestamp exclude each other: give one of them")
    if time_ms is not None:
        return Bound(default=usual.default, time_ms=time_ms)
    if offsets is None:
        return None
    if isinstance(offsets, str):
        return EARLIEST if offsets == "earliest" else LATEST
    if isinstance(offsets, int):
        if log != "journal":
            raise InvalidArgument(f"{option}: a single number is a position of log=journal")
        return Bound(default=usual.default, position=offsets)
    if log == "journal":
        raise InvalidArgument(f"{option}: log=journal has one position, like 123, and no topics")
    return Bound(default=usual.default, offsets=offsets)


def _check_order(start: Bound, end: Bound) -> None:
    """Refuses a read that ends before it begins: it would have no rows, and the user would not see
    why. A read that ends where it begins is allowed: there may be nothing new to read."""
    if start.time_ms is not None and end.time_ms is not None and end.time_ms <= start.time_ms:
        raise InvalidArgument(
            "option endingTimestamp is not after startingTimestamp: there can be no rows"
        )
    for name, first, last in _offsets_in_both(start, end):
        if last < first:
            raise InvalidArgument(
                f"option endingOffsets is below startingOffsets: {name} would be read from "
                f"{first} to {last}"
            )


def _offsets_in_both(start: Bound, end: Bound) -> Iterator[tuple[str, int, int]]:
    if start.position is not None and end.position is not None:
        yield "the journal", start.position, end.position
    for topic, partitions in start.offsets.items():
        ends = end.offsets.get(topic, {})
        for each in sorted(partitions.keys() & ends.keys()):
            yield f"topic {topic!r} partition {each}", partitions[each], ends[each]


# -- the options -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SparkOption(Option):
    """`to` is the member of the settings, `uses` are the operations that have the option, `env` is
    the environment variable that is read where the option is not given."""

    to: str
    uses: tuple[Use, ...]
    env: str = ""


_READ: tuple[Use, ...] = ("read", "readStream")
_WRITE: tuple[Use, ...] = ("write", "writeStream")
_ALL = _READ + _WRITE

_OFFSETS = Kind(
    'earliest, latest or offsets like {"orders":{"0":12}}, of log=journal a position', _offsets
)
_URL = Kind(f"an address like {DEFAULT_URL}", _url)
_TOKEN = Kind("the broker's token", _token)
_TOPICS = list_of(TOPIC, "a topic, several with commas between, or a pattern like orders-*")
_COLUMNS = list_of(Kind("a column", _column_name), "names of columns with commas between")
_COUNT = whole_number(1, MAX_OFFSET)
_TENANT = NAME.described("the name of a tenant")
_NAMESPACE = NAME.described("the name of a namespace")
_GROUP = NAME.described("the name of a group")


def _by_name(*options: _SparkOption) -> dict[str, _SparkOption]:
    return {option.name: option for option in options}


_BROKER = _by_name(
    # An address is not shown in errors: it may have a password in it.
    _SparkOption("url", _URL, to="url", uses=_ALL, env="PENSTOCK_URL", is_secret=True),
    _SparkOption("token", _TOKEN, to="token", uses=_ALL, env="PENSTOCK_TOKEN", is_secret=True),
    _SparkOption("retrySeconds", number(0, MAX_RETRY_S, "seconds"), to="retry_s", uses=_ALL),
    _SparkOption("tenant", _TENANT, to="tenant", uses=_ALL, env="PENSTOCK_TENANT"),
    _SparkOption("namespace", _NAMESPACE, to="namespace", uses=_ALL, env="PENSTOCK_NAMESPACE"),
)
_SOURCE = _BROKER | _by_name(
    _SparkOption("topic", _TOPICS, to="topics", uses=_READ),
    _SparkOption("log", choice("records", "journal"), to="log", uses=_READ),
    _SparkOption("startingOffsets", _OFFSETS, to="starting_offsets", uses=_READ),
    _SparkOption("startingTimestamp", TIME_MS, to="starting_timestamp", uses=_READ),
    _SparkOption("endingOffsets", _OFFSETS, to="ending_offsets", uses=("read",)),
    _SparkOption("endingTimestamp", TIME_MS, to="ending_timestamp", uses=("read",)),
    _SparkOption("columns", _COLUMNS, to="columns", uses=_READ),
    _SparkOption("maxRowsPerTrigger", _COUNT, to="max_rows_per_trigger", uses=("readStream",)),
    _SparkOption("minPartitions", whole_number(1, 100_000), to="min_partitions", uses=_READ),
    _SparkOption(
        "rowsPerPartition", whole_number(1, MAX_SPLIT_ROWS), to="rows_per_partition", uses=_READ
    ),
    _SparkOption("failOnDataLoss", TRUE_OR_FALSE, to="fail_on_data_loss", uses=_READ),
    _SparkOption(
        "failOnDeletedTopic", TRUE_OR_FALSE, to="fail_on_deleted_topic", uses=("readStream",)
    ),
    _SparkOption("group", _GROUP, to="group", uses=("readStream",)),
    _SparkOption("pushdown", TRUE_OR_FALSE, to="pushdown", uses=("read",)),
)
_SINK = _BROKER | _by_name(
    _SparkOption("topic", TOPIC, to="topic", uses=_WRITE),
    _SparkOption("cache", CACHE, to="cache", uses=_WRITE),
    _SparkOption("producerId", NAME, to="producer_id", uses=("writeStream",)),
    _SparkOption("txn", NAME, to="txn", uses=("write",)),
    _SparkOption("txnBatch", _NUMBER, to="txn_batch", uses=("write",)),
)

_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})
"""Options of a streaming query that Spark passes to its sink as well."""


def _named(
    options: Mapping[str, str], known: Mapping[str, _SparkOption], use: Use | None
) -> dict[str, str]:
    """Returns the options by their own spelling, if all of them have a meaning for `use`."""
    spelling = {name.lower(): name for name in known}
    given: dict[str, str] = {}
    for key, value in options.items():
        if use == "writeStream" and key.lower() in _SPARKS_OWN:
            continue
        name = spelling.get(key.lower())
        if name is None:
            raise InvalidArgument(unknown_name(key, known))
        if use is not None and use not in known[name].uses:
            raise InvalidArgument(f"option {name} is for {known[name].uses[0]}, not for {use}")
        given[name] = value
    return given


def _read(given: Mapping[str, str], known: Mapping[str, _SparkOption]) -> dict[str, Any]:
    """Returns the values by their member of the settings."""
    values: dict[str, Any] = {}
    for name, option in known.items():
        if name in given:
            values[option.to] = option.read(given[name])
        elif os.environ.get(option.env):
            values[option.to] = option.read(os.environ[option.env], option.env)
    return values
