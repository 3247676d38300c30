"""Settings: defaults, file, environment and flags, in rising order, each with its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.model.errors import InvalidArgument
from penstock.model.limits import CONTRACT_LIMITS, GIB, MIB, Limits
from penstock.server.settings import (
    Settings,
    load_settings,
    read_control_plane_token,
    read_token,
)

NOTHING: dict[str, str] = {}


def load(
    flags: dict[str, Any] | None = None, config: str = "", environ: dict[str, str] | None = None
) -> tuple[Settings, dict[str, str]]:
    return load_settings(flags or {}, config, environ or NOTHING)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text('port = 1111\nhost = "127.0.0.2"\nfsync = "none"\nmemory = true\n')
    return path


def test_the_defaults_are_the_profile_work() -> None:
    settings, origins = load()
    assert settings == Settings()
    assert settings.limits() == Limits()
    assert set(origins.values()) == {"default"}
    assert set(origins) == set(Settings.__struct_fields__)


def test_a_flag_beats_the_environment_which_beats_the_file(file: Path) -> None:
    environ = {"PENSTOCK_PORT": "2222", "PENSTOCK_HOST": "127.0.0.3"}
    settings, origins = load({"port": "3333"}, str(file), environ)
    assert (settings.port, origins["port"]) == (3333, "flag")
    assert (settings.host, origins["host"]) == ("127.0.0.3", "environment")
    assert (settings.fsync, origins["fsync"]) == ("none", f"file {file}")
    assert settings.memory is True


def test_a_flag_of_none_says_nothing(file: Path) -> None:
    settings, origins = load({"port": None, "memory": None}, str(file))
    assert (settings.port, settings.memory) == (1111, True)
    assert origins["port"] == f"file {file}"


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    settings, _ = load(environ={"PENSTOCK_CONFIG": str(file)})
    assert settings.port == 1111


def test_the_profile_contract_sets_the_documents_limits_and_no_others() -> None:
    settings, origins = load({"profile": "contract"})
    assert settings.limits() == CONTRACT_LIMITS
    assert origins["max_in_flight"] == "profile contract"
    assert origins["lease_ms"] == "default"


def test_a_value_of_ones_own_beats_the_profile() -> None:
    settings, origins = load({"profile": "contract"}, environ={"PENSTOCK_MAX_IN_FLIGHT": "9"})
    assert (settings.max_in_flight, origins["max_in_flight"]) == (9, "environment")
    assert settings.max_partition_msgs == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("20", 20), ("1KiB", 1024), ("8 MiB", 8 * MIB), ("2gb", 2 * GIB), ("5B", 5)],
)
def test_sizes_may_have_a_unit(text: str, size: int) -> None:
    assert load({"max_partition_bytes": text})[0].max_partition_bytes == size


@pytest.mark.parametrize(
    ("text", "ms"),
    [("20", 20), ("500ms", 500), ("5s", 5000), (" 2 m ", 120_000), ("1h", 3_600_000)],
)
def test_settings_in_milliseconds_take_durations(text: str, ms: int, tmp_path: Path) -> None:
    assert load(environ={"PENSTOCK_STALLED_TIMEOUT_MS": text})[0].stalled_timeout_ms == ms
    file = tmp_path / "penstock.toml"
    file.write_text(f'stalled_timeout_ms = "{text}"\n')
    assert load(config=str(file))[0].stalled_timeout_ms == ms


@pytest.mark.parametrize("name", [n for n in Settings.__struct_fields__ if n.endswith("_ms")])
def test_no_setting_in_milliseconds_takes_a_size(name: str) -> None:
    assert getattr(load({name: "7d"})[0], name) == 7 * 86_400_000
    with pytest.raises(InvalidArgument, match=f"{name} from flag: '1KiB' is not"):
        load({name: "1KiB"})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("YES", True), ("0", False), ("off", False)]
)
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load(environ={"PENSTOCK_MEMORY": text})[0].memory is value


def test_origins_are_a_list_or_a_text_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('allowed_origins = ["https://a.example", "https://b.example"]\n')
    expected = ("https://a.example", "https://b.example")
    assert load(config=str(file))[0].allowed_origins == expected
    environ = {"PENSTOCK_ALLOWED_ORIGINS": "https://a.example, https://b.example,"}
    assert load(environ=environ)[0].allowed_origins == expected


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("HTTPS://App.Example/", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:080/", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("app://-", "app://-"),
        ("null", "null"),
    ],
)
def test_an_origin_is_compared_as_browsers_send_it(given: str, sent: str) -> None:
    assert load({"allowed_origins": given})[0].allowed_origins == (sent,)


@pytest.mark.parametrize(
    "given",
    [
        "*",
        "app.example",
        "https://",
        "https://*.example",
        "https://app.example/page",
        "https://app.example//",
        "https://user@app.example",
        "https://app.example:65536",
        "https://\u00e4pp.example",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(InvalidArgument, match=r"allowed_origins from flag: .* origins: .* is none"):
        load({"allowed_origins": given})


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"port": "65536"}, "port from flag: '65536' is not allowed; .* whole number, 0 to 65535"),
        ({"port": "-1"}, "port from flag: '-1' is not allowed; .* 0 to 65535"),
        ({"stalled_timeout_ms": "-1"}, "stalled_timeout_ms from flag: '-1' .* at least 1ms"),
        ({"stalled_timeout_ms": "64MiB"}, "milliseconds or a duration such as 500ms, 5s or 7d"),
        ({"memory_bytes": "5s"}, "bytes or a size such as 64MiB"),
        ({"max_in_flight": "5s"}, "'5s' is not allowed; it takes a whole number, at least 1$"),
        ({"port": "1.5"}, "port"),
        ({"port": 1.5}, "port"),
        ({"max_in_flight": "0"}, "max_in_flight from flag: '0' is not allowed; .* at least 1$"),
        ({"max_partition_bytes": "1 furlong"}, "max_partition_bytes"),
        ({"fsync": "perhaps"}, "fsync"),
        ({"profile": "play"}, "profile"),
        ({"memory": "perhaps"}, "memory"),
        ({"segment_bytes": "1KiB"}, "segment_bytes"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        load(flags)


def test_an_unknown_name_in_the_file_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("colour = 'red'\n")
    with pytest.raises(InvalidArgument, match=r"colour.*penstock\.toml"):
        load(config=str(file))


def test_a_variable_of_the_environment_that_is_no_setting_is_ignored() -> None:
    assert load(environ={"PENSTOCK_URL": "http://127.0.0.1:1"})[0] == Settings()


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"penstock\.toml"):
        load(config=str(file))
    with pytest.raises(InvalidArgument):
        load(config=str(tmp_path / "none.toml"))


def test_the_token_comes_from_its_file_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of the file\n")
    environ = {"PENSTOCK_TOKEN": "of the environment"}
    assert read_token(load(environ=environ)[0]) == "of the environment"
    assert read_token(load({"token_file": str(file)}, environ=environ)[0]) == "of the file"
    assert read_token(load()[0]) == ""


def test_a_token_file_that_is_empty_or_absent_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("\n")
    for path in (file, tmp_path / "none"):
        with pytest.raises(InvalidArgument, match="token_file"):
            read_token(load({"token_file": str(path)})[0])


@pytest.mark.parametrize("text", ["bad token\nxx", "schlüssel", "tab\tbed", "bell\a"])
def test_a_token_that_no_client_can_send_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    for settings in ({"token_file": str(file)}, {"token": text}):
        with pytest.raises(InvalidArgument, match=r"token.*printable ASCII") as refused:
            read_token(load(settings)[0])
        assert text not in refused.value.message


def test_a_principals_token_is_not_taken_for_the_brokers_own(tmp_path: Path) -> None:
    """A shell that is set up for a client must not make that client an admin."""
    file = tmp_path / "token"
    file.write_text("pst_0b7d3f2a9c1e4d58_secret")
    for environ in (
        {"PENSTOCK_TOKEN_FILE": str(file)},
        {"PENSTOCK_TOKEN": "pst_0b7d3f2a9c1e4d58_secret"},
    ):
        settings, _ = load_settings({}, environ=environ)
        with pytest.raises(InvalidArgument, match="made for one principal") as refused:
            read_token(settings)
        assert "secret" not in refused.value.message


def test_the_control_planes_token_comes_from_its_file_or_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" sesame\n")
    assert read_control_plane_token(load()[0]) == ""
    settings, _ = load({"control_plane_token_file": str(file)})
    assert read_control_plane_token(settings) == "sesame"
    for text in ("", "two\nlines", "schlüssel"):
        file.write_text(text)
        with pytest.raises(InvalidArgument, match="control_plane_token_file") as refused:
            read_control_plane_token(settings)
        assert not text or text not in refused.value.message


def test_a_cluster_may_accept_less_by_name() -> None:
    settings, _ = load(environ={"PENSTOCK_CLUSTER_ACCEPT": "replicas, unread-sync"})
    assert settings.cluster_accept == ("replicas", "unread-sync")
