"""What an operator can set, and where each value came from.

In rising order: the profile's default, the configuration file (TOML), the environment
(`PENSTOCK_<NAME>`), a flag. Every name is spelled the same in all of them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.api.durability import FsyncMode
from penstock.model.errors import InvalidArgument
from penstock.model.limits import CONTRACT_LIMITS, KIB, MIB, Limits
from penstock.model.units import parse_duration_ms, parse_size
from penstock.server.http.answer_budget import ANSWER_MEMORY_BYTES, STALLED_TIMEOUT_MS

Profile = Literal["work", "contract"]

_work = Limits()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are the profile `work`."""

    host: str = "127.0.0.1"
    port: int = 8080
    data_dir: str = "penstock-data"
    memory: bool = False
    profile: Profile = "work"
    fsync: FsyncMode = "commit"
    fsync_interval_ms: int = 100
    segment_bytes: int = 64 * MIB
    reserve_bytes: int = 64 * MIB
    max_in_flight: int = _work.max_in_flight
    max_partition_msgs: int = _work.max_partition_msgs
    max_partition_bytes: int = _work.max_partition_bytes
    max_message_bytes: int = _work.max_message_bytes
    max_body_bytes: int = _work.max_body_bytes
    memory_bytes: int = _work.memory_bytes
    tail_bytes: int = _work.tail_bytes
    lease_ms: int = _work.lease_ms
    retry_backoff_ms: int = _work.retry_backoff_ms
    retry_max_backoff_ms: int = _work.retry_max_backoff_ms
    idempotency_ttl_ms: int = _work.idempotency_ttl_ms
    max_idempotency_keys: int = _work.max_idempotency_keys
    event_queue_depth: int = _work.event_queue_depth
    event_queue_bytes: int = _work.event_queue_bytes
    pub_queue_depth: int = _work.pub_queue_depth
    publish_queue_wait_timeout_ms: int = _work.publish_queue_wait_timeout_ms
    pub_workers_per_conn: int = _work.pub_workers_per_conn
    lag_alert_events: int = _work.lag_alert_events
    disconnect_slow_ms: int = _work.disconnect_slow_ms
    cache_memory_bytes: int = _work.cache_memory_bytes
    journal_retention_ms: int = _work.journal_retention_ms
    journal_after_archive: bool = _work.journal_after_archive
    max_staged_bytes: int = _work.max_staged_bytes
    answer_memory_bytes: int = ANSWER_MEMORY_BYTES
    stalled_timeout_ms: int = STALLED_TIMEOUT_MS
    ws_ping_ms: int = 20_000
    control_plane: str = ""
    control_plane_token_file: str = ""
    registry_sync_ms: int = 1000
    router: str = ""
    router_timeout_ms: int = 500
    token: str = ""
    token_file: str = ""
    allowed_origins: tuple[str, ...] = ()
    allow_insecure_bind: bool = False
    request_timeout_ms: int = 30_000
    idle_timeout_ms: int = 600_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


SECRET = frozenset({"token"})
MINIMUM = {
    "port": 0,
    "idempotency_ttl_ms": 1,
    "segment_bytes": 64 * KIB,
    "reserve_bytes": 0,
    "memory_bytes": MIB,
    "tail_bytes": 0,
    "fsync_interval_ms": 1,
    "lag_alert_events": 0,
    "disconnect_slow_ms": 0,
    "journal_retention_ms": 0,
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}

Origins = dict[str, str]


def load_settings(
    flags: Mapping[str, Any], config: str = "", environ: Mapping[str, str] | None = None
) -> tuple[Settings, Origins]:
    """The settings in force and, for each name, where its value came from."""
    environ = os.environ if environ is None else environ
    config = config or environ.get("PENSTOCK_CONFIG", "")
    sources: list[tuple[str, Mapping[str, Any]]] = []
    if config:
        sources.append((f"file {config}", _read_file(config)))
    sources.append(("environment", _read_environment(environ)))
    sources.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    values: dict[str, Any] = {}
    origins: Origins = {}
    for origin, found in sources:
        for name, value in found.items():
            values[name] = _parse(name, value, origin)
            origins[name] = origin
    _add_profile(values, origins)
    settings = _build(values)
    return settings, {name: origins.get(name, "default") for name in Settings.__struct_fields__}


