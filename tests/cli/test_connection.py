"""How a command finds its broker, and what it says when it does not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from penstock import __version__
from tests.broker_process import SOURCE, BrokerProcess
from tests.cli.conftest import Run, run_penstock

TOKEN = "open-sesame"


def test_a_missing_broker_is_reported_with_how_to_start_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = run_penstock("topic", "list", "--url", url)
    assert done.code == 1
    assert f"no broker answers at {url}" in done.err
    assert "`penstock serve`" in done.err


def test_an_address_that_is_none_is_explained() -> None:
    for url in ("nonsense", "http://", "http://host:port", "ftp://127.0.0.1", "http://["):
        done = run_penstock("topic", "list", "--url", url)
        assert done.code == 1
        assert "http://127.0.0.1:8080" in done.err, url


def test_another_server_is_not_taken_for_a_broker(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        done = run_penstock("topic", "list", "--url", f"http://127.0.0.1:{port}")
        server.terminate()
    assert done.code == 1
    assert "is this a Penstock broker?" in done.err


def test_the_token_comes_from_a_flag_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    broker = BrokerProcess(None, "--token-file", str(file))
    try:
        broker.start()
        url = ("--url", broker.url)
        refused = run_penstock("topic", "list", *url)
        assert refused.code == 1
        assert "the broker wants a token; give it with --token or --token-file" in refused.err
        refused = run_penstock("topic", "list", *url, "--token", "another")
        assert "UNAUTHENTICATED: this is not the broker's token" in refused.err
        assert run_penstock("topic", "list", *url, "--token", TOKEN).code == 0
        assert run_penstock("topic", "list", *url, env={"PENSTOCK_TOKEN": TOKEN}).code == 0
        assert "Authorization: Bearer $(cat " in broker.stdout()
    finally:
        broker.close()


def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    """An option wins over the environment, and there the file over the token."""
    file, wrong = tmp_path / "token", tmp_path / "wrong"
    file.write_text(f"{TOKEN}\n")
    wrong.write_text("another")
    broker = BrokerProcess(None, "--token-file", str(file))
    try:
        broker.start()

        def code(*words: str, **env: str) -> int:
            return run_penstock("topic", "list", "--url", broker.url, *words, env=env).code

        assert code("--token-file", str(file)) == 0
        assert code(PENSTOCK_TOKEN_FILE=str(file)) == 0
        assert code(PENSTOCK_TOKEN_FILE=str(file), PENSTOCK_TOKEN="another") == 0
        assert code(PENSTOCK_TOKEN_FILE=str(wrong), PENSTOCK_TOKEN=TOKEN) == 1
        assert code("--token", TOKEN, PENSTOCK_TOKEN_FILE=str(wrong)) == 0
        assert code("--token-file", str(file), PENSTOCK_TOKEN_FILE=str(wrong)) == 0
        assert code("--token", TOKEN, "--token-file", str(file)) == 2
    finally:
        broker.close()


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    refused = run_penstock("topic", "list", "--token-file", absent)
    assert (refused.code, f"--token-file: [Errno 2] No such file or directory: '{absent}'") == (
        1,
        refused.err.strip().removeprefix("Error: INVALID_ARGUMENT: "),
    )
    refused = run_penstock("topic", "list", env={"PENSTOCK_TOKEN_FILE": absent})
    assert "PENSTOCK_TOKEN_FILE: [Errno 2]" in refused.err


def test_version_of_the_command_and_of_the_broker(penstock: Run) -> None:
    assert penstock("version").out.startswith(f"penstock {__version__} ")
    assert penstock("--version").out == f"penstock {__version__}\n"
    broker = json.loads(penstock("version", "--broker", "--json").out)
    assert broker["version"] == __version__
    assert broker["wal_enabled"] is False
    assert "durability:" in penstock("version", "--broker").out


def test_a_bare_install_is_told_what_to_install() -> None:
    for module in ("click", "rich", "httptools"):
        program = (
            f"import sys; sys.modules['{module}'] = None; sys.argv = ['penstock', 'serve']\n"
            "from penstock.cli.main import main\nmain()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(SOURCE), "PENSTOCK_MEMORY": "1", "PENSTOCK_PORT": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "pip install 'penstock[server]'" in done.stderr
        assert "Traceback" not in done.stderr
