"""The broker's settings, and where each value came from.

A value is taken from, in rising order: the profile's default, the configuration file (TOML), the
environment (`PENSTOCK_<NAME>`), a flag. Every name is spelled the same in all of them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from penstock.api.durability import FsyncMode
from penstock.model.errors import InvalidArgument
from penstock.model.limits import CONTRACT_LIMITS, GIB, KIB, MIB, Limits
from penstock.model.options import (
    TEXT,
    YES_OR_NO,
    Kind,
    Option,
    WrongValue,
    choice,
    duration_ms,
    list_of,
    size_bytes,
    unknown_name,
    whole_number,
)
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
    audit_retention_ms: int = _work.audit_retention_ms
    answer_memory_bytes: int = ANSWER_MEMORY_BYTES
    stalled_timeout_ms: int = STALLED_TIMEOUT_MS
    ws_ping_ms: int = 20_000
    control_plane: str = ""
    control_plane_token_file: str = ""
    registry_sync_ms: int = 1000
    cluster: str = ""
    cluster_name: str = "penstock"
    name: str = ""
    advertise: str = ""
    cluster_lease_ms: int = 3000
    cluster_stream_bytes: int = 10 * GIB
    cluster_staged_bytes: int = 0
    cluster_copies: int = 2
    cluster_copy_bytes: int = 32 * MIB
    cluster_monitors: tuple[str, ...] = ()
    cluster_accept: tuple[str, ...] = ()
    forward_wait_ms: int = 5000
    cluster_ca: str = ""
    router: str = ""
    router_timeout_ms: int = 500
    token: str = ""
    token_file: str = ""
    allowed_origins: tuple[str, ...] = ()
    allow_insecure_bind: bool = False
    access_control: bool = False
    jwt_keys: str = ""
    jwt_issuer: str = ""
    jwt_audience: str = ""
    jwt_algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    jwt_leeway_ms: int = 30_000
    jwt_refresh_ms: int = 300_000
    jwt_principal_claim: str = "sub"
    jwt_tenant_claim: str = "tenant_id"
    jwt_namespace_claim: str = "namespace"
    jwt_roles_claim: str = "roles"
    jwt_admin_role: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_auth: Literal["required", "optional"] = "required"
    request_timeout_ms: int = 30_000
    idle_timeout_ms: int = 600_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


SECRET = frozenset({"token", "cluster"})
MINIMUM = {
    "port": 0,
    "segment_bytes": 64 * KIB,
    "reserve_bytes": 0,
    "cluster_staged_bytes": 0,
    "memory_bytes": MIB,
    "tail_bytes": 0,
    "lag_alert_events": 0,
    "disconnect_slow_ms": 0,
    "journal_retention_ms": 0,
    "audit_retention_ms": 0,
    "jwt_leeway_ms": 0,
    "jwt_refresh_ms": 1000,
}
MAX_PORT = 65535
PRINCIPAL_TOKEN = "pst_"
"""The beginning of tokens that the broker makes."""
JWT_ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
    "HS256",
)  # fmt: skip
"""The algorithms that may be allowed. `none` is not one of them."""

RESOURCE_TABLES = ("tenants", "quotas", "streams", "caches", "topics")
"""Tables of the configuration file that declare resources (declarations.py), not settings."""

Origins = dict[str, str]


def load_settings(
    flags: Mapping[str, Any], config: str = "", environ: Mapping[str, str] | None = None
) -> tuple[Settings, Origins]:
    """Returns the settings in force and, for each name, where its value came from."""
    environ = os.environ if environ is None else environ
    config = config_file(config, environ)
    sources: list[tuple[str, Mapping[str, Any]]] = []
    if config:
        found = read_file(config)
        settings = {name: value for name, value in found.items() if name not in RESOURCE_TABLES}
        sources.append((f"file {config}", settings))
    sources.append(("environment", _read_environment(environ)))
    sources.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    options = _options()
    values: dict[str, Any] = {}
    origins: Origins = {}
    for origin, given in sources:
        for name, value in given.items():
            if name not in options:
                raise InvalidArgument(f"{unknown_name(name, options, 'setting')} (in {origin})")
            values[name] = _read(options[name], value, origin)
            origins[name] = origin
    _add_profile(values, origins)
    return Settings(**values), {
        name: origins.get(name, "default") for name in Settings.__struct_fields__
    }


def config_file(config: str, environ: Mapping[str, str] | None = None) -> str:
    """Returns the path of the configuration file: the one given, else PENSTOCK_CONFIG's."""
    return config or (os.environ if environ is None else environ).get("PENSTOCK_CONFIG", "")


