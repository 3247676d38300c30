"""The options of format("penstock"): read once, on the driver, into typed settings.

Invariant: an option that is unknown, has a wrong value or has no meaning for the operation is
refused by its name; none is ignored. Names are case-insensitive, as Spark's own are. The
settings travel to the executors with the token in them, but no text made of them shows the token.
Must not know what the options are for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from penstock.client.addresses import addresses_of
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
from penstock.model.scopes import Scope
from penstock.model.splits import MAX_SPLIT_ROWS
from penstock.model.tenancy import DEFAULT
from penstock.spark.bounds import (
    EARLIEST,
    LATEST,
    NUMBER,
    Bound,
    LogName,
    bound_of,
    check_order,
    parse_offsets,
)

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_RETRY_S = 60.0
MAX_RETRY_S = 86_400.0
PATTERN_SIGNS = "*?["

ROWS_PER_PARTITION = 524_288
"""Eight whole batches of history: a task costs something, however little it reads."""

Use = Literal["read", "readStream", "write", "writeStream"]


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

    def scope(self) -> Scope:
        return self.tenant or DEFAULT, self.namespace or DEFAULT

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
class SourceSettings(BrokerSettings):
    log: LogName = "records"
    topics: tuple[str, ...] = ()
    """The topics to read or, if `log` is `events`, the streams."""
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

    @property
    def noun(self) -> str:
        return "stream" if self.log == "events" else "topic"

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use | None = None) -> SourceSettings:
        """Reads the options. `use` is None while Spark asks only for the schema."""
        given = _named(options, _SOURCE, use)
        values = _read(given, _SOURCE)
        log = _log_of(given, values)
        for what, member in (("starting", "start"), ("ending", "end")):
            bound = bound_of(what, values, log, EARLIEST if member == "start" else LATEST)
            if bound is not None:
                values[member] = bound
        check_order(values.get("start", EARLIEST), values.get("end", LATEST), log)
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
            raise InvalidArgument("option topic, stream or cache is required: what is to be read")
        if use == "read" and values.get("start") == LATEST:
            raise InvalidArgument(
                "option startingOffsets: 'latest' is where a batch read ends; it takes earliest "
                "or offsets (readStream takes latest too)"
            )
        return cls(**values)


def _log_of(given: Mapping[str, str], values: dict[str, Any]) -> LogName:
    """Returns the log that the options name. The streams take the place of the topics."""
    if "stream" in given:
        for other in ("topic", "log"):
            if other in given:
                raise InvalidArgument(f"options stream and {other} exclude each other: give one")
        values["topics"] = values.pop("streams")
        values["log"] = "events"
    log: LogName = values.get("log", "records")
    return log


@dataclass(frozen=True, kw_only=True)
class CacheSettings(BrokerSettings):
    """A batch read of a cache."""

    cache: str = ""
    """tenant/namespace/cache"""
    columns: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use | None = None) -> CacheSettings:
        if use == "readStream":
            raise InvalidArgument(
                "option cache is for read, not for readStream: a cache has no history that a query "
                "could follow. Read it again for each batch, in foreachBatch, or follow its "
                "changes with client.cache(name).watch()"
            )
        for name in _SOURCE.keys() - _CACHE_SOURCE.keys():
            if name.lower() in map(str.lower, options):
                raise InvalidArgument(
                    f"option {name} has no meaning with cache, which is read as a whole"
                )
        values = _read(_named(options, _CACHE_SOURCE, use), _CACHE_SOURCE)
        return cls(**_with_full_paths(values))


def reads_cache(options: Mapping[str, str]) -> bool:
    return any(name.lower() == "cache" for name in options)


@dataclass(frozen=True, kw_only=True)
class SinkSettings(BrokerSettings):
    topic: str = ""
    cache: str = ""
    """tenant/namespace/cache"""
    stream: str = ""
    """tenant/namespace/stream"""
    producer_id: str = ""
    txn: str = ""
    txn_batch: int | None = None
    """The number of the batch in the txn. None: the txn has one batch only."""

    @classmethod
    def from_options(cls, options: Mapping[str, str], use: Use) -> SinkSettings:
        given = _named(options, _SINK, use)
        targets = [name for name in ("topic", "cache", "stream") if name in given]
        if len(targets) > 1:
            raise InvalidArgument(
                f"give only one of the options {' and '.join(targets)}: rows go to one target"
            )
        if "txnBatch" in given and "txn" not in given:
            raise InvalidArgument("option txnBatch needs option txn, whose batches it numbers")
        return cls(**_with_full_paths(_read(given, _SINK)))


def _with_full_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Adds tenant and namespace to the name of a cache or a stream that has none."""
    scope = [values.get(what) or DEFAULT for what in ("tenant", "namespace")]
    for kind in ("cache", "stream"):
        if kind in values and "/" not in values[kind]:
            values[kind] = "/".join((*scope, values[kind]))
    return values


# -- kinds of values -------------------------------------------------------------------------------


def _urls(text: str) -> str:
    """Checks the addresses of one broker, or those of a cluster between commas."""
    given = ",".join(_url(each) for each in text.split(","))
    try:
        addresses_of(given)
    except InvalidArgument as error:
        raise WrongValue(f"is refused: {error.message}") from None
    return given


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


def _cache_path(text: str) -> str:
    return str(NAME.parse(text) if "/" not in text else CACHE.parse(text))


def _stream_name(text: str) -> str:
    if "/" in text:
        raise WrongValue("has a slash in it: tenant and namespace are options of their own")
    return str(NAME.parse(text))


def _column_name(text: str) -> str:
    if not text:
        raise WrongValue
    return text


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
    'earliest, latest or offsets like {"orders":{"0":12}}, of streams {"orders":12}, of '
    "log=journal a position",
    parse_offsets,
)
_URL = Kind(f"an address like {DEFAULT_URL}", _urls)
_TOKEN = Kind("the broker's token", _token)
_TOPICS = list_of(TOPIC, "a topic, several with commas between, or a pattern like orders-*")
_STREAMS = list_of(TOPIC, "a stream, several with commas between, or a pattern like orders-*")
_STREAM = Kind("the name of a durable stream", _stream_name)
_CACHE_PATH = Kind("a cache, as its name or as tenant/namespace/cache", _cache_path)
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
    _SparkOption("stream", _STREAMS, to="streams", uses=_READ),
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
_CACHE_SOURCE = _BROKER | _by_name(
    _SparkOption("cache", _CACHE_PATH, to="cache", uses=("read",)),
    _SparkOption("columns", _COLUMNS, to="columns", uses=("read",)),
)
_SINK = _BROKER | _by_name(
    _SparkOption("topic", TOPIC, to="topic", uses=_WRITE),
    _SparkOption("cache", _CACHE_PATH, to="cache", uses=_WRITE),
    _SparkOption("stream", _STREAM, to="stream", uses=_WRITE),
    _SparkOption("producerId", NAME, to="producer_id", uses=("writeStream",)),
    _SparkOption("txn", NAME, to="txn", uses=("write",)),
    _SparkOption("txnBatch", NUMBER, to="txn_batch", uses=("write",)),
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