def read_token(settings: Settings) -> str:
    """The static bearer token, from its file or the environment; empty means no token."""
    if not settings.token_file:
        return _check_token("token", settings.token)
    return _read_token_file("token_file", settings.token_file)


def read_control_plane_token(settings: Settings) -> str:
    """What the control plane wants to see; empty means nothing."""
    if not settings.control_plane_token_file:
        return ""
    return _read_token_file("control_plane_token_file", settings.control_plane_token_file)


def _read_token_file(name: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{name}: {error}") from error
    if not token:
        raise InvalidArgument(f"{name} {path} is empty")
    return _check_token(f"{name} {path}", token)


def _check_token(source: str, token: str) -> str:
    """Refuses a token that no client can send; the message must not quote it."""
    if not (token.isascii() and token.isprintable()):
        raise InvalidArgument(
            f"{source}: a token is one line of printable ASCII characters; a header cannot carry "
            "this one"
        )
    return token


def _add_profile(values: dict[str, Any], origins: Origins) -> None:
    if values.get("profile") == "contract":
        for name in Limits.__struct_fields__:
            value = getattr(CONTRACT_LIMITS, name)
            if name not in values and value != getattr(_work, name):
                values[name] = value
                origins[name] = "profile contract"


def _build(values: dict[str, Any]) -> Settings:
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"settings: {error}") from error
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        least = MINIMUM.get(name, 1)
        if type(value) is int and value < least:
            raise InvalidArgument(f"{name} must be {least} or more, not {value}")
    if settings.port > 65535:
        raise InvalidArgument(f"port must be at most 65535, not {settings.port}")
    origins = tuple(_browser_origin(origin) for origin in settings.allowed_origins)
    return msgspec.structs.replace(settings, allowed_origins=origins)


def _browser_origin(text: str) -> str:
    """The origin as browsers send it: in lower case, without a slash at the end and without the
    scheme's own port. Raises InvalidArgument for what no browser sends."""
    if text == "null":
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None or int(found["port"] or 0) > 65535:
        raise InvalidArgument(
            f"allowed_origins: {text!r} is not an origin; write scheme, host and perhaps port, "
            "such as https://app.example or http://localhost:3000; names outside ASCII as xn--…"
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"config {path}: {error}") from error


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: environ[f"PENSTOCK_{name.upper()}"]
        for name in Settings.__struct_fields__
        if f"PENSTOCK_{name.upper()}" in environ
    }


def _parse(name: str, value: Any, origin: str) -> Any:
    """Texts become what the setting is; a value that is no text is checked as it is."""
    if name not in Settings.__struct_fields__:
        raise InvalidArgument(f"unknown setting {name!r} in {origin}")
    kind = type(_DEFAULTS[name])
    if kind is tuple and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str) or kind is str:
        return value
    if kind is bool and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if kind is int:
        number = _parse_number(name, value)
        if number is not None:
            return number
    raise InvalidArgument(f"{name} from {origin}: {value!r} is not {_expected(name, kind)}")


def _parse_number(name: str, text: str) -> int | None:
    """A duration for a setting in milliseconds, a size for any other. A number below zero is one
    too: the check of the least value refuses it and names that value."""
    if _BELOW_ZERO.fullmatch(text):
        return int(text)
    return parse_duration_ms(text) if name.endswith("_ms") else parse_size(text)


def _expected(name: str, kind: type) -> str:
    if kind is bool:
        return "yes or no"
    if name.endswith("_ms"):
        return "a whole number of milliseconds or a duration such as 500ms, 5s or 7d"
    if name.endswith("_bytes"):
        return "a whole number of bytes or a size such as 64MiB"
    return "a whole number"


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_BELOW_ZERO = re.compile(r"\s*-\d{1,15}\s*")
_DEFAULTS = msgspec.structs.asdict(Settings())