def read_token(settings: Settings) -> str:
    """The static bearer token, from its file or the environment; empty means no token."""
    if settings.token_file:
        token = _read_token_file("token_file", settings.token_file)
    else:
        token = _check_token("token", settings.token)
    if token.startswith(PRINCIPAL_TOKEN):
        source = "token_file" if settings.token_file else "token"
        raise InvalidArgument(
            f"{source}: this token was made for one principal, who would become an admin with it. "
            "If it is for clients, unset PENSTOCK_TOKEN and PENSTOCK_TOKEN_FILE for the broker"
        )
    return token


def read_control_plane_token(settings: Settings) -> str:
    """The bearer token for the control plane; empty means no token."""
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


def _browser_origin(text: str) -> str:
    """Returns the origin as browsers send it: in lower case, without a slash at the end and without
    the scheme's own port."""
    if text == "null":
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None or int(found["port"] or 0) > MAX_PORT:
        raise WrongValue(f"is not a list of origins: {text!r} is none")
    scheme, host, port = found["scheme"], found["host"], found["port"]
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def read_file(path: str) -> dict[str, Any]:
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


def _read(option: Option, value: Any, origin: str) -> Any:
    """Reads a text. Checks a value of the configuration file, or of a flag, that is no text."""
    label = f"{option.name} from {origin}"
    if isinstance(value, str):
        return option.read(value, label)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = tuple(value)
    if type(value) is not type(_DEFAULTS[option.name]):
        raise option.wrong(value, label)
    return value if isinstance(value, bool) else option.read(_as_text(value), label)


def _as_text(value: int | tuple[str, ...]) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_DEFAULTS = msgspec.structs.asdict(Settings())


def _kind(name: str, words: tuple[str, ...]) -> Kind:
    """The kind of a setting, by its type and the unit at the end of its name."""
    default = _DEFAULTS[name]
    least = MINIMUM.get(name, 1)
    if words and isinstance(default, str):
        return choice(*words)
    if isinstance(default, str):
        return TEXT
    if isinstance(default, bool):
        return YES_OR_NO
    if isinstance(default, tuple):
        return _LISTS.get(name, _BROWSER_ORIGINS)
    if name.endswith("_ms"):
        return duration_ms(least)
    if name.endswith("_bytes"):
        return size_bytes(least)
    return whole_number(least, MAX_PORT if name == "port" else None)


_BROWSER_ORIGINS = list_of(
    Kind("an origin", _browser_origin),
    "origins with commas between: scheme, host and perhaps port, such as https://app.example or "
    "http://localhost:3000; names outside ASCII as xn--…",
    skip_empty=True,
)


def _algorithm(text: str) -> str:
    for known in JWT_ALGORITHMS:
        if known.lower() == text.lower():
            return known
    raise WrongValue(f"has {text!r}, which is none")


_ALGORITHMS = list_of(
    Kind("an algorithm", _algorithm), f"a list of algorithms: {', '.join(JWT_ALGORITHMS)}"
)

_LISTS = {
    "jwt_algorithms": _ALGORITHMS,
    # The cluster refuses names that it does not know, and says what the others mean.
    "cluster_accept": list_of(
        Kind("a name", str.lower), "names with commas between", skip_empty=True
    ),
}


def _options() -> dict[str, Option]:
    hints = get_type_hints(Settings)
    return {
        name: Option(name, _kind(name, get_args(hints[name])), is_secret=name in SECRET)
        for name in _DEFAULTS
    }
